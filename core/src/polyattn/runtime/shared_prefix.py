"""Which sequences share a prefix? Read off the block table: rows that agree in a leading run.

The runs form a forest, as in a radix tree (SGLang's RadixAttention, arXiv 2312.07104): the rows of a
run go on together, one by one or in smaller groups, which are the runs of the next level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyattn.errors import BatchError, shown

Rows = NDArray[np.int64]

FIRST_LOOK = 64
"""Columns that are compared at first; twice as many each time that all of them agree."""


@dataclass(frozen=True)
class SharedRun:
    """Blocks `first` to `first + count` of `rows` are the same, as is all that lies before them."""

    rows: tuple[int, ...]
    first: int
    count: int

    @property
    def saved(self) -> int:
        """Block reads that are saved where the run is read once for all its rows."""
        return (len(self.rows) - 1) * self.count


Levels = tuple[tuple[SharedRun, ...], ...]


def shared_prefixes(
    block_table: NDArray[np.int32], lens: Sequence[int] | Rows, block_size: int
) -> Levels:
    """Return the runs of blocks that two rows or more share, outermost level first.

    `block_table` int32 (num_seqs, max_blocks) on the host; `lens` (num_seqs,): how many leading
    tokens of each row may be shared, which is its context, so that each of its queries sees them
    all. A block counts only where it is full in every row of its run. `()` where nothing is
    shared. Rows of a run, and runs of a level by their first row, are in ascending order; each
    run's rows but not all of them go on in one run of the level above. Raises `BatchError`.
    """
    if block_table.ndim != 2 or len(lens) != block_table.shape[0]:
        raise BatchError(
            f"block_table has shape {block_table.shape} and lens {len(lens)} entries; they must be "
            "(num_seqs, max_blocks) and num_seqs"
        )
    if block_size < 1:
        raise BatchError(f"block_size={block_size} must be positive")
    if not may_share(block_table):
        return ()
    full = np.minimum(np.asarray(lens, np.int64) // block_size, block_table.shape[1])
    levels: list[tuple[SharedRun, ...]] = []
    groups = _groups(block_table, full, np.arange(len(full)), 0)
    while groups:
        runs = [_run(block_table, full, rows, first) for rows, first in groups]
        levels.append(tuple(sorted(runs, key=lambda run: run.rows)))
        groups = [
            group
            for run in runs
            for group in _groups(block_table, full, np.array(run.rows), run.first + run.count)
        ]
    return tuple(levels)


def check_forest(levels: Levels, lens: Sequence[int]) -> None:
    """Check that runs given for rows of such lengths are a forest. Raises `BatchError`.

    Whether the rows' block tables really agree there says `check_shared_blocks`.
    """
    if not isinstance(levels, tuple) or not all(isinstance(level, tuple) for level in levels):
        raise BatchError(
            f"shared_prefix={shown(levels)} must be a tuple of levels, tuples of SharedRun"
        )
    ends = dict.fromkeys(range(len(lens)), 0)
    outer = [set(ends)]  # the rows of each run of the level before
    for depth, level in enumerate(levels):
        for index, run in enumerate(level):
            name = f"shared_prefix[{depth}][{index}]"
            _check_run(name, run, len(lens))
            if {ends[row] for row in run.rows} != {run.first}:
                raise BatchError(
                    f"{name} begins with block {run.first}; a level's runs begin where their rows' runs "
                    "of the level before end, the first level's with block 0"
                )
            if not any(set(run.rows) <= rows for rows in outer):
                raise BatchError(
                    f"{name}.rows={shown(list(run.rows))} are not all of one run of the level before"
                )
            ends |= dict.fromkeys(run.rows, run.first + run.count)
        outer = [set(run.rows) for run in level]
        if sum(map(len, outer)) > len(set().union(*outer)):
            raise BatchError(f"shared_prefix[{depth}] has a row in two runs; a level has it in one")


def _check_run(name: str, run: SharedRun, rows: int) -> None:
    """Check one run by itself."""
    if not isinstance(run, SharedRun):
        raise BatchError(f"{name}={shown(run)} must be a SharedRun")
    numbers = (*run.rows, run.first, run.count) if isinstance(run.rows, tuple) else ("",)
    if any(type(number) is not int for number in numbers):
        raise BatchError(f"{name}={shown(run)} must have a tuple of integers, and two integers")
    given = list(run.rows)
    if len(given) < 2 or given != sorted(set(given)) or given[0] < 0 or given[-1] >= rows:
        raise BatchError(
            f"{name}.rows={shown(given)} must be two or more of the rows 0 to {rows - 1}, ascending"
        )
    if run.count < 1:
        raise BatchError(f"{name}.count={run.count} must be one block or more")


def check_shared_blocks(levels: Levels, table: NDArray[np.int32]) -> None:
    """Check that rows really have the blocks of their runs in common. Raises `BatchError`."""
    for run in (run for level in levels for run in level):
        blocks = table[list(run.rows), run.first : run.first + run.count]
        differs = np.argwhere(blocks != blocks[0])
        if len(differs):
            row, column = run.rows[differs[0][0]], run.first + int(differs[0][1])
            raise BatchError(
                f"shared_prefix has rows {run.rows[0]} and {row} share block {column}, where block_table "
                f"has {table[run.rows[0], column]} and {table[row, column]}"
            )


def check_own_tokens(levels: Levels, lens: Sequence[int], block_size: int) -> None:
    """Check that each row has a token behind the blocks that it shares. Raises `BatchError`."""
    for level in levels:
        for run in level:
            end = (run.first + run.count) * block_size
            for row in run.rows:
                if lens[row] <= end:
                    raise BatchError(
                        f"shared_prefix has {end} tokens of row {row}, whose length is {lens[row]}; a "
                        "row's last token is its own: end the run before it"
                    )


def restricted(levels: Levels, rows: Iterable[int]) -> Levels:
    """Return the forest of some of the rows, numbered anew in their order."""
    numbers = {row: number for number, row in enumerate(rows)}
    found = []
    for level in levels:
        runs = []
        for run in level:
            left = tuple(sorted(numbers[row] for row in run.rows if row in numbers))
            if len(left) > 1:
                runs.append(SharedRun(left, run.first, run.count))
        if not runs:
            break
        found.append(tuple(sorted(runs, key=lambda run: run.rows)))
    return tuple(found)


def may_share(block_table: NDArray[np.int32]) -> bool:
    """Whether two rows begin with one block: all that the common case, no sharing at all, costs."""
    if block_table.size == 0:
        return False
    ordered = np.sort(block_table[:, 0])
    return bool((ordered[1:] == ordered[:-1]).any())


def _groups(
    table: NDArray[np.int32], full: Rows, rows: Rows, column: int
) -> list[tuple[Rows, int]]:
    """Return those of `rows` that agree in this column, each group of two or more with it."""
    rows = rows[full[rows] > column]
    if len(rows) < 2:
        return []
    blocks = table[rows, column]
    order = np.argsort(blocks, kind="stable")
    blocks, rows = blocks[order], rows[order]
    ends = np.flatnonzero(np.append(blocks[1:] != blocks[:-1], True)) + 1
    starts = np.append(0, ends[:-1])
    several = np.flatnonzero(ends - starts > 1)
    return [(rows[starts[at] : ends[at]], column) for at in several]


def _run(table: NDArray[np.int32], full: Rows, rows: Rows, first: int) -> SharedRun:
    """Return the longest run from `first` in which all of `rows` agree; they do in `first`."""
    stop, limit, width = first + 1, int(full[rows].min()), FIRST_LOOK
    while stop < limit:
        piece = table[rows, stop : min(stop + width, limit)]
        differs = np.flatnonzero((piece != piece[0]).any(axis=0))
        if len(differs):
            stop += int(differs[0])
            break
        stop += piece.shape[1]
        width *= 2
    return SharedRun(tuple(rows.tolist()), first, stop - first)
