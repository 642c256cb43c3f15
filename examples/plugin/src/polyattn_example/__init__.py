"""A polyattn plugin to copy."""
