"""What does a plan have the Pallas kernel read? Its walk over tiles, steps and pages, all at a time.

Written after `kernel.attention_kernel`, from what lies in the plan's arrays. It shares nothing with
`planning`: no mistake there is repeated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from polyattn.kernel import Batch, Items, Keys, LayerSpec, Reads, no_merges
from polyattn.plugin import key_ranges

from polyattn_tpu.configs import DENSE_PAGE, block_tokens, pages_per_step
from polyattn_tpu.planning import AttentionPlan
from polyattn_tpu.step import Step


def reads_of(spec: LayerSpec, plan: AttentionPlan, batch: Batch, page: int) -> Reads:
    """Return what the kernel reads of a plan; an item is one block of a tile's rows.

    `page`: tokens of a page of the cache; keys that are passed whole have `DENSE_PAGE`.
    """
    step, group, faults = Step.from_batch(batch), spec.gqa_ratio, list[str]()
    page = page if plan.cached else DENSE_PAGE
    seq, start, token = (
        np.asarray(array, np.int64)
        for array in (plan.tiles.seq, plan.tiles.start, plan.tiles.token)
    )
    query_lens, seq_lens = (
        np.asarray(array, np.int64) for array in (plan.pages.query_lens, plan.pages.seq_lens)
    )
    inside = (seq >= 0) & (seq < len(query_lens))
    faults += [f"tile {i}: no sequence {seq[i]}" for i in np.flatnonzero(~inside)]
    seq = np.where(inside, seq, 0)
    queries, length, tokens = query_lens[seq], seq_lens[seq], plan.tiles.step
    skip = np.maximum(-start, 0)
    stop = np.minimum(start + tokens, queries) - start  # rows [skip, stop) are real
    real = inside & (stop > skip)
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
    faults += _pages_elsewhere(step, plan, page)
    # The kernel masks by these lengths.
    faults += [
        f"sequence {i}: its mask is of {query_lens[i]} query tokens and {seq_lens[i]} keys"
        for i, wanted in enumerate(zip(step.query_lens, step.seq_lens, strict=True))
        if (query_lens[i], seq_lens[i]) != wanted
    ]
    # The step's last tile may begin earlier: tiles run in order, so the rows it has again are its own.
    follows = np.append(seq[1:] == seq[:-1], False) & np.append(real[1:], False)
    after = np.append(start[1:] + skip[1:], 0) - start
    stop = np.where(follows, np.minimum(stop, after), stop)

    each = min(block_tokens(group), tokens)
    blocks = tokens // each
    tile, block = (part.ravel() for part in np.indices((len(seq), blocks)))
    low = np.maximum(block * each, skip[tile])
    high = np.minimum((block + 1) * each, stop[tile])
    some = real[tile] & (high > low)
    tile, block, low, high = tile[some], block[some], low[some], high[some]
    count = np.arange(len(tile))
    nothing = 0 * count
    items = Items(
        seq[tile], (start[tile] + low) * group, (high - low) * group, nothing,
        nothing + spec.num_kv_heads, nothing - 1, nothing, seq[tile],
    )  # fmt: skip

    context = (length - queries)[tile]
    first = context + start[tile]
    last = context + np.minimum(start[tile] + tokens, queries[tile]) - 1
    ranges = key_ranges(spec, first, last, length[tile], np.minimum, np.maximum)
    keys = pages_per_step(page) * page
    end = -(-ranges.near_stop // keys)
    begin = ranges.near_start // keys
    if spec.causal and blocks > 1:  # a block that ends before a step's keys is left out
        cap = -(-(first + (block + 1) * each) // keys)
    else:
        cap = np.maximum(end, -(-ranges.kept_stop // keys))
    parts = [(begin, end)]
    if spec.sink_tokens:
        kept = ranges.kept_start // keys, -(-ranges.kept_stop // keys)
        parts = [kept, (np.maximum(begin, kept[1]), end)]
    read = [
        np.stack([count, part_begin * keys, np.minimum(part_end, cap) * keys])
        for part_begin, part_end in parts
    ]
    return Reads(
        group, spec.num_kv_heads, items, Keys(*np.concatenate(read, axis=1)), no_merges(),
        faults=faults, spec=spec,
    )  # fmt: skip


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
