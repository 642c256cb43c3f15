"""Which sequences share a prefix? Found in the block table: rows with the same leading blocks.

The runs form a forest, as in a radix tree (SGLang's RadixAttention, arXiv 2312.07104). The rows of a
run continue alone or in smaller groups, which are the runs of the next level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyattn.errors import BatchError, integer, shown
from polyattn.runtime.step.integers import integers

Rows = NDArray[np.int64]

FIRST_LOOK = 128
"""Columns that are compared at first; four times as many each time that all of them agree."""


@dataclass(frozen=True)
class SharedRun:
    """A run of blocks that rows of a step share; they share everything before it, too.

    Attributes:
        rows: indices of the rows.
        first: column of the block table at which the run starts.
        count: blocks of the run.

    Examples:
        >>> SharedRun(rows=(0, 1), first=0, count=8).count
        8

    """

    rows: tuple[int, ...]
    first: int
    count: int

    @property
    def saved(self) -> int:
        """Block reads that are saved where the run is read once for all its rows."""
        return (len(self.rows) - 1) * self.count


Levels = tuple[tuple[SharedRun, ...], ...]


def shared_prefixes(
    block_table: NDArray[np.int32] | Tensor, lens: Sequence[int] | Rows, block_size: int
) -> Levels:
    """Return the runs of blocks that two rows or more share, outermost level first.

    A block counts only where it is full in every row of its run. A run's rows are in ascending order,
    and so are a level's runs by their first row. A run's rows are some, but not all, of the rows of one
    run of the level above.

    Args:
        block_table: int32 (num_seqs, max_blocks), on the host.
        lens: (num_seqs,), how many leading tokens of each row may be shared: its context, so that each
            of its queries sees them all.
        block_size: tokens in a block.

    Returns:
        Levels of `SharedRun`s; `()` where nothing is shared.

    Raises:
        BatchError: shapes, dtypes or values don't fit.

    Examples:
        >>> shared_prefixes(np.array([[7, 1], [7, 2]], np.int32), [20, 24], 16)
        ((SharedRun(rows=(0, 1), first=0, count=1),),)

    """
    if isinstance(block_table, Tensor) and block_table.is_cpu:
        block_table = block_table.numpy()
    if not isinstance(block_table, np.ndarray) or block_table.dtype.kind != "i":
        raise BatchError(f"block_table={shown(block_table)} must be int32, on the host")
    tokens = np.asarray(lens if isinstance(lens, np.ndarray) else integers("lens", lens))
    if block_table.ndim != 2 or tokens.shape != block_table.shape[:1]:
        raise BatchError(
            f"block_table has shape {block_table.shape} and lens {tokens.shape}; they must be "
            "(num_seqs, max_blocks) and (num_seqs,)"
        )
    integer("block_size", block_size, 1, error=BatchError)
    if not may_share(block_table):
        return ()
    if tokens.dtype.kind != "i" or tokens.min() < 0:
        raise BatchError(f"lens={shown(lens)} must be integers, 0 or more")
    full = np.minimum(tokens // block_size, block_table.shape[1])
    levels: list[tuple[SharedRun, ...]] = []
    rows = np.arange(len(full))
    group = column = np.zeros(len(full), np.int64)
    while True:
        rows, group, column = _together(block_table, full, rows, group, column)
        if not len(rows):
            return tuple(levels)
        begins = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        first, stop = column[begins], _stops(block_table, full, rows, begins, column[begins])
        named, ends = rows.tolist(), [*begins[1:].tolist(), len(rows)]
        runs = [
            SharedRun(tuple(named[begin:end]), at, after - at)
            for begin, end, at, after in zip(
                begins.tolist(), ends, first.tolist(), stop.tolist(), strict=True
            )
        ]
        levels.append(tuple(sorted(runs, key=lambda run: run.rows)))
        column = stop[group]


def check_forest(levels: Levels, lens: Sequence[int]) -> None:
    """Check that runs for rows of such lengths are a forest. Raises `BatchError`.

    `check_shared_blocks` checks that the rows' block tables agree there.
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
    """Check one run alone."""
    if not isinstance(run, SharedRun):
        raise BatchError(f"{name}={shown(run)} must be a SharedRun")
    numbers = (*run.rows, run.first, run.count) if isinstance(run.rows, tuple) else ("",)
    if any(type(number) is not int for number in numbers):
        raise BatchError(f"{name}={shown(run)} must have a tuple of integers, and two integers")
    members = list(run.rows)
    if len(members) < 2 or members != sorted(set(members)) or members[0] < 0 or members[-1] >= rows:
        raise BatchError(
            f"{name}.rows={shown(members)} must be two or more of the rows 0 to {rows - 1}, ascending"
        )
    if run.count < 1:
        raise BatchError(f"{name}.count={run.count} must be one block or more")


def check_shared_blocks(levels: Levels, table: NDArray[np.int32]) -> None:
    """Check that rows have the same blocks in their runs. Raises `BatchError`."""
    for run in (run for level in levels for run in level):
        blocks = table[list(run.rows), run.first : run.first + run.count]
        differs = blocks != blocks[0]
        if differs.any():
            at = np.argwhere(differs)[0]
            row, column = run.rows[at[0]], run.first + int(at[1])
            raise BatchError(
                f"shared_prefix has rows {run.rows[0]} and {row} share block {column}, where block_table "
                f"has {table[run.rows[0], column]} and {table[row, column]}"
            )


def check_shared(
    levels: Levels,
    lens: Sequence[int],
    contexts: Rows,
    block_size: int,
    table: NDArray[np.int32] | None = None,
) -> None:
    """Check that each row has its new tokens behind the blocks that it shares, and that a table agrees.

    `table`: None where only the device has it. Raises `BatchError`.
    """
    for level in levels:
        for run in level:
            end = (run.first + run.count) * block_size
            for row in run.rows:
                if contexts[row] < end:
                    raise BatchError(
                        f"shared_prefix has {end} tokens of row {row}, whose length is {lens[row]}; a "
                        "row's new tokens are its own: end the run before them"
                    )
    if table is not None:
        check_shared_blocks(levels, table)


def restricted(levels: Levels, rows: Iterable[int]) -> Levels:
    """Return the forest of some of the rows, renumbered in their order."""
    numbers = {row: number for number, row in enumerate(rows)}
    forest = []
    for level in levels:
        runs = []
        for run in level:
            left = tuple(sorted(numbers[row] for row in run.rows if row in numbers))
            if len(left) > 1:
                runs.append(SharedRun(left, run.first, run.count))
        if not runs:
            break
        forest.append(tuple(sorted(runs, key=lambda run: run.rows)))
    return tuple(forest)


def may_share(block_table: NDArray[np.int32]) -> bool:
    """Return whether two rows begin with one block: the only cost of the common case, no sharing."""
    rows, columns = block_table.shape
    return bool(rows > 1 and columns and len(set(block_table[:, 0].tolist())) < rows)


def most_saved(block_table: NDArray[np.int32], lens: Rows, block_size: int) -> int:
    """Return how many block reads sharing can save at most, of rows that begin with one block.

    As `shared_prefixes` takes them; all rows but the longest one could share all of their blocks.
    """
    if not may_share(block_table):
        return 0
    blocks, full = block_table[:, 0], np.minimum(lens // block_size, block_table.shape[1])
    order = np.argsort(blocks)
    begins = np.flatnonzero(np.append(True, blocks[order[1:]] != blocks[order[:-1]]))
    return int(full.sum() - np.maximum.reduceat(full[order], begins).sum())


def _together(
    table: NDArray[np.int32], full: Rows, rows: Rows, group: Rows, column: Rows
) -> tuple[Rows, Rows, Rows]:
    """Return those rows of each group that agree with another one in the group's column.

    As (rows, the number of their new group, its column), a group's rows side by side.
    """
    some = full[rows] > column
    rows, group, column = rows[some], group[some], column[some]
    blocks = table[rows, column]
    order = np.lexsort((blocks, group))
    rows, group, column, blocks = rows[order], group[order], column[order], blocks[order]
    several, number = np.zeros(len(rows), bool), np.zeros(len(rows), np.int64)
    alike = (group[1:] == group[:-1]) & (blocks[1:] == blocks[:-1])
    several[1:] = alike
    several[:-1] |= alike
    np.cumsum(~alike, out=number[1:])
    rows, column, number = rows[several], column[several], number[several]
    left = np.zeros(len(rows), np.int64)
    np.cumsum(number[1:] != number[:-1], out=left[1:])
    return rows, left, column


def _stops(table: NDArray[np.int32], full: Rows, rows: Rows, begins: Rows, column: Rows) -> Rows:
    """Return where each group ceases to agree, of groups that agree in `column`.

    `begins`: where their rows begin among `rows`. Runs of one column are compared together.
    """
    counts, mine = np.diff(begins, append=len(rows)), rows
    limit, stop = np.minimum.reduceat(full[rows], begins), column + 1
    for at in (np.unique(column) + 1).tolist():
        left, width = (column + 1 == at) & (limit > at), FIRST_LOOK
        going, first = np.flatnonzero(left), begins
        while len(going):
            if len(going) < len(begins):
                mine = rows[np.repeat(left, counts)]
                first = counts[going].cumsum() - counts[going]
            piece = table[mine, at : min(at + width, int(limit[going].max()))]
            end = at + piece.shape[1]
            # A row differs from the one before where not all of a group are alike.
            differs = piece[1:] != piece[:-1]
            stops = differs.argmax(1)
            stops[~differs[np.arange(len(stops)), stops]] = piece.shape[1]
            stops[first[1:] - 1] = piece.shape[1]
            where = np.append(piece.shape[1], stops)
            stop[going] = np.minimum(at + np.minimum.reduceat(where, first), limit[going])
            left, at, width = left & (stop == end) & (limit > end), end, 4 * width
            going = np.flatnonzero(left)
    return stop
