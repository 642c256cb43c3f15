"""A fake flash-attn: see `polyattn_fake_rocm`."""
