"""How evenly the work list of shared prefixes deals out keys, walked through as a program does.

That each key of each row is in one part: "shared prefixes" in tests/runtime/test_arithmetic.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn.kernel import Levels, SharedRun
from polyattn.workload.steps import drawn_forest

pytest.importorskip("triton")
from polyattn_triton.configs import PREFIX_TABLE, PrefixConfig
from polyattn_triton.prefix_schedule import (
    LEAST,
    MOST_LEVELS,
    PIECE,
    PrefixWork,
    Room,
    Shape,
    Tokens,
    cut,
    fastest,
    room_for,
    tiles_of,
    work_of,
)
from polyattn_triton.schedule import EVEN

BLOCK_SIZE = 16


@st.composite
def forests(draw: st.DrawFn) -> tuple[Levels, list[int]]:
    """Any forest over up to 40 rows: runs of any rows, parted again and again; padding rows too."""
    count = draw(st.integers(1, 40))
    levels, ends = drawn_forest(count, lambda low, high: draw(st.integers(low, high - 1)))
    own = draw(st.lists(st.integers(0, 900), min_size=count, max_size=count))
    # Who shares has a token of its own at least; others may be padding.
    lens = [end * BLOCK_SIZE + (n or bool(end)) for end, n in zip(ends, own, strict=True)]
    return levels, lens


SHAPES = st.builds(
    lambda group, small, times, block, costs: Shape(
        group, small, PrefixConfig(small << times, block, 4, 3, 1, *costs)
    ),
    st.sampled_from([1, 3, 4, 7, 16]), st.sampled_from([16, 32]), st.integers(0, 3),
    st.sampled_from([16, 64, 128]), st.tuples(*[st.integers(1, 50)] * 3),
)  # fmt: skip
PROGRAMS = st.integers(1, 60)


def planned(
    levels: Levels, lens: list[int], shape: Shape, programs: int, room: Room | None = None
) -> PrefixWork:
    tiles = tiles_of(levels, Tokens.of(np.array(lens, np.int32)), BLOCK_SIZE, shape)
    return work_of(tiles, cut(tiles, shape, programs), shape, len(lens), programs, room)


def walk(work: PrefixWork, programs: int) -> list[tuple[int, int, int, list[int]]]:
    """Follow the list as `prefix_kernel` does: program, keys, rows."""
    found = []
    for program in range(programs):
        first, last = work.array[work.bounds + program : work.bounds + program + 2]
        for piece in range(first, last):
            _, begin, end, at, count = work.array[piece * PIECE : piece * PIECE + 5]
            found.append((program, begin, end, work.array[at : at + count].tolist()))
    return found


@settings(max_examples=60, deadline=None)
@given(forests(), SHAPES, PROGRAMS)
def test_the_fullest_program_has_little_more_than_the_mean(
    forest: tuple[Levels, list[int]], shape: Shape, programs: int
) -> None:
    """At most 1.1 times the mean and one key tile of the costlier kind, by the costs of the plan.

    A tile's queries are charged to whoever begins it, as the line charges them.
    """
    levels, _ = forest
    loads, total = [0] * programs, 0
    begun: set[tuple[int, ...]] = set()
    for program, begin, end, rows in walk(planned(*forest, shape, programs), programs):
        each = int(shape.costs(np.array(len(rows))))
        cost = each * -(-(end - begin) // shape.config.block_n)
        if (*rows, begin) not in begun and begin in _begins(levels, rows):
            begun.add((*rows, begin))
            cost += shape.config.item_us
        loads[program] += cost
        total += cost
    item, dearest = shape.config.item_us, max(shape.config.small_us, shape.config.tall_us)
    mean = total / programs
    assert max(loads) <= max(EVEN * mean, item + LEAST * dearest) + dearest + item


def _begins(levels: Levels, rows: list[int]) -> set[int]:
    """Where tiles of these rows begin: their runs, and what is one row's own."""
    runs = [run for level in levels for run in level if set(rows) <= set(run.rows)]
    ends = {(run.first + run.count) * BLOCK_SIZE for run in runs}
    return {run.first * BLOCK_SIZE for run in runs} | ends | {0}


@settings(max_examples=30, deadline=None)
@given(forests(), forests(), SHAPES, PROGRAMS)
def test_what_is_captured_is_as_large_for_any_forest(
    one: tuple[Levels, list[int]], other: tuple[Levels, list[int]], shape: Shape, programs: int
) -> None:
    """So that a graph reads what any later plan wrote, from the same places."""
    (levels, lens), (_, others) = one, other
    lens_alone = (others * len(lens))[: len(lens)]
    room = room_for(len(lens), programs, shape)
    works = [
        planned(*case, shape, programs, room)
        for case in ((levels[:MOST_LEVELS], lens), ((), lens_alone), ((), [0] * len(lens)))
    ]
    assert len({(len(w.array), w.bounds, w.parts, w.list, w.part_rows) for w in works}) == 1


def shape_of(tall: int) -> Shape:
    return Shape(4, 16, PrefixConfig(tall, 64, 4, 3, 1, 10, 20, 30))


def run_of(rows: int, blocks: int) -> Levels:
    return ((SharedRun(tuple(range(rows)), 0, blocks),),)


def test_tiles_fit_their_groups() -> None:
    """As high as the runs are worth; few rows stay in the small tile, whatever others need."""
    configs = [row.config for row in PREFIX_TABLE if row.arch == "sm_90" and row.bytes == 2]
    chosen = [
        fastest(run_of(rows, 2048), np.ones(rows, int), BLOCK_SIZE, 4, configs).tall
        for rows in (2, 4, 8, 64)
    ]
    assert chosen == sorted(chosen) and chosen[0] == chosen[1] == 16 and chosen[-1] >= 64
    assert fastest((), np.ones(9, int), BLOCK_SIZE, 4, configs).tall == 16
    pair = ((SharedRun((0, 1), 0, 8), SharedRun(tuple(range(2, 34)), 0, 8)),)
    tiles = tiles_of(pair, Tokens.of(np.full(34, 200, np.int32)), BLOCK_SIZE, shape_of(64))
    assert tiles.count[:3].tolist() == [2, 16, 16]


def test_one_group_over_much_is_cut_for_the_whole_chip() -> None:
    """64 rows over 32k, 512 of their own: every program has work, the longest part is a fair share."""
    found = walk(planned(run_of(64, 2048), [33280] * 64, shape_of(128), 16), 16)
    assert {program for program, *_ in found} == set(range(16))
    assert max(end - begin for _, begin, end, _ in found) <= 2 * 32768 // 11
