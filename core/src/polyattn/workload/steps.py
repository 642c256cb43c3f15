"""Which steps are worth testing? Tables of (query length, sequence length) by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.shared_prefix import Levels, SharedRun
from polyattn.runtime.step.step_mask import StepMask
from polyattn.spec.layer import LayerSpec

USUAL, LATER, PAGES, AT_CAP, EDGES = "usual", "later", "pages", "at the cap", "edges"
"""How a step's numbers are drawn. They are normal; or the first given keys stand later in their texts; or
a mask's blocks are the cache's; or logits lie near the layer's soft cap; or some rows are zero, subnormal
or large. A family knows others."""
Lengths = Sequence[tuple[int, int]]
"""(query length, sequence length) of each sequence."""


def batches(name: str, block: int) -> list[tuple[int, int]]:
    """Return (query length, sequence length) pairs for a block size.

    Together they hold empty sequences, length 1, exact multiples of a block and one over, more
    sequences than a warp has lanes, and lengths beyond any tile.
    """
    decode = [(1, 1), (1, block), (1, block + 1), (1, 3 * block - 1), (1, 5 * block + 7)]
    prefill = [(0, 0), (1, 1), (2, 2), (block, block), (block + 1, block + 1), (37, 37)]
    chunked = [(0, 5), (3, block + 3), (block, 2 * block), (5, 4 * block + 1), (1, 9), (29, 61)]
    mixed = [*decode, (0, 0), *prefill[3:], *chunked]
    return {
        "decode": decode,
        "prefill": prefill,
        "chunked": chunked,
        "mixed": mixed,
        "prefills first": sorted(mixed, key=lambda pair: -pair[0]),
        "many": [(1 + 2 * (i % 7 == 3), 3 + 5 * (i % 9)) for i in range(41)],
        "in order": [(1, 5), (1, block + 1), (1, 3 * block), (7, 7), (block, 2 * block), (29, 61)],
        "long": [(1, 2049), (1, 1500), (70, 1100), (300, 300)],
        "shared": [(1, 2 * block + 1), (5, 3 * block + 5), (1, 2 * block + 7), (block, 4 * block)],
        "short queries": [(3, block + 3), (1, 5), (2, 2), (4, 3 * block), (37, 50), (8, 3 * block)],
        "padded": [(1, block + 3), (1, 0), (1, 2), (1, 0)],
        "empty": [(0, 0), (0, 7)],
        "padded rows": [(4, block + 4), (4, 0), (4, 4), (4, 0), (4, 3 * block + 1), (4, 0)],
        "padded prompts": [
            (37, 0),
            (1, 9),
            (20, 30),
            (block + 1, 0),
            (1, 0),
            (2 * block, 2 * block),
        ],
        "late padding": [(5, block + 5), (1, 0), (0, 3), (1, 9)],
        "given": [(1, 1), (33, 33), (0, 0), (64, 64), (17, 17), (1, 0)],
        "more keys": [(1, 40), (5, 9), (33, 70), (0, 4), (2, 300)],
        "fewer keys": [(5, 3), (33, 20), (4, 0), (1, 1), (70, 69)],
        "choices": [
            (1, 1),
            (1, 0),
            (3, block + 2),
            (0, 5),
            (5, 5),
            (1, 3 * block),
            (7, 4 * block + 5),
        ],
        "tiny": [(1, 3), (1, block + 2), (1, 7)],
        "long context": [(33, 4139), (2, 8200), (1, 65_600), (130, 4500)],
        "long prompts": [(600, 600), (1, 3), (520, 700), (4100, 4111)],
        "many sequences": [(1 + 3 * (i % 9 == 4), 4 + 5 * (i % 13)) for i in range(600)],
        "after context": [(130, 141 + block), (1, 5 * block + 7), (257, 300), (1, 77), (1, 4500)],
        "powers of two": [
            *((1, 1 << n) for n in range(5, 13)),
            *((1 << n, 1 << n) for n in range(5, 9)),
            (64, 1024),
        ],
        "all full": [(1, 4 * block), (block, 4 * block), (3, 4 * block)],
    }[name]


def reaching(spec: LayerSpec, block: int) -> list[tuple[int, int]]:
    """Return a step beyond a layer's window, chunk and sink tokens, some of it in several tiles."""
    rows = [(1, 1), (1, 300), (37, 50), (133, 133)]
    seen = (spec.sliding_window or 0) + spec.sink_tokens
    far = max(seen, spec.chunk_size or 0)
    if far:
        rows += [
            (1, far + block + 3),
            (1, far),
            (1, far + 1),
            (5, far + 9),
            (min(far + 9, 300 if far < 300 else 65), far + 9),
        ]
    return rows


RECURRENT = {
    "mixed": [
        (1, 9), (1, 1), (1, 0), (1, 300), (0, 7), (5, 5), (70, 70), (4, 0), (129, 140), (3, 80), (1, 2),
    ],
    "fresh": [(1, 1), (2, 2), (64, 64), (65, 65), (200, 200), (31, 31)],
    "continued": [(2, 3), (16, 40), (64, 100), (66, 166), (3, 4), (7, 70_002)],
    "tokens": [(1, 5), (1, 1), (1, 17), (1, 4096), (1, 40_009), (1, (1 << 24) + 3)],
    "three each": [(3, 5), (3, 3), (3, 17), (3, 4000)],
    "many": [(1 + 2 * (i % 5 == 2), 3 + 4 * (i % 7)) for i in range(45)],
    "padded": [(1, 5), (1, 0), (1, 1), (1, 0)],
    "padded drafts": [(4, 9), (4, 0), (4, 4), (4, 70), (4, 0), (4, 0)],
    "padded prompts": [(70, 0), (20, 30), (33, 0), (130, 130), (200, 0)],
    "empty": [(0, 0), (0, 7)],
}  # fmt: skip
"""A recurrence's: longer sequences continue, equal ones start fresh."""

FORESTS = ("one run", "levels", "many rows", "alone")


def forest(name: str, block: int) -> tuple[Levels, list[int]]:
    """Return the runs that a batch's rows share, and their lengths, for a block size.

    Together they hold rows without a run, padding, several levels, a group that with its heads is wider
    than any tile of queries, and nothing shared at all.
    """
    if name == "one run":
        return ((SharedRun((0, 1, 3), 0, 5),),), [5 * block + 1, 6 * block, 9, 7 * block + 3]
    if name == "levels":
        levels: Levels = (
            (SharedRun((0, 1, 2, 3, 5), 0, 4),),
            (SharedRun((0, 2, 3), 4, 3), SharedRun((1, 5), 4, 1)),
            (SharedRun((2, 3), 7, 2),),
        )
        return levels, [9 * block, 6 * block + 5, 10 * block + 1, 9 * block + 2, 0, 5 * block + 7]
    if name == "many rows":
        rows = tuple(range(20))
        levels = ((SharedRun(rows, 0, 3),), (SharedRun(rows[1::2], 3, 2),))
        return levels, [5 * block + 1 + row % 5 for row in rows]
    return (), [block + 1, 0, 3 * block]


def drawn_forest(count: int, integer: Callable[[int, int], int]) -> tuple[Levels, list[int]]:
    """Return runs that some of `count` rows share, up to five levels, and each row's blocks in runs.

    `integer` draws from [low, high).
    """
    levels: list[tuple[SharedRun, ...]] = []
    groups, ends = [list(range(count))], [0] * count
    while groups and len(levels) < 5:
        runs: list[SharedRun] = []
        for rows in groups:
            labels = [integer(0, 3) for _ in rows]
            for label in (0, 1):  # what has label 2 goes on alone
                chosen = tuple(row for row, its in zip(rows, labels, strict=True) if its == label)
                if len(chosen) > 1:
                    runs.append(SharedRun(chosen, ends[chosen[0]], integer(1, 60)))
        for run in runs:
            for row in run.rows:
                ends[row] = run.first + run.count
        groups = [list(run.rows) for run in runs]
        levels += [tuple(sorted(runs, key=lambda run: run.rows))] if runs else []
    return tuple(levels), ends


def share_blocks(table: Tensor, levels: Levels) -> None:
    """Let the rows of each run have its first row's blocks."""
    for run in (run for level in levels for run in level):
        columns = slice(run.first, run.first + run.count)
        table[list(run.rows), columns] = table[run.rows[0], columns].clone()


def lens_of(lengths: Lengths) -> tuple[list[int], list[int]]:
    """Return the queries' and the sequences' lengths."""
    return [q for q, _ in lengths], [n for _, n in lengths]


def pairs(batch: Batch) -> list[tuple[int, int]]:
    """Return the (query length, sequence length) pairs of a batch."""
    return list(zip(batch.query_lens, batch.lens, strict=True))


def new_rows(lengths: Lengths) -> Tensor:
    """Return where a step's new tokens are among all tokens of its sequences, int64."""
    rows, start = [], 0
    for query, length in lengths:
        # A padding row (one query token, length 0) has no token at all: any will do.
        rows += [max(at, 0) for at in range(start + length - query, start + length)]
        start += length
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def held_before(lengths: Lengths, skipped: bool = False) -> Tensor:
    """Return which tokens the cache holds before the step: the context, some new ones if `skipped`."""
    there, end = torch.ones(sum(n for _, n in lengths), dtype=torch.bool, device="cpu"), 0
    for query, length in lengths:
        first, end = end + max(length - query, 0), end + length
        there[first:end] = False
        if skipped:
            there[first:end:2] = True
    return there


def paged(
    lengths: Lengths, table: Tensor, block: int, mask: StepMask | None = None, **known: Any
) -> Batch:
    """Like `Batch.from_lens`, with slot -1 for padding rows (one query token, length 0).

    `known`: further arguments of `Batch`.
    """
    queries, lens = lens_of(lengths)
    real = [n if n or q != 1 else 1 for q, n in lengths]
    batch = Batch.from_lens(queries, real, table, block)
    assert batch.slot_mapping is not None
    slots = batch.slot_mapping.clone()
    for start, (query, length) in zip(batch.starts, lengths, strict=False):
        if query == 1 and length == 0:
            slots[start] = -1
    return Batch(batch.starts, lens, table, slots, mask=mask, **known)
