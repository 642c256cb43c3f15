"""The main job: serve a model's attention layers over a request trace, through the public API."""
