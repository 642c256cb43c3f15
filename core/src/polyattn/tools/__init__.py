"""The commands, and the serving loop behind `polyattn run`."""
