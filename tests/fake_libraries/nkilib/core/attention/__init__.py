"""A fake: `find_spec` finds it."""
