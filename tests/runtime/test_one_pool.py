"""Layers whose windows differ in one allocation: a pool's blocks hold every layer's keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.families.attention import reference
from polyattn.settings import current_settings
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

BLOCK, BLOCKS = 8, 12
WINDOWS = (7, None, 20, 7)
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=BLOCK)
STEPS = (([30, 9], [30, 9]), ([1, 5], [31, 14]), ([1, 1], [32, 15]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_windows_of_their_own_over_one_block_table(backend: str, layout: str) -> None:
    """One batch and one table serve all layers; each sees what its window leaves, and writes its own."""
    dice = torch.Generator().manual_seed(0)
    sizes = (BLOCK, 2) if layout == "NHD" else (2, BLOCK)
    pool = torch.full((BLOCKS, len(WINDOWS), 2, *sizes, 32), torch.nan)
    caches = [KVCache.packed(pool[:, index], layout) for index in range(len(WINDOWS))]
    settings = replace(current_settings(), layout=layout)
    layers = []
    for window in WINDOWS:
        chosen = select(
            SPEC.replace(sliding_window=window), "cpu", backend=backend, settings=settings
        )
        layers.append(Attention(LayerGroup(chosen, cache_format=caches[0].format), checks=True))
    table = torch.randperm(BLOCKS, generator=dice)[:8].view(2, 4).int()
    for queries, lens in STEPS:
        batch = Batch.from_lens(queries, lens, table, BLOCK)
        for layer, cache in zip(layers, caches, strict=True):
            spec = layer.spec
            given = [torch.randn(sum(queries), n, 32, generator=dice) for n in (4, 2, 2)]
            out = layer(*given, cache, batch)
            wanted, _ = reference.forward(spec, given[0], None, None, cache, batch, layer.params)
            assert output_error(out, wanted) <= tolerance_of(spec).output
    unused = sorted(set(range(BLOCKS)) - set(table.flatten().tolist()))
    assert bool(pool[unused].isnan().all())
