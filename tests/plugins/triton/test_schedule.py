"""The schedule of Triton's kernels, walked through on the host as a program walks through it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import LayerSpec

pytest.importorskip("triton")
from polyattn.families.attention.reference import visible
from polyattn_triton.schedule import (
    COLUMNS,
    EVEN,
    HEADER,
    Chip,
    Line,
    Rates,
    Stretches,
    Tiles,
    fullest,
    in_lanes,
    key_tiles,
    max_parts,
    part_of,
    rows_of,
    stretched,
    stretches,
    whole,
)

KEYS = st.lists(st.integers(0, 300) | st.integers(0, 5_000), min_size=1, max_size=80)
PROGRAMS = st.integers(1, 150)
RATES = st.builds(Rates, item=st.integers(1, 3), least=st.integers(1, 4))
MERGING = st.builds(
    Rates, item=st.integers(1, 3), least=st.integers(1, 4), merge=st.sampled_from([0, 6])
)


@dataclass
class Piece:
    """What a program does of one tile."""

    program: int
    tile: int
    begin: int
    end: int
    part: int
    first: int
    last: int


def walk(work: np.ndarray, programs: int) -> Iterator[Piece]:
    """Follow WORK as `tiles.my_stretch`, `next_tile` and `piece_of` do on the device."""
    share, total, item, count = (int(x) for x in work[:HEADER])
    columns = work[HEADER : HEADER + COLUMNS * programs].reshape(COLUMNS, programs)
    rest = work[HEADER + COLUMNS * programs :]
    line, seqs, rows = rest[: count + 1], rest[count + 1 : 2 * count + 1], rest[2 * count + 1 :]
    for program in range(programs):
        at, stop = program * share, min((program + 1) * share, total)
        tile, low, high, seq, row = (int(column[program]) for column in columns)
        while at < stop:
            assert (line[tile], line[tile + 1]) == (low, high)
            assert (seqs[tile], rows[tile]) == (seq, row)
            first, last = low // share, (high - 1) // share
            yield Piece(
                program, tile, max(at - low - item, 0), min(stop, high) - low - item,
                part_of(program, first == program), first, last,
            )  # fmt: skip
            at, low = high, high
            tile = min(tile + 1, count - 1)
            high, seq, row = int(line[tile + 1]), int(seqs[tile]), int(rows[tile])


def dealt_out(keys: np.ndarray, programs: int, rates: Rates) -> Stretches:
    return stretches(Line.of(keys, rates.item), programs, rates)


def tiles_of(keys: list[int]) -> Tiles:
    count = len(keys)
    return Tiles(np.arange(count), np.arange(count) * 3, np.array(keys))


def pieces_of(dealt: Stretches, tiles: Tiles, programs: int) -> list[list[Piece]]:
    """Return each tile's pieces, in which each of its keys is once; parts are their own, and in order."""
    pieces: list[list[Piece]] = [[] for _ in tiles.keys]
    parts = set()
    for piece in walk(dealt.work(tiles), programs):
        pieces[piece.tile].append(piece)
    for tile, mine in enumerate(pieces):
        taken = [k for p in mine for k in range(p.begin, min(p.end, tiles.keys[tile]))]
        assert taken == list(range(tiles.keys[tile]))  # in order: once, and none left out
        first, last = mine[0].first, mine[0].last
        assert [p.program for p in mine] == list(range(first, last + 1))
        assert {(p.first, p.last) for p in mine} == {(first, last)}
        if last > first:
            merged = [2 * first + (1 if k == 0 else 2 * k) for k in range(last - first + 1)]
            assert [p.part for p in mine] == merged
            assert not parts & set(merged) and max(merged) < max_parts(programs)
            parts |= set(merged)
    assert 0 <= dealt.parts - max(len(mine) for mine in pieces) <= 1
    return pieces


@settings(max_examples=300, deadline=None)
@given(KEYS, PROGRAMS, RATES)
def test_every_key_is_in_exactly_one_piece(keys: list[int], programs: int, rates: Rates) -> None:
    """And pieces of a tile have parts of their own, in the order in which they are merged."""
    tiles = tiles_of(keys)
    pieces_of(dealt_out(tiles.keys, programs, rates), tiles, programs)


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
        ends = [
            [(p.begin, min(p.end, keys[p.tile % len(keys)])) for p in parts] for parts in pieces
        ]
        assert ends == ends[: len(keys)] * lanes


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


@settings(max_examples=300, deadline=None)
@given(KEYS, PROGRAMS, RATES)
def test_the_fullest_program_has_little_more_than_the_mean(
    keys: list[int], programs: int, rates: Rates
) -> None:
    """At most 1.1 times the mean and one tile: each tile costs its queries once, and its keys.

    Queries that cost more than a key tile may be cut too; they are charged to whoever begins them.
    """
    tiles = tiles_of(keys)
    loads = [0] * programs
    for piece in walk(dealt_out(tiles.keys, programs, rates).work(tiles), programs):
        begun = piece.program == piece.first
        held = max(0, min(piece.end, keys[piece.tile]) - piece.begin)
        # Queries are loaded by whoever has a piece, but they are charged to the first.
        loads[piece.program] += begun * rates.item + held
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
    assert max(loads) <= max(EVEN * mean + 1, stretch + min(stretch, rates.merge))
    device = fullest(np.array([keys[tile] + rates.item for tile in order]), 1, 1, slots)
    assert device == max(loads)


def test_a_short_prompt_is_not_cut() -> None:
    """What is worth one program isn't merged from two: 100 tokens are a key tile a tile of rows."""
    assert whole(np.array([1, 1, 1, 1, 2, 2]), 33, Rates()) is not None
    assert whole(np.array([3]), 33, Rates()) is None


def test_equal_tiles_are_cut_alike_or_not_at_all() -> None:
    cases = {(64, 132): 1, (128, 132): 0, (128, 64): 0, (3, 132): 42}
    for (count, programs), cuts in cases.items():
        keys = np.full(count, 640)
        tiles = tiles_of(keys.tolist())
        found = list(walk(dealt_out(keys, programs, Rates()).work(tiles), programs))
        assert len(found) == count * (cuts + 1), (count, programs)
        lengths = {min(p.end, 640) - p.begin for p in found}
        assert max(lengths) - min(lengths) <= 16


def test_one_long_sequence_among_short_ones_is_cut() -> None:
    """1 x 128k and 63 x 1k over 99 programs: the long one is 66 pieces, no program has 32 tiles."""
    keys = np.array([2048] + [16] * 63)
    tiles = tiles_of(keys.tolist())
    found = list(walk(dealt_out(keys, 99, Rates()).work(tiles), 99))
    assert sum(p.tile == 0 for p in found) in range(64, 68)
    assert max(p.end - p.begin for p in found) <= 32


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


def test_cutting_can_be_seen_to_fail() -> None:
    """The negative control: work of other lengths is not taken for these."""
    tiles, other = tiles_of([5, 90, 7]), tiles_of([5, 89, 7])
    work = dealt_out(other.keys, 4, Rates()).work(other)
    held = sum(min(p.end, tiles.keys[p.tile]) - p.begin for p in walk(work, 4))
    assert held != tiles.keys.sum()


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
def test_key_tiles_hold_what_the_queries_see(name: str) -> None:
    """Of every tile of queries: no fewer key tiles than it sees any key of."""
    spec, block, height = SPECS[name], 16, 6
    for queries, length in ((1, 1), (1, 100), (7, 100), (40, 40), (33, 200), (5, 64)):
        seq, row = rows_of(np.array([queries]), spec.gqa_ratio, height)
        assert row.tolist() == list(range(0, queries * spec.gqa_ratio, height)) and not seq.any()
        first = length - queries + row // spec.gqa_ratio
        last_row = np.minimum(row + height, queries * spec.gqa_ratio) - 1
        last = length - queries + last_row // spec.gqa_ratio
        found = key_tiles(spec, first, last, np.full(len(row), length), block)
        mask = visible(spec, queries, length).numpy()
        for tile, (low, high) in enumerate(zip(first, last, strict=True)):
            seen = (
                mask[low - (length - queries) : high - (length - queries) + 1].any(0).nonzero()[0]
            )
            blocks = set((seen // block).tolist())
            assert len(blocks) <= found[tile] <= len(blocks) + 2, (queries, length, tile)


@pytest.mark.parametrize("name", SPECS)
def test_decodes_are_counted_like_any_rows(name: str) -> None:
    """Padding rows, without keys, too."""
    lens = np.arange(200)
    keys = key_tiles(SPECS[name], lens - 1, lens - 1, lens, 16)
    found, wanted = Line.of_decodes(SPECS[name], lens, 199, 16, 2), Line.of(keys, 2)
    assert found.ends.tolist() == wanted.ends.tolist() and found[1:] == wanted[1:]
    assert wanted.total == wanted.ends[-1] == sum(keys) + 400 and wanted.longest == max(keys) + 2


@pytest.mark.parametrize("causal", [True, False])
def test_queries_before_the_first_key_see_no_tile(causal: bool) -> None:
    """73 queries over 19 keys: counts below zero would shift what other tiles are dealt."""
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, cached=False, causal=causal)
    first = np.array([-54, -50, -5, -1, 0, 18])
    found = key_tiles(spec, first, first, np.full(6, 19), 16)
    assert found.tolist() == ([0, 0, 0, 0, 1, 2] if causal else [2] * 6)


def test_rows_of_sequences_without_queries() -> None:
    seq, row = rows_of(np.array([0, 3, 0, 1]), 7, 16)
    assert seq.tolist() == [1, 1, 3] and row.tolist() == [0, 16, 0]
