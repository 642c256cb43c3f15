"""Compressors beside their formula in float64, and one softmax over several caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import (
    Batch,
    Compressor,
    CompressorSpec,
    LayerSpec,
    SparseAttention,
    SparseSpec,
    Stream,
    UnionAttention,
)
from polyattn.errors import BatchError, SpecError
from polyattn.families.sparse.compressor import Entries
from torch import Tensor

STEPS = [
    [(7, 7), (3, 3)],
    [(1, 8), (5, 8)],
    [(0, 8), (1, 9)],
    [(13, 21), (6, 15)],
    [(1, 22), (0, 15)],
]
SPECS = [
    CompressorSpec(size=6, tokens_per_entry=4, overlap=True),
    CompressorSpec(size=6, tokens_per_entry=3),
    CompressorSpec(size=6, tokens_per_entry=1),
    CompressorSpec(size=6, tokens_per_entry=4, reduction="mean"),
]


def pooled(spec: CompressorSpec, rows: Tensor, gates: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return a whole sequence's entries by the formula."""
    m, size, found = spec.tokens_per_entry, spec.size, []
    for entry in range(len(rows) // m):
        own = slice(entry * m, entry * m + m)
        if gates is None:
            found.append(rows[own].mean(0))
            continue
        assert bias is not None
        parts, weights = [rows[own, -size:]], [gates[own, -size:] + bias[:, -size:]]
        if spec.overlap and entry:
            before = slice(entry * m - m, entry * m)
            parts.append(rows[before, :size])
            weights.append(gates[before, :size] + bias[:, :size])
        found.append((torch.cat(weights).softmax(0) * torch.cat(parts)).sum(0))
    return torch.stack(found) if found else rows.new_zeros(0, size)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_compressor_pools_as_its_formula_says(spec: CompressorSpec) -> None:
    """Two sequences in slots of others before them, in steps that end within groups."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    soft = spec.reduction == "softmax"
    bias = draw(spec.tokens_per_entry, spec.channels) if soft else None
    compressor = Compressor(spec, bias)
    states = compressor.allocate_states(4, dtype=torch.float64).fill_(torch.nan)
    lens = [max(step[i][1] for step in STEPS) for i in range(2)]
    rows, gates = ([draw(n, spec.channels) for n in lens] for _ in range(2))
    found: list[dict[int, Tensor]] = [{}, {}]
    for step in STEPS:
        queries, ends = map(list, zip(*step, strict=True))
        batch = Batch.from_lens(queries, ends, state_slots=torch.tensor([2, 0]))
        parts = [
            torch.cat([each[n - q : n] for each, q, n in zip(all_, queries, ends, strict=True)])
            for all_ in (rows, gates)
        ]
        entries = compressor(parts[0], parts[1] if soft else None, states, batch)
        for row, entry, seq in zip(*map(list, entries), strict=True):
            if entry >= 0:
                assert int(entry) not in found[seq]
                found[seq][int(entry)] = row
    for index in range(2):
        wanted = pooled(spec, rows[index], gates[index] if soft else None, bias)
        assert sorted(found[index]) == list(range(len(wanted)))
        for entry, row in found[index].items():
            torch.testing.assert_close(row, wanted[entry], rtol=0, atol=1e-12)


def test_a_compressor_refuses_what_it_would_misread() -> None:
    compressor = Compressor(CompressorSpec(size=6, tokens_per_entry=4))
    states, rows = compressor.allocate_states(1), torch.zeros(3, 6)
    batch = Batch.from_lens([3], [3], state_slots=torch.tensor([0]))
    with pytest.raises(BatchError, match="gates are missing"):
        compressor(rows, None, states, batch)
    with pytest.raises(BatchError, match="state_slots"):
        compressor(rows, rows, states, Batch.from_lens([3], [3]))
    for wrong in (states[:, :2], states.half()):
        with pytest.raises(BatchError, match="states"):
            compressor(rows, rows, wrong, batch)
    moved = Batch.from_lens(
        [3], [3], state_slots=torch.tensor([0]), state_targets=torch.tensor([0])
    )
    for tensor, step, match in (
        (rows, moved, "state_targets: a compressor's states stay"),
        (rows.clone().requires_grad_(), batch, "rows requires a gradient"),
        (rows.to(torch.complex64), batch, "rows is .* of torch.complex64"),
    ):
        with pytest.raises(BatchError, match=match):
            compressor(tensor, rows, states, step)
    with pytest.raises(BatchError, match="dtype=torch.bfloat16"):
        compressor.allocate_states(1, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="norm has shape"):
        compressor.finished(compressor(rows, rows, states, batch), torch.ones(1))
    with pytest.raises(SpecError, match="bias"):
        Compressor(CompressorSpec(size=6, tokens_per_entry=4), torch.zeros(3, 6))
    with pytest.raises(SpecError, match="compressor.reduction"):
        CompressorSpec(size=6, tokens_per_entry=4, reduction="max")


def test_an_entry_behind_its_table_has_no_slot() -> None:
    """Not the slot of another entry; the plan refuses the table, but the store may come first."""
    table = torch.tensor([[3, 5], [2, 4]], dtype=torch.int32)
    ids = torch.tensor([7, 8, -1, 4])
    entries = Entries(torch.zeros(4, 6), ids, torch.tensor([0, 0, 1, 1]))
    assert entries.slots(table, block_size=4).tolist() == [23, -1, -1, 16]


def test_a_table_without_entries_takes_none() -> None:
    compressor = Compressor(CompressorSpec(size=6, tokens_per_entry=4))
    batch = Batch.from_lens([3], [3], state_slots=torch.tensor([0]))
    rows = torch.zeros(3, 6)
    entries = compressor(rows, rows, compressor.allocate_states(1), batch)
    table = torch.zeros(1, 0, dtype=torch.int32)
    assert entries.slots(table, block_size=16).tolist() == [-1]
    attend = layer(budget=2, tokens_per_entry=4)
    out, _ = attend(
        torch.ones(3, 4, 16), None, None, attend.group.allocate_cache(1), Batch([0, 3], [3], table)
    )
    assert not out.any()


def layer(**sparse: Any) -> SparseAttention:
    return SparseAttention(LayerSpec(
        kind="sparse", num_heads=4, num_kv_heads=1, head_size=16, dtype="float32", block_size=16,
        needs_lse=True, sparse=SparseSpec(value_in_key=True, **sparse),
    ))  # fmt: skip


def test_streams_share_one_softmax_and_the_sinks_count_once() -> None:
    """A window of 5 and all entries of 4 tokens: a key in both counts twice; LSE without the sinks."""
    window, entries = layer(budget=5, newest=True), layer(budget=8, tokens_per_entry=4)
    sinks = torch.randn(4)
    both = UnionAttention([window, entries], sinks)
    table = torch.tensor([[1, 0], [2, 3]]).int()
    batch = Batch.from_lens([20, 1], [20, 3], table, 16)
    query, raw = torch.randn(21, 4, 16), torch.randn(21, 1, 16)
    caches = [each.group.allocate_cache(4) for each in both.layers]
    pooled = torch.randn(5, 1, 16)
    entries.store(pooled, None, caches[1], torch.arange(16, 21))  # block 1, the first sequence's
    plan = Batch.from_lens([20, 1], [20, 3])
    plan.block_table = table
    # The second sequence's token is its third; two before it aren't in the cache yet: all but NaN.
    caches[0].key[2, :2] = torch.randn(2, 1, 16)
    held = torch.cat([caches[0].key[2, :2], raw[20:]])
    out, lse = both(query, [Stream(caches[0], batch, key=raw), Stream(caches[1], plan)])
    for token in range(21):
        own = raw[max(token - 4, 0) : token + 1] if token < 20 else held
        seen = torch.cat([own, pooled[: (token + 1) // 4 if token < 20 else 0]])[:, 0].double()
        scores = query[token].double() @ seen.T / 4
        torch.testing.assert_close(lse[token].double(), scores.logsumexp(1), rtol=0, atol=2e-6)
        weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
        torch.testing.assert_close(out[token].double(), weights @ seen, rtol=0, atol=2e-6)


def test_a_table_names_blocks_of_entries() -> None:
    """What it has behind a sequence's entries is never read; without room for them it is refused."""
    attend = layer(budget=8, tokens_per_entry=4, newest=True)
    cache = attend.group.allocate_cache(4)
    entries = torch.randn(20, 1, 16)
    attend.store(entries, None, cache, torch.arange(16, 36))
    table = torch.tensor([[1, 2, 10**6, -1, 10**6]], dtype=torch.int32)
    out, _ = attend(torch.zeros(1, 4, 16), None, None, cache, Batch([0, 1], [80], table))
    newest = entries[12:].mean(0).expand(4, 16)
    torch.testing.assert_close(out[0], newest, rtol=0, atol=1e-6)
    with pytest.raises(BatchError, match="block_table has 1 blocks of 16 .* length 80 needs 2"):
        attend.group.plan(Batch([0, 1], [80], table[:, :1]))


def test_streams_that_share_no_softmax_are_refused() -> None:
    other = SparseAttention(LayerSpec(
        kind="sparse", num_heads=4, head_size=16, dtype="float32", sparse=SparseSpec(budget=5)
    ))  # fmt: skip
    with pytest.raises(SpecError, match="needs_lse=False"):
        UnionAttention([layer(budget=5), other])
    with pytest.raises(SpecError, match="layers is empty"):
        UnionAttention([])
    with pytest.raises(SpecError, match="0 streams were given; there are 1"):
        UnionAttention([layer(budget=5)])(torch.zeros(1, 4, 16), [])
    places = SparseAttention(LayerSpec(
        kind="sparse", num_heads=4, head_size=16, dtype="float32",
        sparse=SparseSpec(budget=5, physical=True),
    ))  # fmt: skip
    batch = Batch.from_lens([1], [1], torch.tensor([[0]]).int(), 64)
    cache = places.group.allocate_cache(1)
    with pytest.raises(BatchError, match="choice is missing"):
        places(torch.zeros(1, 4, 16), None, None, cache, batch)
