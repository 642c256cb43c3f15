"""How evenly the schedule of Triton's kernels deals out keys, followed as a program follows it.

That each key is dealt out once: tests/runtime/test_arithmetic.py.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import LayerSpec

pytest.importorskip("triton")
from polyattn_triton.reading import Pieces, Work
from polyattn_triton.reading import stretches as followed
from polyattn_triton.schedule import (
    EVEN,
    Chip,
    Line,
    Rates,
    Stretches,
    Tiles,
    fullest,
    in_lanes,
    key_tiles,
    stretched,
    stretches,
    units_of_decodes,
    whole,
)

KEYS = st.lists(st.integers(0, 300) | st.integers(0, 5_000), min_size=1, max_size=80)
PROGRAMS = st.integers(1, 150)
RATES = st.builds(Rates, item=st.integers(1, 3), least=st.integers(1, 4))
MERGING = st.builds(
    Rates, item=st.integers(1, 3), least=st.integers(1, 4), merge=st.sampled_from([0, 6])
)


def dealt_out(keys: np.ndarray, programs: int, rates: Rates) -> Stretches:
    return stretches(Line.of(keys, rates.item), programs, rates)


def tiles_of(keys: list[int]) -> Tiles:
    count = len(keys)
    return Tiles(np.arange(count), np.arange(count) * 3, np.array(keys))


def followed_by_all(dealt: Stretches, tiles: Tiles, programs: int) -> Pieces:
    faults: list[str] = []
    found = followed(Work(torch.from_numpy(dealt.work(tiles)), faults), programs, True)
    assert not faults
    return found


def pieces_of(dealt: Stretches, tiles: Tiles, programs: int) -> list[list[tuple[int, int]]]:
    """Return the keys of each tile's pieces, in the order of programs; each key is in one."""
    found = followed_by_all(dealt, tiles, programs)
    number = {at: tile for tile, at in enumerate(zip(tiles.seq, tiles.row, strict=True))}
    pieces: list[list[tuple[int, int]]] = [[] for _ in tiles.keys]
    for at in found.part.argsort(kind="stable"):
        tile = number[found.seq[at], found.row[at]]
        pieces[tile].append((int(found.begin[at]), min(int(found.end[at]), int(tiles.keys[tile]))))
    for mine, keys in zip(pieces, tiles.keys, strict=True):
        assert [key for piece in mine for key in range(*piece)] == list(range(keys))
    assert 0 <= dealt.parts - max(map(len, pieces)) <= 1
    return pieces


@settings(max_examples=300, deadline=None)
@given(KEYS, st.integers(2, 8), PROGRAMS, RATES)
def test_tiles_of_a_sequence_go_through_its_keys_at_the_same_time(
    keys: list[int], lanes: int, programs: int, rates: Rates
) -> None:
    """In lanes every program of one has a program of each other, which reads the same keys as it does."""
    seq = np.repeat(np.arange(len(keys)), lanes)
    tiles = Tiles(seq, np.tile(np.arange(lanes) * 64, len(keys)), np.array(keys)[seq])
    dealt, mine = in_lanes(tiles, programs, rates)
    assert sorted(zip(mine.seq, mine.row, mine.keys, strict=True)) == sorted(
        zip(tiles.seq, tiles.row, tiles.keys, strict=True)
    )
    pieces = pieces_of(dealt, mine, programs)
    if len(keys) > 1 and (np.diff(mine.row) >= 0).all():
        assert pieces == pieces[: len(keys)] * lanes


def test_two_tiles_a_sequence_are_in_lanes() -> None:
    """128 heads, one long sequence beside 63: one half of the programs, then the other."""
    seq = np.repeat(np.arange(64), 2)
    tiles = Tiles(seq, np.tile([0, 64], 64), np.where(seq == 0, 2048, 16))
    dealt, mine = in_lanes(tiles, 132, Rates(item=2, least=2))
    assert mine.row.tolist() == [0] * 64 + [64] * 64
    assert dealt.line[64] * 2 == dealt.total


@settings(max_examples=300, deadline=None)
@given(KEYS, PROGRAMS, RATES)
def test_short_tiles_are_dealt_whole(keys: list[int], programs: int, rates: Rates) -> None:
    """Unless that costs more than it saves; then, and where tiles are equals, it is `stretches`."""
    tiles, plain = tiles_of(keys), dealt_out(np.array(keys), programs, rates)
    dealt, order = stretched(tiles.keys, programs, rates)
    assert sorted(order) == list(range(len(keys)))
    mine = Tiles(tiles.seq[order], tiles.row[order], tiles.keys[order])
    pieces = pieces_of(dealt, mine, programs)
    assert dealt.share <= EVEN * plain.share + 2 * rates.item
    if dealt.share > plain.share:
        for keys_of_tile, parts in zip(mine.keys, pieces, strict=True):
            assert len(parts) == 1 or keys_of_tile + rates.item > dealt.share


def test_many_short_tiles_beside_a_long_one_are_not_cut() -> None:
    dealt, order = stretched(np.array([2048] + [16] * 63), 66, Rates(item=4, least=0))
    assert order[0] == 0 and dealt.share == 60
    mine = Tiles(order, order, np.array([2048] + [16] * 63)[order])
    assert [len(parts) for parts in pieces_of(dealt, mine, 66)] == [35] + [1] * 63


@pytest.mark.parametrize("keys, programs, share", [
    ([333, 480, 521, 601, 377, 427], 132, 21), ([128], 132, 3), ([64] * 64, 132, 32), ([8] * 8, 132, 1),
])  # fmt: skip
def test_each_piece_has_a_program_where_that_costs_little_more(
    keys: list[int], programs: int, share: int
) -> None:
    """H200, 64 heads, 6 sequences of 20k to 40k: 71 us, 91 where five programs have two pieces."""
    dealt, order = stretched(np.array(keys), programs, Rates(item=4, least=0))
    pieces = pieces_of(dealt, tiles_of(keys), programs)
    assert order.tolist() == list(range(len(keys))) and dealt.share == share
    assert [len(parts) for parts in pieces] == [-(-n // share) for n in keys]
    assert sum(map(len, pieces)) <= programs and dealt.parts == max(map(len, pieces))


@settings(max_examples=300, deadline=None)
@given(KEYS, PROGRAMS, RATES)
def test_the_fullest_program_has_little_more_than_the_mean(
    keys: list[int], programs: int, rates: Rates
) -> None:
    """At most 1.1 times the mean and one tile: each tile costs its queries once, and its keys.

    Queries that cost more than a key tile may be cut too; they are charged to whoever begins them.
    """
    tiles = tiles_of(keys)
    dealt = dealt_out(tiles.keys, programs, rates)
    found = followed_by_all(dealt, tiles, programs)
    # A part's number says whose it is, and if it is the tile's first.
    cut = found.part >= 0
    program = np.where(cut, found.part // 2, dealt.line[found.seq] // dealt.share)
    held = np.minimum(found.end, tiles.keys[found.seq]) - found.begin
    # Queries are loaded by whoever has a piece, but they are charged to the first.
    charged = np.maximum(held, 0) + rates.item * (~cut | (found.part % 2 == 1))
    loads = np.bincount(program, charged, programs)
    mean = (sum(keys) + rates.item * len(keys)) / programs
    assert max(loads) <= max(EVEN * mean + 1, rates.item + rates.least) + rates.item - 1


@settings(max_examples=200, deadline=None)
@given(KEYS, KEYS, PROGRAMS)
def test_plans_depend_on_lengths_alone_and_their_sizes_on_no_length(
    keys: list[int], other: list[int], programs: int
) -> None:
    """What a captured graph reads is as large for any lengths of as many sequences."""
    other = (other * len(keys))[: len(keys)]
    for tiles in (None, tiles_of(keys)):
        made = [dealt_out(np.array(k), programs, Rates()).work(tiles) for k in (keys, keys, other)]
        assert np.array_equal(made[0], made[1]) and made[0].dtype == np.int32
        assert len(made[0]) == len(made[2])


@settings(max_examples=300, deadline=None)
@given(KEYS, PROGRAMS, MERGING)
def test_whole_tiles_end_together_or_are_cut(keys: list[int], slots: int, rates: Rates) -> None:
    """Dealt out in the order given, each to whoever is free first, as the device does.

    Or they end no later than stretches would, merged.
    """
    order = whole(np.array(keys), slots, rates)
    if order is None:
        return
    assert sorted(order) == list(range(len(keys)))
    loads = [0] * slots
    for tile in order:
        heapq.heappush(loads, heapq.heappop(loads) + keys[tile] + rates.item)
    mean = (sum(keys) + rates.item * len(keys)) / slots
    stretch = max(-(-mean // 1), rates.item + rates.least)
    assert max(loads) <= max(EVEN * mean + 1, stretch + rates.merge)
    device = fullest(np.array([keys[tile] + rates.item for tile in order]), 1, 1, slots)
    assert device == max(loads)


def test_a_short_prompt_is_not_cut() -> None:
    """What is worth one program isn't merged from two: 100 tokens are a key tile a tile of rows."""
    assert whole(np.array([1, 1, 1, 1, 2, 2]), 33, Rates()) is not None
    assert whole(np.array([3]), 33, Rates()) is None


@pytest.mark.parametrize(
    ("keys", "whole_ones"),
    [([2] * 26, True), ([1, 3, 6], True), ([1, 3, 7], False), ([2] * 45, False)],
)
def test_few_tiles_have_a_program_each_unless_that_takes_longer_than_a_merge(
    keys: list[int], whole_ones: bool
) -> None:
    """A share of 44 programs is three key tiles, the queries' with them; to merge costs four."""
    tiles, rates = tiles_of(keys), Rates(1, 2, merge=4)
    dealt = dealt_out(np.array(keys), 44, rates)
    pieces = pieces_of(dealt, tiles, 44)
    assert all(len(mine) == 1 for mine in pieces) is (dealt.parts == 1) is whole_ones
    assert dealt.share == (max(keys) + 1 if whole_ones else dealt.share)


def test_equal_tiles_are_cut_alike_or_not_at_all() -> None:
    cases = {(64, 132): 1, (128, 132): 0, (128, 64): 0, (3, 132): 42}
    for (count, programs), cuts in cases.items():
        keys = np.full(count, 640)
        tiles = tiles_of(keys.tolist())
        pieces = pieces_of(dealt_out(keys, programs, Rates()), tiles, programs)
        assert {len(mine) for mine in pieces} == {cuts + 1}, (count, programs)
        lengths = {end - begin for mine in pieces for begin, end in mine}
        assert max(lengths) - min(lengths) <= 16


def test_one_long_sequence_among_short_ones_is_cut() -> None:
    """1 x 128k and 63 x 1k over 99 programs: the long one is 66 pieces, no program has 32 tiles."""
    keys = np.array([2048] + [16] * 63)
    tiles = tiles_of(keys.tolist())
    pieces = pieces_of(dealt_out(keys, 99, Rates()), tiles, 99)
    assert len(pieces[0]) in range(64, 68)
    assert max(end - begin for mine in pieces for begin, end in mine) <= 32


@given(KEYS.filter(any), st.integers(1, 32), st.sampled_from([0, 4, 8, 16]), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_fewer_programs_end_no_later_than_as_many_as_fit(
    keys: list[int], heads: int, by_one: int, least: int
) -> None:
    chip, total, longest = Chip(132, heads), sum(keys), max(keys)
    most = max(1, 3 * 132 // heads)

    def us(programs: int) -> float:
        share = max(total / programs, least)
        return chip.reading(total, share) + chip.merging(math.ceil(longest / share), chip.at_once)

    found = chip.programs(most, total, longest, least)
    assert 1 <= found <= most and us(found) <= us(most)
    splits = chip.splits(most, longest, len(keys), by_one)
    assert 1 <= splits <= most and (splits == most or splits >= by_one)


def test_parts_are_as_many_as_their_merging_is_worth() -> None:
    """A group of 16 heads merges four parts of 128 columns at once, one of 8 eight (H200)."""
    # One sequence of 16,889 tokens on one KV head: the last of 28 splits merged them in seven rounds,
    # 24.3 us in all; a kernel 53 parts, 15.4.
    assert Chip(132, 1).splits(128, 264, 1, 4) > 32
    # Where as many as the chip holds are merged at once, nobody else merges them.
    assert Chip(132, 8).splits(16, 128, 1, 16) == 16
    # Programs of one warp: of 100 splits of 8 heads some multiprocessors would have seven, most six.
    assert Chip(528, 8, 4, wide=256).splits(198, 4096, 1, 0) == 198
    assert Chip(132, 4).splits(2, 49, 64, 8) == 2
    # Where memory is what takes the time, more splits than one merges bring nothing.
    assert Chip(132, 8).splits(12, 256, 16, 8) == 8
    assert Chip(132, 4).programs(99, 1400, 65, 3) == 99
    # 44,000 + 68,000 + 21,000 tokens on one KV head: 29.9 us, a program a processor.
    keys = np.array([688, 1063, 329])
    assert Chip(132, 1).programs(396, int(keys.sum()) + 3, 1064, 3) == 132
    # 128k among 63 of 1k on 4 KV heads: a processor with one program reads a tenth slower
    # (115.3 us; with two 109.7).
    assert Chip(132, 4).programs(99, 2048 + 63 * 17, 2049, 3) == 66


SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16)
SPECS = {
    "plain": SPEC,
    "all": SPEC.replace(causal=False),
    "window": SPEC.replace(sliding_window=37),
    "both sides": SPEC.replace(sliding_window=37, causal=False),
    "sinks": SPEC.replace(sliding_window=21, sink_tokens=3),
    "chunks": SPEC.replace(chunk_size=24),
    "chunks, window": SPEC.replace(chunk_size=48, sliding_window=21),
}


@pytest.mark.parametrize("name", SPECS)
def test_decodes_are_counted_like_any_rows(name: str) -> None:
    """Padding rows, without keys, too."""
    lens = np.arange(200)
    keys = key_tiles(SPECS[name], lens - 1, lens - 1, lens, 16)
    assert units_of_decodes(SPECS[name], lens, 16, 2).tolist() == (keys + 2).tolist()
    line = Line.of(keys, 2)
    assert line.total == line.ends[-1] == sum(keys) + 400 and line.longest == max(keys) + 2
