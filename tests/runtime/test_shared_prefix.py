"""Shared prefixes against their definition: a block is shared by all rows that begin alike."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from polyattn.errors import BatchError
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_on_device
from polyattn.runtime.step.shared_prefix import (
    FIRST_LOOK,
    Levels,
    SharedRun,
    check_forest,
    check_shared_blocks,
    most_saved,
    restricted,
    shared_prefixes,
)

Table = NDArray[np.int32]


def by_definition(
    table: Table, lens: list[int], size: int
) -> dict[tuple[int, int], frozenset[int]]:
    """For each (row, column) that is shared: with whom."""
    alike: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for row, length in enumerate(lens):
        for column in range(min(length // size, table.shape[1])):
            alike[tuple(table[row, : column + 1].tolist())].add(row)
    return {
        (row, len(prefix) - 1): frozenset(rows)
        for prefix, rows in alike.items()
        if len(rows) > 1
        for row in rows
    }


def spread(levels: Levels) -> dict[tuple[int, int], frozenset[int]]:
    found: dict[tuple[int, int], frozenset[int]] = {}
    for level in levels:
        for run in level:
            for row in run.rows:
                for column in range(run.first, run.first + run.count):
                    assert (row, column) not in found, "a block of a row is in one run"
                    found[row, column] = frozenset(run.rows)
    return found


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[int], int]:
    """Few distinct blocks, so that rows agree, part, and agree again where it must not count."""
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 8))
    size = draw(st.integers(1, 4))
    kinds = draw(st.integers(1, 4))
    values = draw(st.lists(st.integers(0, kinds), min_size=rows * columns, max_size=rows * columns))
    lens = draw(st.lists(st.integers(0, columns * size), min_size=rows, max_size=rows))
    return np.array(values, np.int32).reshape(rows, columns), lens, size


@settings(max_examples=500, deadline=None, derandomize=True)
@given(case=tables())
def test_agrees_with_the_definition(case: tuple[Table, list[int], int]) -> None:
    table, lens, size = case
    levels = shared_prefixes(table, lens, size)
    assert spread(levels) == by_definition(table, lens, size)
    for outer, inner in pairwise(levels):
        for run in inner:
            (parent,) = (p for p in outer if set(run.rows) < set(p.rows))
            assert parent.first + parent.count == run.first
    for level in levels:
        assert list(level) == sorted(level, key=lambda run: run.rows)
        assert all(run.count > 0 and list(run.rows) == sorted(run.rows) for run in level)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=tables())
def test_no_more_is_saved_than_rows_that_begin_alike_hold(
    case: tuple[Table, list[int], int],
) -> None:
    table, lens, size = case
    saved = sum(run.saved for level in shared_prefixes(table, lens, size) for run in level)
    assert saved <= most_saved(table, np.array(lens, np.int64), size)


def test_what_is_saved_at_most_by_hand() -> None:
    table = np.array([[7, 1, 2], [3, 4, 5], [7, 1, 9], [7, 1, 2]], np.int32)
    lens = np.array([12, 12, 8, 4])
    # Rows 0, 2 and 3 begin alike: all that 2 and 3 hold could be row 0's.
    assert most_saved(table, lens, 4) == 2 + 1
    assert most_saved(table[:2], lens[:2], 4) == 0


@pytest.mark.filterwarnings("error")
def test_stale_entries_of_empty_rows_save_nothing() -> None:
    least = np.iinfo(np.int32).min
    table = np.array([[least, 1], [least, 1], [2, 3]], np.int32)
    assert most_saved(table, np.array([0, 0, 8], np.int64), 4) == 0


def test_two_levels_by_hand() -> None:
    """Eight rows of one system prompt, in two groups of four with a document each."""
    table = np.arange(8 * 12, dtype=np.int32).reshape(8, 12) + 1000
    table[:, :5] = np.arange(5)
    for group in (0, 1):
        table[group::2, 5:8] = 100 * group + np.arange(3) + 50
    levels = shared_prefixes(table, [12 * 16] * 8, 16)
    assert levels == (
        (SharedRun(tuple(range(8)), 0, 5),),
        (SharedRun((0, 2, 4, 6), 5, 3), SharedRun((1, 3, 5, 7), 5, 3)),
    )
    assert sum(run.saved for level in levels for run in level) == 7 * 5 + 2 * 3 * 3


def test_only_full_blocks_count() -> None:
    """Three rows of the same blocks: the last, half full in one of them, is the others' alone."""
    table = np.array([[3, 4, 5]] * 3, np.int32)
    expected = (SharedRun((0, 1, 2), 0, 2),), (SharedRun((0, 2), 2, 1),)
    assert shared_prefixes(table, [48, 40, 48], 16) == expected
    assert shared_prefixes(torch.from_numpy(table), [48, 40, 48], 16) == expected


def test_long_runs_are_found_whole() -> None:
    """Longer than the first look and the next ones, ending anywhere."""
    ends = (FIRST_LOOK, 5 * FIRST_LOOK, 21 * FIRST_LOOK)
    for count in (1, *(end + near for end in ends for near in (-1, 0, 1, 2)), 3000):
        table = np.arange(3 * 3000, dtype=np.int32).reshape(3, 3000)
        table[1, :count] = table[0, :count]
        assert shared_prefixes(table, [3000] * 3, 1) == ((SharedRun((0, 1), 0, count),),)


def test_padding_rows_share_nothing() -> None:
    table = np.zeros((64, 8), np.int32)
    assert shared_prefixes(table, [0] * 64, 16) == ()


def test_bad_input() -> None:
    table = np.zeros((2, 3), np.int32)
    for lens, told in (
        ([4], r"lens \(1,\)"),
        (np.zeros((2, 2), int), r"lens \(2, 2\)"),
        (None, "lens=None must be a list of integers"),
        ([[1], [2]], r"lens\[0\]=\[1\] must be an integer"),
        ([1, -1], r"lens=\[1, -1\] must be integers, 0 or more"),
    ):
        with pytest.raises(BatchError, match=told):
            shared_prefixes(table, lens, 16)  # type: ignore[arg-type]
    for size in (0, True, 1.5):
        with pytest.raises(BatchError, match=f"block_size={size} must be a positive integer"):
            shared_prefixes(table, [4, 4], size)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=tables(), chosen=st.sets(st.integers(0, 8)))
def test_what_is_found_may_be_given_whole_or_in_part(
    case: tuple[Table, list[int], int], chosen: set[int]
) -> None:
    """A forest that was found passes every check; of some rows it is what those rows' table shows."""
    table, lens, size = case
    levels = shared_prefixes(table, lens, size)
    check_forest(levels, lens)
    check_shared_blocks(levels, table)
    rows = sorted(row for row in chosen if row < len(lens))
    fewer = spread(restricted(levels, rows))
    whole = spread(shared_prefixes(table[rows], [lens[row] for row in rows], size))
    assert fewer == whole


def test_what_is_given_wrong_is_refused_by_name() -> None:
    run = SharedRun((0, 1, 2), 0, 2)
    for levels, words in (
        ([[run]], "must be a tuple of levels"),
        (((run, "x"),), r"shared_prefix\[0\]\[1\]='x' must be a SharedRun"),
        (((SharedRun((0, 1.5), 0, 2),),), "tuple of integers"),  # type: ignore[arg-type]
        (((SharedRun((1,), 0, 2),),), r"rows=\[1\] must be two or more of the rows 0 to 3"),
        (((SharedRun((2, 1), 0, 2),),), "ascending"),
        (((SharedRun((2, 4), 0, 2),),), "0 to 3"),
        (((SharedRun((1, 2), 0, 0),),), "count=0"),
        (((SharedRun((1, 2), 1, 1),),), "begins with block 1"),
        (((run,), (SharedRun((0, 1), 3, 1),)), "begins with block 3"),
        (((run, SharedRun((2, 3), 0, 2)),), "begins with block 0"),
        (
            ((SharedRun((0, 1), 0, 1), SharedRun((2, 3), 0, 1)), (SharedRun((1, 2), 1, 1),)),
            "one run",
        ),
    ):
        with pytest.raises(BatchError, match=words):
            check_forest(levels, [64] * 4)  # type: ignore[arg-type]
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    table[1:, 0] = 0
    with pytest.raises(
        BatchError, match="rows 0 and 1 share block 1, where block_table has 1 and 4"
    ):
        check_shared_blocks(((run,),), table)
    other = table.copy()
    other[3, 2] = 9  # beyond its length nothing is read
    lens, on_device = [48, 48, 48, 31], torch.from_numpy(table)
    batch = Batch(range(5), lens, on_device, host_block_table=other)
    check_on_device(batch, 12, 16)
    other[3, 1] = 9
    with pytest.raises(
        BatchError, match=r"host_block_table\[3, 1\]=9, where block_table has 10; pass"
    ):
        check_on_device(batch, 12, 16)


def test_many_pairs_cost_little_more_than_one() -> None:
    """128 pairs that share a first block are looked at together, in a twentieth of one by one."""
    one = np.random.default_rng(0).permutation(256 * 128).astype(np.int32).reshape(256, 128)
    many = one.copy()
    one[1, 0], many[1::2, 0] = one[0, 0], many[::2, 0]
    lens, best = [2048] * 256, {1: float("inf"), 128: float("inf")}
    for _ in range(30):
        for pairs, table in ((1, one), (128, many)):
            started = time.perf_counter()
            ((*runs,),) = shared_prefixes(table, lens, 16)
            best[pairs] = min(best[pairs], time.perf_counter() - started)
            assert runs == [SharedRun((2 * i, 2 * i + 1), 0, 1) for i in range(pairs)]
    assert best[128] < 10 * best[1], best


def test_a_part_without_sequences_is_an_empty_step() -> None:
    """`explain` asks for the rows of one token, and drafts are none: it raised `IndexError`."""
    batch = Batch.from_lens([2, 2], [40, 50], torch.arange(8).int().view(2, 4), 16)
    part = batch.part([])
    assert part.num_seqs == 0 and part.block_table is not None
    assert part.block_table.shape == (0, 4) and part.find_shared_prefix(16) == ()
