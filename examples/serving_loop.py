"""A serving loop in a few lines: prefill one prompt, then decode, over a paged cache."""

from __future__ import annotations

import polyattn
import torch

spec = polyattn.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="float32")
selection = polyattn.select(spec)
print(selection.explain())

group = polyattn.LayerGroup(selection)
layers = [polyattn.Attention(group) for _ in range(2)]
caches = [group.allocate_cache(num_blocks=64) for _ in layers]
block_size = caches[0].block_size
block_table = torch.arange(32, dtype=torch.int32, device=group.torch_device)[None]

context = 0
for new_tokens in (100, 1, 1, 1):
    context += new_tokens
    batch = polyattn.Batch.from_lens([new_tokens], [context], block_table, block_size)
    plan = group.plan(batch)  # once a step, for every layer
    for layer, cache in zip(layers, caches, strict=True):
        query = torch.randn(new_tokens, spec.num_heads, spec.head_size, device=group.torch_device)
        key = torch.randn(new_tokens, spec.num_kv_heads, spec.head_size, device=group.torch_device)
        out = layer(query, key, torch.randn_like(key), cache, plan)
    print(f"{new_tokens} new tokens after {context - new_tokens}: output {tuple(out.shape)}")
