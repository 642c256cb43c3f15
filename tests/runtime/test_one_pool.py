"""Layers whose windows differ in one allocation: a pool's blocks hold every layer's keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devices import everywhere
from formulas import attend, in_window
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, register, select, unregister
from polyattn.errors import CacheError
from polyattn.families.attention import reference
from polyattn.kernel import backend as kernel
from polyattn.settings import current_settings, reload
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of
from torch import Tensor

BLOCK, BLOCKS = 8, 12
WINDOWS = (7, None, 20, 7)
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=BLOCK)
STEPS = (([30, 9], [30, 9]), ([1, 5], [31, 14]), ([1, 1], [32, 15]))


def new_tokens(count: int, dice: torch.Generator, device: str) -> list[Tensor]:
    return [torch.randn(count, heads, 32, generator=dice).to(device) for heads in (4, 2, 2)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@everywhere("TORCH_SDPA NATIVE_ATTN", "TORCH_SDPA TRITON_ATTN")
def test_windows_of_their_own_over_one_block_table(device: str, backend: str, layout: str) -> None:
    """One batch and one table serve all layers; each sees what its window leaves, and writes its own."""
    dice = torch.Generator().manual_seed(0)
    sizes = (BLOCK, 2) if layout == "NHD" else (2, BLOCK)
    pool = torch.full((BLOCKS, len(WINDOWS), 2, *sizes, 32), torch.nan, device=device)
    caches = [KVCache.packed(pool[:, index], layout) for index in range(len(WINDOWS))]
    settings = replace(current_settings(), layout=layout)
    layers = []
    for window in WINDOWS:
        chosen = select(
            SPEC.replace(sliding_window=window), device, backend=backend, settings=settings
        )
        layers.append(Attention(LayerGroup(chosen, cache_format=caches[0].format), checks=True))
    table = torch.randperm(BLOCKS, generator=dice)[:8].view(2, 4).int().to(device)
    for queries, lens in STEPS:
        batch = Batch.from_lens(queries, lens, table, BLOCK)
        for layer, cache in zip(layers, caches, strict=True):
            spec = layer.spec
            given = new_tokens(sum(queries), dice, device)
            out = layer(*given, cache, batch)
            wanted, _ = reference.forward(spec, given[0], None, None, cache, batch, layer.params)
            assert output_error(out, wanted) <= tolerance_of(spec).output
    assert layers[0].group.allocate_cache(2).format.apart == 0
    unused = sorted(set(range(BLOCKS)) - set(table.flatten().tolist()))
    assert bool(pool[unused].isnan().all())


@kernel(
    "FOUR", platforms=("cpu", "cuda"), dtypes="float32", head_sizes=32, block_sizes=4,
    features=("causal", "gqa"),
)  # fmt: skip
def paged(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor,
) -> Tensor:  # fmt: skip
    """Attention over pages of four tokens."""
    starts, outs = query_start_loc.tolist(), []
    for row, length in enumerate(seq_lens.tolist()):
        tokens = query[starts[row] : starts[row + 1]]
        blocks = block_table[row, : -(-length // key.shape[1])].long()
        keys, values = (t[blocks].flatten(0, 1)[:length] for t in (key, value))
        seen = in_window(len(tokens), length, -1, 0).to(query.device)
        outs.append(attend(tokens, keys, values, seen, scale=scale)[0].to(query.dtype))
    return torch.cat(outs)


@everywhere("FOUR", "FOUR")
def test_a_kernel_of_smaller_blocks_walks_a_pool(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks' numbers follow from how far the pool's lie apart; the checked plan says so, too."""
    monkeypatch.setenv("POLYATTN_CHECKS", "1")
    reload()
    register(paged)
    try:
        chosen = select(SPEC, device, backend=backend)
        dice = torch.Generator().manual_seed(0)
        table = torch.randperm(BLOCKS, generator=dice)[:8].view(2, 4).int().to(device)
        for layers in (1, 2, 3):
            pool = torch.full((BLOCKS, layers, 2, BLOCK, 2, 32), torch.nan, device=device)
            cache = KVCache.packed(pool[:, layers - 1])
            with pytest.raises(CacheError, match=f"lie {2 * layers * BLOCK} tokens apart"):
                Attention(LayerGroup(chosen)).group.check_cache(cache)
            layer = Attention(LayerGroup(chosen, cache_format=cache.format), checks=True)
            for queries, lens in STEPS:
                batch = Batch.from_lens(queries, lens, table, BLOCK)
                given = new_tokens(sum(queries), dice, device)
                out = layer(*given, cache, batch)
                wanted, _ = reference.forward(
                    SPEC, given[0], None, None, cache, batch, layer.params
                )
                assert output_error(out, wanted) <= tolerance_of(SPEC).output
        with pytest.raises(CacheError, match="bring the cache"):
            layer.group.allocate_cache(2)
    finally:
        unregister(paged)
        monkeypatch.undo()
        reload()
