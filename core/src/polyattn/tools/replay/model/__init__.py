"""A whole decoder: everything but attention in plain torch, with Hugging Face's names."""
