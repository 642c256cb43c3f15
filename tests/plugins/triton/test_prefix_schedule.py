"""The work list of shared prefixes, walked through on the host as a program walks through it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn.kernel import Levels, SharedRun

pytest.importorskip("triton")
from polyattn_triton.prefix_schedule import (
    ITEM,
    LEAST,
    MOST_LEVELS,
    PIECE,
    Heights,
    PrefixWork,
    Room,
    cost_of,
    cut,
    room_for,
    tallest,
    tiles_of,
    work_of,
)
from polyattn_triton.schedule import EVEN

BLOCK_SIZE = 16


@st.composite
def forests(draw: st.DrawFn) -> tuple[Levels, list[int]]:
    """Any forest over up to 40 rows: runs of any rows, parted again and again; padding rows too."""
    count = draw(st.integers(1, 40))
    levels: list[tuple[SharedRun, ...]] = []
    groups = [(list(range(count)), 0)]
    ends = [0] * count
    while groups and len(levels) < 6:
        runs, later = [], []
        for rows, first in groups:
            labels = draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
            for label in (0, 1):  # what has label 2 goes on alone
                chosen = [row for row, mine in zip(rows, labels, strict=True) if mine == label]
                if len(chosen) > 1:
                    run = SharedRun(tuple(chosen), first, draw(st.integers(1, 60)))
                    runs.append(run)
                    later.append((chosen, first + run.count))
                    for row in chosen:
                        ends[row] = (first + run.count) * BLOCK_SIZE
        if not runs:
            break
        levels.append(tuple(sorted(runs, key=lambda run: run.rows)))
        groups = later
    own = draw(st.lists(st.integers(0, 900), min_size=count, max_size=count))
    # Who shares has a token of its own at least; others may be padding.
    return tuple(levels), [end + (n or bool(end)) for end, n in zip(ends, own, strict=True)]


HEIGHTS = st.builds(
    lambda group, small, times: Heights(group, small, small << times),
    st.sampled_from([1, 3, 4, 7, 16]), st.sampled_from([16, 32]), st.integers(0, 3),
)  # fmt: skip
PROGRAMS = st.integers(1, 60)
BLOCKS = st.sampled_from([16, 64, 128])


def planned(
    levels: Levels, lens: list[int], heights: Heights, block: int, programs: int,
    room: Room | None = None,
) -> PrefixWork:  # fmt: skip
    tiles = tiles_of(levels, np.array(lens, np.int32), BLOCK_SIZE, heights)
    pieces = cut(tiles, heights, block, programs)
    return work_of(tiles, pieces, heights.group, block, len(lens), programs, room)


def walk(work: PrefixWork, programs: int) -> list[tuple[int, int, int, int, list[int], int]]:
    """Follow the list as `prefix_kernel` does: program, table row, keys, rows, where the part goes."""
    found = []
    for program in range(programs):
        first, last = work.array[work.bounds + program : work.bounds + program + 2]
        for piece in range(first, last):
            table, begin, end, at, count, lies = work.array[piece * PIECE : piece * PIECE + 6]
            found.append((program, table, begin, end, work.array[at : at + count].tolist(), lies))
    return found


def parts_of(work: PrefixWork, row: int) -> list[int]:
    """Where `merge_parts_kernel` looks for a row's parts, in its order."""
    first, last = work.array[work.parts + row : work.parts + row + 2]
    return work.array[work.list + first : work.list + last].tolist()


@settings(max_examples=60, deadline=None)
@given(forests(), HEIGHTS, BLOCKS, PROGRAMS, st.booleans())
def test_every_key_of_every_row_is_in_exactly_one_part(
    forest: tuple[Levels, list[int]], heights: Heights, block: int, programs: int, captured: bool
) -> None:
    """Read from a table's row that has the same blocks, in parts of its own, merged in their order."""
    levels, lens = forest
    room = room_for(len(lens), programs, heights) if captured else None
    levels = levels[:MOST_LEVELS] if captured else levels
    work = planned(levels, lens, heights, block, programs, room)
    same = defaultdict(set)  # by row and block: rows of the table that have it
    for level in levels:
        for run in level:
            for row in run.rows:
                for column in range(run.first, run.first + run.count):
                    same[row, column] |= set(run.rows)
    parts = defaultdict(list)
    taken: set[int] = set()
    for _, table, begin, end, rows, lies in walk(work, programs):
        assert begin < end and len(rows) * heights.group <= heights.tall
        for place, row in enumerate(rows):
            columns = range(begin // BLOCK_SIZE, -(-end // BLOCK_SIZE))
            assert table == row or all(table in same[row, column] for column in columns)
            mine = set(range(lies + place * heights.group, lies + (place + 1) * heights.group))
            assert not mine & taken and max(mine) < work.part_rows
            taken |= mine
            parts[row].append((lies + place * heights.group, begin, end))
    for row, length in enumerate(lens):
        where = {lies: (begin, end) for lies, begin, end in parts[row]}
        merged = [where[lies] for lies in parts_of(work, row)]
        assert len(merged) == len(where)
        keys = [key for begin, end in merged for key in range(begin, end)]
        assert keys == list(range(length))


@settings(max_examples=60, deadline=None)
@given(forests(), HEIGHTS, BLOCKS, PROGRAMS)
def test_the_fullest_program_has_little_more_than_the_mean(
    forest: tuple[Levels, list[int]], heights: Heights, block: int, programs: int
) -> None:
    """At most 1.1 times the mean and one key tile of the costlier kind, by the costs of the plan.

    A tile's queries are charged to whoever begins it, as the line charges them.
    """
    levels, _ = forest
    loads, total = [0] * programs, 0
    begun: set[tuple[int, ...]] = set()
    for program, _, begin, end, rows, _ in walk(
        planned(*forest, heights, block, programs), programs
    ):
        each = int(heights.cost(len(rows)))
        cost = each * -(-(end - begin) // block)
        if (*rows, begin) not in begun and begin in _begins(levels, rows):
            begun.add((*rows, begin))
            cost += ITEM
        loads[program] += cost
        total += cost
    dearest = max(cost_of(heights.small), cost_of(heights.tall))
    mean = total / programs
    assert max(loads) <= max(EVEN * mean, ITEM + LEAST * dearest) + dearest + ITEM


def _begins(levels: Levels, rows: list[int]) -> set[int]:
    """Where tiles of these rows begin: their runs, and what is one row's own."""
    runs = [run for level in levels for run in level if set(rows) <= set(run.rows)]
    ends = {(run.first + run.count) * BLOCK_SIZE for run in runs}
    return {run.first * BLOCK_SIZE for run in runs} | ends | {0}


@settings(max_examples=30, deadline=None)
@given(forests(), forests(), HEIGHTS, PROGRAMS)
def test_what_is_captured_is_as_large_for_any_forest(
    one: tuple[Levels, list[int]], other: tuple[Levels, list[int]], heights: Heights, programs: int
) -> None:
    """So that a graph reads what any later plan wrote, from the same places."""
    (levels, lens), (_, others) = one, other
    lens_alone = (others * len(lens))[: len(lens)]
    room = room_for(len(lens), programs, heights)
    works = [
        planned(*case, heights, 64, programs, room)
        for case in ((levels[:MOST_LEVELS], lens), ((), lens_alone), ((), [0] * len(lens)))
    ]
    assert len({(len(w.array), w.bounds, w.parts, w.list, w.part_rows) for w in works}) == 1
    assert not parts_of(works[2], 0), "a padding row has no part"


def test_the_same_forest_gives_the_same_work() -> None:
    levels = ((SharedRun(tuple(range(12)), 0, 40),), (SharedRun((0, 3, 4), 40, 9),))
    works = [planned(levels, [1200] * 12, Heights(4, 16, 64), 64, 33).array for _ in range(2)]
    assert np.array_equal(*works)


def test_tiles_fit_their_groups() -> None:
    """As high as the runs are worth; few rows stay in the small tile, whatever others need."""
    heights = (16, 32, 64, 128)
    assert tallest([4], [256], 4, heights) == Heights(4, 16, 16)
    assert tallest([8], [256], 4, heights).tall == 32
    assert tallest([64], [2048], 4, heights).tall == 128
    assert tallest([], [], 4, heights).tall == 16
    assert tallest([2, 64], [4, 2048], 128, (128,)) == Heights(128, 128, 128)
    pair = ((SharedRun((0, 1), 0, 8), SharedRun(tuple(range(2, 34)), 0, 8)),)
    tiles = tiles_of(pair, np.full(34, 200, np.int32), BLOCK_SIZE, Heights(4, 16, 64))
    assert tiles.count[:3].tolist() == [2, 16, 16]


def test_one_group_over_much_is_cut_for_the_whole_chip() -> None:
    """64 rows over 32k, 512 of their own: every program has work, the longest part is a fair share."""
    levels = ((SharedRun(tuple(range(64)), 0, 2048),),)
    found = walk(planned(levels, [33280] * 64, Heights(4, 16, 128), 64, 16), 16)
    assert {program for program, *_ in found} == set(range(16))
    assert max(end - begin for _, _, begin, end, _, _ in found) <= 2 * 32768 // 12


def test_cutting_can_be_seen_to_fail() -> None:
    """The negative control: a list of other lengths doesn't cover these."""
    heights = Heights(4, 16, 64)
    work = planned((), [100, 300], heights, 64, 3)
    keys = sum(end - begin for _, _, begin, end, _, _ in walk(work, 3))
    assert keys == 400 != 401
