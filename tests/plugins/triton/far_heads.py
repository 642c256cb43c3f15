"""Heads of queries, keys and a cache that lie so far apart that int32 names no last one.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Its tensors are files with
holes in the folder that it is called with. Prints how many cases ran.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.families.attention import reference
from polyattn.settings import current_settings
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of
from torch import Tensor

torch.set_num_threads(1)
HEADS, KV_HEADS, SIZE, TOKENS, BLOCK = 8, 4, 16, 20, 16
SPEC = LayerSpec(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="float16", block_size=BLOCK
)


def far(tensor: Tensor, name: str) -> Tensor:
    """Return the same tensor with its heads, the last dimension but one, outermost and far apart."""
    heads, apart = tensor.shape[-2], -(-(1 << 31) // (tensor.shape[-2] - 1))
    path = Path(sys.argv[1]) / name
    whole = torch.from_file(str(path), shared=True, size=heads * apart, dtype=tensor.dtype)
    path.unlink()
    order = list(tensor.transpose(0, -2).contiguous().transpose(0, -2).stride())
    order[-2] = apart
    if tensor.dim() == 4:
        order[:2] = BLOCK * SIZE, SIZE
    else:
        order[0] = SIZE
    return whole.as_strided(tensor.shape, order).copy_(tensor)


def run(what: str) -> None:
    cached = what != "whole"
    spec = SPEC if cached else SPEC.replace(cached=False, block_size=None)
    settings = replace(current_settings(), layout="HND" if what == "cache" else "NHD")
    names = "TRITON_ATTN,store=TRITON_STORE" if cached else "TRITON_ATTN"
    layer = Attention(LayerGroup(select(spec, "cpu", backend=names, settings=settings)))
    query, key, value = (
        torch.randn(TOKENS, heads, SIZE, dtype=torch.float16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    if what != "cache":
        query, key, value = far(query, "q"), far(key, "k"), far(value, "v")
    if not cached:
        batch = Batch.from_lens([TOKENS], [TOKENS])
        out = layer(query, key, value, None, batch)
        expected, _ = reference.forward(spec, query, key, value, None, batch)
        assert output_error(out, expected) <= tolerance_of(spec).output
        return
    cache = layer.group.allocate_cache(4)
    cache = KVCache(cache.key.zero_(), cache.value.zero_())
    if what == "cache":
        cache = KVCache(far(cache.key, "keys"), far(cache.value, "values"))
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    for first, last in ((0, TOKENS - 1), (TOKENS - 1, TOKENS)):  # a prompt and a decode
        batch = Batch.from_lens([last - first], [last], table, BLOCK)
        out = layer(query[first:last], key[first:last], value[first:last], cache, batch)
        expected, _ = reference.forward(spec, query[first:last], None, None, cache, batch)
        assert output_error(out, expected) <= tolerance_of(spec).output
    stored, _ = reference.read_cache(cache, batch, 0, layer.params)
    assert torch.equal(stored, key.double())


CASES = ("inputs", "cache", "whole")
for case in CASES:
    run(case)
print(len(CASES))
