"""A fake xFormers: see `polyattn_fakes`."""
