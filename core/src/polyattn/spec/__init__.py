"""What does a layer compute? `LayerSpec`: a value, without torch."""
