"""The keys that the Pallas kernel reads for a plan: its walk over tiles, steps and pages, vectorised.

Follows `kernel.attention_kernel`, from the plan's arrays. It shares nothing with `planning`, so that a
mistake there isn't repeated here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import Batch, Items, Keys, LayerSpec, Reads, no_merges
from polyattn.plugin import key_ranges

from polyattn_tpu.configs import DENSE_PAGE, block_tokens, pages_per_step
from polyattn_tpu.planning import AttentionPlan
from polyattn_tpu.step import Step

Ints = NDArray[np.int64]


class Walk(NamedTuple):
    """What each tile is to the kernel, int64 (tiles,) each: rows [`skip`, `stop`) of it are real."""

    seq: Ints
    start: Ints
    skip: Ints
    stop: Ints
    queries: Ints
    length: Ints


def reads_of(spec: LayerSpec, plan: AttentionPlan, batch: Batch, page: int) -> Reads:
    """Return what the kernel reads of a plan; an item is one block of a tile's rows.

    `page`: tokens of a page of the cache; keys that are passed whole have `DENSE_PAGE`.
    """
    step, group = Step.from_batch(batch), spec.gqa_ratio
    page = page if plan.cached else DENSE_PAGE
    faults = _other_lengths(step, plan) + _pages_elsewhere(step, plan, page)
    tiles, tokens = _walk(step, plan, faults), plan.tiles.step

    each = min(block_tokens(group), tokens)
    blocks = tokens // each
    tile, block = (part.ravel() for part in np.indices((len(tiles.seq), blocks)))
    low = np.maximum(block * each, tiles.skip[tile])
    high = np.minimum((block + 1) * each, tiles.stop[tile])
    some = high > low
    block, low, high = block[some], low[some], high[some]
    of = Walk(*(array[tile[some]] for array in tiles))
    count = np.arange(len(block))
    nothing = 0 * count
    items = Items(
        of.seq, (of.start + low) * group, (high - low) * group, nothing,
        nothing + spec.num_kv_heads, nothing - 1, nothing, of.seq,
    )  # fmt: skip

    context = of.length - of.queries
    first = context + of.start
    last = context + np.minimum(of.start + tokens, of.queries) - 1
    ranges = key_ranges(spec, first, last, of.length, np.minimum, np.maximum)
    keys = pages_per_step(page) * page
    end = -(-ranges.near_stop // keys)
    begin = ranges.near_start // keys
    if spec.causal and blocks > 1:  # a block that ends before a step's keys is skipped
        cap = -(-(first + (block + 1) * each) // keys)
    else:
        cap = np.maximum(end, -(-ranges.kept_stop // keys))
    parts = [(begin, end)]
    if spec.sink_tokens:
        sinks = ranges.kept_start // keys, -(-ranges.kept_stop // keys)
        parts = [sinks, (np.maximum(begin, sinks[1]), end)]
    read = [
        np.stack([count, part_begin * keys, np.minimum(part_end, cap) * keys])
        for part_begin, part_end in parts
    ]
    return Reads(
        group, spec.num_kv_heads, items, Keys(*np.concatenate(read, axis=1)), no_merges(),
        faults=faults, spec=spec,
    )  # fmt: skip


def _walk(step: Step, plan: AttentionPlan, faults: list[str]) -> Walk:
    """Return the tiles; one without a sequence, or with nothing to do, has no real rows."""
    seq, start, token = (
        np.asarray(array, np.int64)
        for array in (plan.tiles.seq, plan.tiles.start, plan.tiles.token)
    )
    query_lens = np.asarray(plan.pages.query_lens, np.int64)
    inside = (seq >= 0) & (seq < len(query_lens))
    faults += [f"tile {i}: no sequence {seq[i]}" for i in np.flatnonzero(~inside)]
    seq = np.where(inside, seq, 0)
    queries, tokens = query_lens[seq], plan.tiles.step
    skip = np.maximum(-start, 0)
    stop = np.where(inside, np.minimum(start + tokens, queries) - start, 0)
    real = stop > skip
    begins = np.append(np.asarray(step.starts, np.int64), 0)
    own = begins[np.minimum(seq, step.num_seqs)] + start
    faults += [
        f"tile {i} of sequence {seq[i]}: step token {token[i]} is read where {own[i]} is meant"
        for i in np.flatnonzero(real & (token != own))
    ]
    faults += [
        f"tile {i}: tokens {token[i]} to {token[i] + tokens} of {plan.num_tokens} are read"
        for i in np.flatnonzero((token < 0) | (token + tokens > plan.num_tokens))
    ]
    # The step's last tile may begin earlier: tiles run in order, so the rows it has again are its own.
    follows = np.append(seq[1:] == seq[:-1], False) & np.append(real[1:], False)
    after = np.append(start[1:] + skip[1:], 0) - start
    stop = np.where(follows, np.minimum(stop, after), stop)
    return Walk(seq, start, skip, stop, queries, np.asarray(plan.pages.seq_lens, np.int64)[seq])


def _other_lengths(step: Step, plan: AttentionPlan) -> list[str]:
    """Return the sequences for which the kernel masks by other lengths than theirs."""
    queries, lens = (
        np.asarray(array).tolist() for array in (plan.pages.query_lens, plan.pages.seq_lens)
    )
    return [
        f"sequence {i}: its mask is of {queries[i]} query tokens and {lens[i]} keys"
        for i, wanted in enumerate(zip(step.query_lens, step.seq_lens, strict=True))
        if (queries[i], lens[i]) != wanted
    ]


def _pages_elsewhere(step: Step, plan: AttentionPlan, page: int) -> list[str]:
    """Return the sequences whose pages, as the kernel finds them, hold other keys than theirs."""
    first, table = (np.asarray(a, np.int64) for a in (plan.pages.first, plan.pages.table))
    pack = None if plan.pack is None else np.asarray(plan.pack, np.int64).ravel()
    starts: Any = step.key_starts or np.cumsum((0, *step.seq_lens))
    faults = []
    for seq, length in enumerate(step.seq_lens):
        if not step.query_lens[seq]:
            continue
        count = -(-length // page)
        numbers = table[first[seq] : first[seq] + count]
        if pack is not None:
            places = (numbers[:, None] * page + np.arange(page)).ravel()[:length]
            right = (places < len(pack)).all() and np.array_equal(
                pack[places], np.arange(starts[seq], starts[seq] + length)
            )
        else:
            assert step.block_table is not None
            right = np.array_equal(numbers, step.block_table[seq, :count])
        if not right:
            faults.append(
                f"sequence {seq}: pages from {first[seq]} of the table hold other keys than its own, "
                "or of another sequence"
            )
    return faults
