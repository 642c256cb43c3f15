"""StreamingLLM's dense context phase: whole prompts see all keys, what follows its window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formulas import attend, in_window
from polyattn import Attention, Batch, CacheWindow, KVCache, LayerGroup, LayerSpec, select
from polyattn.errors import BatchError, SpecError
from polyattn.families.attention import reference
from torch import Tensor

SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=4, sliding_window=6,
    sink_tokens=2, dense_context=True,
)  # fmt: skip


def mask_of(queries: int, keys: int, chunk: int) -> Tensor:
    causal = in_window(queries, keys, -1, 0)
    near = in_window(queries, keys, 5, 0) | (torch.arange(keys) < 2)
    places = torch.arange(keys) // chunk
    near &= places == places[keys - queries :, None]
    return causal if queries == keys else causal & near


STEPS = {
    "mixed": ([1, 9, 3, 20, 1, 4], [30, 9, 25, 20, 1, 4]),
    "prompts": ([9, 20], [9, 20]),
    "short": ([4, 1], [4, 17]),
    "last": ([1, 12], [19, 12]),
    "first": ([9, 1, 3], [9, 30, 25]),
}


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "VANILLA"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("chunk", [None, 3, 8])
def test_whole_prompts_see_all_their_keys(backend: str, step: str, chunk: int | None) -> None:
    torch.manual_seed(0)
    queries, lens = STEPS[step]
    spec = SPEC.replace(chunk_size=chunk)
    layer = Attention(LayerGroup(select(spec, "cpu", backend=backend)))
    cache = layer.group.allocate_cache(64)
    for stored in (cache.key, cache.value):
        stored.normal_()
    table = torch.randperm(64)[: 8 * len(lens)].view(len(lens), 8).int()
    batch = Batch.from_lens(queries, lens, table, 4)
    given = [torch.randn(sum(queries), heads, 32) for heads in (4, 2, 2)]
    out = layer(*given, cache, batch)
    for index, (count, length) in enumerate(zip(queries, lens, strict=True)):
        rows = slice(batch.starts[index], batch.starts[index + 1])
        keys, values = reference.read_cache(cache, batch, index, layer.params)
        wanted, _ = attend(given[0][rows], keys, values, mask_of(count, length, chunk or 99))
        torch.testing.assert_close(out[rows].double(), wanted, rtol=2e-5, atol=2e-5)


def test_explain_says_who() -> None:
    notes = select(SPEC, "cpu", backend="TORCH_SDPA").decision.notes
    assert any(
        note.startswith("dense context: TORCH_SDPA computes whole prompts") for note in notes
    )


def test_decodes_need_no_more_than_the_windows_blocks() -> None:
    """After its dense prompt a sequence goes on with the kept first tokens and the window alone."""
    torch.manual_seed(1)
    layer = Attention(LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA")))
    cache = layer.group.allocate_cache(16)
    table = torch.arange(16, dtype=torch.int32)[None]
    prompt = [torch.randn(30, heads, 32) for heads in (4, 2, 2)]
    layer(*prompt, cache, Batch.from_lens([30], [30], table, 4))
    whole = KVCache(cache.key.clone(), cache.value.clone())
    new = [torch.randn(1, heads, 32) for heads in (4, 2, 2)]
    wanted = layer(*new, whole, Batch.from_lens([1], [31], table, 4))
    kept = CacheWindow.of(SPEC, 4)
    assert kept is not None
    gone = kept.gone(30)
    held = [i for i in range(8) if i not in gone]
    cache.key[list(gone)] = cache.value[list(gone)] = torch.nan
    short = Batch.from_lens([1], [31 - 4 * len(gone)], table[:, held], 4)
    torch.testing.assert_close(layer(*new, cache, short), wanted)


def test_a_captured_step_refuses_whole_prompts() -> None:
    """Their call isn't in the graph, and the other rows' would have other rows than it captured."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    table = torch.arange(24).view(3, 8).int()
    captured = group.plan(Batch.from_lens([7, 7, 7], [32, 32, 32], table, 4))
    group.plan(Batch.from_lens([7, 7, 7], [9, 8, 20], table, 4), reuse=captured)
    step = Batch.from_lens([7, 7, 7], [9, 7, 20], table, 4)
    with pytest.raises(
        BatchError, match="has whole prompts, whose calls no graph has; run it eagerly"
    ):
        group.plan(step, reuse=captured)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": None, "sink_tokens": 0}, "with a sliding_window; without one"),
        ({"graph_capture": "any"}, "use graph_capture='uniform' at most"),
        ({"length_bounds": True}, "no length_bounds"),
        ({"dense_context": 1}, "dense_context=1 must be True or False"),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        SPEC.replace(**changes)
