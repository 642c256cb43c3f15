"""FLEX_ATTENTION's blocks, which are counted from intervals: torch's own answer over every element."""

from __future__ import annotations

import pytest
import torch
from defined_flex import defined_flex
from polyattn import Batch, LayerSpec
from polyattn.families.attention import reference
from polyattn_cpu import flex_pointwise
from polyattn_cpu.flex import FlexPlan
from polyattn_cpu.flex_pointwise import blocks_of
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch_operators import Operators

BASE = LayerSpec(num_heads=2, head_size=16, dtype="float32", cached=False)
SPECS = [
    BASE.replace(causal=causal, sliding_window=window, sink_tokens=kept, chunk_size=chunk)
    for causal in (True, False)
    for window, kept in ((None, 0), (1, 0), (40, 5), (129, 128), (300, 200), (3, 3))
    for chunk in (None, 7, 128)
]
BATCHES = {
    "blocks": ([128, 256, 384], [256, 256, 768]),
    "mixed": ([1, 0, 5, 300, 1, 129], [700, 20, 5, 431, 0, 130]),
    "more queries than keys": ([200, 3, 64], [70, 0, 63]),
    "padding rows alone": ([1, 1], [0, 0]),
}


def by_hand(spec: LayerSpec, batch: Batch, rows: int, keys: int) -> torch.Tensor:
    """Return what each row sees of the packed keys, from the reference, one sequence at a time."""
    found, key = torch.zeros(rows, keys, dtype=torch.bool), 0
    for start, count, length in zip(batch.starts, batch.query_lens, batch.lens, strict=False):
        own = reference.visible(spec, count, length)
        found[start : start + count, key : key + length] = own
        key += length
    return found


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_blocks_are_those_of_the_whole_mask(spec: LayerSpec, name: str) -> None:
    batch = Batch.from_lens(*BATCHES[name])
    mask = FlexPlan(spec, batch, None).block_mask
    dense = by_hand(spec, batch, *mask.seq_lengths)
    whole = create_block_mask(lambda b, h, q, k: dense[q, k], 1, 1, *mask.seq_lengths, device="cpu")
    for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(mask, part), getattr(whole, part)), part
    rows, keys = (torch.arange(size) for size in mask.seq_lengths)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, rows[:, None], keys[None]), dense)


def test_a_plan_of_128k_queries_and_keys_is_small() -> None:
    """A boolean of every pair would take 16 GiB; 1,024 x 1,024 blocks in int64 take 8 MiB."""
    sizes: list[int] = []

    def note(name: str, args: object, result: object) -> None:
        results = result if isinstance(result, tuple | list) else [result]
        sizes.extend(t.numel() * t.itemsize for t in results if isinstance(t, torch.Tensor))

    with Operators(note):
        batch = Batch.from_lens([131_072], [131_072])
        plan = FlexPlan(BASE.replace(logit_soft_cap=50.0), batch, None)
    partial, full = plan.block_mask.kv_num_blocks, plan.block_mask.full_kv_num_blocks
    assert full is not None
    assert (int(partial.sum()), int(full.sum())) == (1024, 1024 * 1023 // 2)
    assert 2**20 < max(sizes) <= 2**24


def test_a_mask_s_blocks_are_found_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same blocks as in one piece; a slice asks for a bounded number of pairs."""
    batch = Batch.from_lens([300, 1, 500], [300, 40, 640])
    whole = FlexPlan(BASE, batch, None).block_mask
    odd = lambda b, h, q, k: ((q // 64 + k // 150 + h) % 3 == 0) & whole.mask_mod(b, h, q, k)  # noqa: E731
    rows, keys = whole.seq_lengths
    expected = create_block_mask(odd, 1, 2, rows, keys, device="cpu")
    for pairs in (1, 2 * 256 * keys, 1 << 40):
        monkeypatch.setattr(flex_pointwise, "PAIRS", pairs)
        found = blocks_of(odd, 2, rows, keys, torch.device("cpu"))
        assert found.mask_mod is odd and found.seq_lengths == expected.seq_lengths
        for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), part


def test_the_definition_is_torch_s() -> None:
    """What stands for the compiled kernel in thousands of random batches."""
    generator = torch.Generator().manual_seed(4)
    spec = BASE.replace(sliding_window=150, sink_tokens=3)
    plan = FlexPlan(spec, Batch.from_lens([200], [290]), None)
    query, key, value = (
        torch.randn(1, heads, length, 16, generator=generator)
        for heads, length in ((4, 256), (2, 384), (2, 384))
    )

    def change(score, b, h, q, k):  # type: ignore[no-untyped-def]
        return 3.0 * torch.tanh(score / 3.0) + 0.01 * (h + 1) * (k - q)

    for changed in (None, change):
        given = (query, key, value, changed, plan.block_mask, 0.2, True)
        found = torch.compile(flex_attention, backend="eager")(*given)
        torch.testing.assert_close(defined_flex(*given)[:, :, :200], found[:, :, :200])
