"""How do TRITON_ATTN and FlashInfer's CUDA cores deal the keys of decodes out?

A program has one row's heads of a KV head, or a part of its keys. So little is computed that memory takes
the time, and what a step costs beside: programs that look their tiles up, and merging.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from polyattn.selection.pieces import SLACK, Counts, alike, largest, total
from polyattn.selection.step import Step
from polyattn.spec.layer import LayerSpec

TILE, BLOCK, WIDE_BLOCK, WIDE = 64, 64, 32, 128
"""Rows that a tile counts as; keys of TRITON_ATTN's blocks, and with heads wider than `WIDE`."""
LEAST, UNMERGED = 3, 4
"""Blocks of a program at the least, its tile's own included; by which the longest may exceed a share."""
SPLIT_KEYS, SPLITS, MOST_SPLITS, CHEAP = 128, 16, 128, 4
"""Keys of an even split at the least; splits up to which they are cut anyway, and at the most; up to
which more of them are better."""
ON_ONE, ON_WIDE, MANY = 3, 2, 4
"""Programs on a processor: of stretches, with wide heads or 8-bit keys, and of many whole rows."""
OUTPUTS, AT_ONCE, READ = 2048, 16, 8192
"""Outputs of a group that the last program merges at the most; parts at a time, and their outputs."""
LISTED, TOGETHER, MERGE, ROUND, APART, BEGUN = 1.5, 0.8, 0.45, 0.15, 0.4, 0.5
"""What it costs beside, in one unit: programs that look their tiles up; the last program's merge; a
kernel's, each round of it, and its launch after even splits. Blocks that an even split costs beside."""
PARTIAL = 3
"""Reads and writes of a row's part, in those of a token."""
CORES, MORE_CORES, NARROW_CORES, PIECE, PAGE, MERGED = 6, 9, 7, 8, 16, 256
"""FlashInfer's programs on a processor's CUDA cores, where a group is one head, and more, of 16 and of 8
bits: the registers and shared memory that its kernels take on a Hopper leave room for no more. Pages of a
piece at the least; keys of a page; parts of a row that take twice as long to merge as a few."""
THREADS, LOAD, ALONE, ONE, MORE = 128, 16, 4, 3, 2
"""Threads of a program at the least; bytes that each loads at a time; keys of which, where a group is one
head (two of 8 bits); and how long that takes, beside one key."""


@lru_cache(4096)
def even_splits(programs: int, processors: int, longest: int) -> int:
    """Return into how many parts TRITON_ATTN cuts each of equal rows, the longest of so many keys."""
    loads = [
        (each / splits, splits) for each in (2, ON_ONE) if (splits := each * processors // programs)
    ]
    if not loads:
        return 1
    least = min(loads)[0]
    equal = [splits for load, splits in loads if load == least]
    splits = max((s for s in equal if s <= CHEAP), default=min(equal))
    if splits == 1 and 2 * programs <= MANY * processors:
        splits = 2
    most = max(SPLITS, processors // programs)
    return max(1, min(splits, most, -(-longest // SPLIT_KEYS), MOST_SPLITS))


def stretches(step: Step, processors: int) -> Counts:
    """Count as TRITON_ATTN does: even splits of even rows, else stretches of all rows' blocks."""
    spec, group, heads, lens = step.spec, step.spec.gqa_ratio, step.spec.num_kv_heads, step.lens
    wide = spec.head_size > WIDE
    block = WIDE_BLOCK if wide else BLOCK
    if step.seen is None:
        tiles = (lens + (block - 1)) // block
    else:
        tiles = (lens - 1) // block - np.maximum(lens - (1 + step.seen), 0) // block + 1
    count, every, longest = len(tiles), total(tiles), largest(tiles)
    on_one = ON_WIDE if wide or step.narrow else ON_ONE
    rows = 1 << (group - 1).bit_length()  # that a part has
    programs = count * heads
    share: float
    if longest <= SLACK * every / count + 1:
        keys = largest(lens) if step.seen is None else step.seen + 1
        splits = even_splits(programs, processors, keys)
        full = programs * splits / (MANY * processors)
        if full <= 1 or full >= 0.8 * math.ceil(full):
            outputs = rows << (spec.v_head_size - 1).bit_length()
            by_last = min(AT_ONCE, READ // outputs) if outputs <= OUTPUTS else 1
            cost = TOGETHER if splits > 1 else 0.0
            if splits > by_last:
                cost = APART + MERGE + ROUND * -(-splits // AT_ONCE)
            many = programs * splits > ON_ONE * processors  # which are smaller
            rounds = programs * splits / (processors * (MANY if many else on_one))
            rounds = math.ceil(rounds) if rounds < ON_ONE else rounds
            share = -(-longest // splits) + BEGUN
            units, pieces = every + BEGUN * count * splits, count * splits * (splits > 1)
            return _counts(step, cost, share * max(1, rounds), units, pieces * rows, block)
    slots, line, longest = max(1, on_one * processors // heads), every + count, longest + 1
    least, parts, pieces = max(-(-line // slots), LEAST), 1, 0
    if count <= slots and longest <= least + UNMERGED:
        share, line = longest, count * longest
    else:
        share, parts = alike(count, longest, slots, least)
        pieces = count * parts * (parts > 1)
        if share > SLACK * line / slots + 1:
            share, parts = least, min(slots, (longest - 2) // least + 2)
            used = min(slots, -(-line // least))
            pieces = used + min(count, used)
    cost = LISTED + (MERGE + ROUND * -(-parts // AT_ONCE) if parts > 1 else 0)
    return _counts(step, cost, share, line, pieces * rows, block)


def begun_keys(spec: LayerSpec) -> float:
    """Return the keys that a row costs beside its own, at the least."""
    return BEGUN * (WIDE_BLOCK if spec.head_size > WIDE else BLOCK)


def _counts(step: Step, cost: float, share: float, units: float, rows: float, block: int) -> Counts:
    """Return the counts of a step whose longest program has a share of all blocks, and of parts' rows."""
    pairs = int(units * block * TILE) // step.spec.gqa_ratio
    tokens = step.tokens + int(PARTIAL * rows) // step.spec.gqa_ratio
    return Counts(cost / step.spec.num_kv_heads, tokens, int(share * block), pairs, pairs)


def cores(step: Step, processors: int) -> Counts:
    """Count as FlashInfer's decodes of small groups do, on CUDA cores: the shortest pieces with room.

    A group's threads load so many keys at a time, each a part of a key (decode.cuh): 32 of 128 elements
    where the group is one head, 8 where it is two, 6 of three.
    """
    spec, heads, count, group = (
        step.spec,
        step.spec.num_kv_heads,
        len(step.lens),
        step.spec.gqa_ratio,
    )
    on_one = CORES if group == 1 else NARROW_CORES if step.narrow else MORE_CORES
    pages, room = (step.lens + (PAGE - 1)) // PAGE, max(1, on_one * processors // heads)
    limit, pieces = largest(pages), count
    if count < room:
        low, top = PIECE, limit
        while low < top:
            middle = (low + top) // 2
            fits = total((pages + (middle - 1)) // middle) <= room
            low, top = (low, middle) if fits else (middle + 1, top)
        limit = min(limit, low)
        pieces = total((pages + (limit - 1)) // limit)
    pairs = pieces * TILE // group
    merging = 1 + -(-largest(pages) // limit) / MERGED if pieces > count else 0.0
    item = 1 if step.narrow else 2
    lanes = spec.head_size * item // LOAD  # of a key
    each = group * max(1, THREADS // (lanes * group)) * (ALONE * item // 2 if group == 1 else 1)
    longest = -(-limit * PAGE // each) * (ONE if group == 1 else MORE)
    return Counts(merging / heads, step.tokens, longest, pairs, pairs, kind="cores")
