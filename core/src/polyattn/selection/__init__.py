"""Which backend serves which phase, over which cache? The decision tree and its record."""
