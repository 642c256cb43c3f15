"""A fake flash-attn: see `polyattn_fakes`."""
