"""Apple Metal: paged attention over MLX."""
