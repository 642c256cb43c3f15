"""A serving loop in a few lines: prefill one prompt, then decode, over a paged cache."""

from __future__ import annotations

import polyattn
import torch

spec = polyattn.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="float32")
selection = polyattn.select(spec)
layer = polyattn.Attention(selection)

cache_spec = selection.cache_spec(num_blocks=64)
cache = cache_spec.allocate(selection.device.torch_device)
block_table = torch.arange(32, dtype=torch.int32)[None]
print(selection.explain())

context = 0
for new_tokens in (100, 1, 1, 1):
    context += new_tokens
    batch = polyattn.Batch.from_lens([new_tokens], [context], block_table, cache_spec.block_size)
    query = torch.randn(new_tokens, spec.num_heads, spec.head_size)
    key = torch.randn(new_tokens, spec.num_kv_heads, spec.head_size)
    value = torch.randn_like(key)
    out = layer(query, key, value, cache, batch)
    print(f"{new_tokens} new tokens after {context - new_tokens}: output {tuple(out.shape)}")
