"""The reads of a native plan: its items, as `run_item` and `merge_parts` read them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import Items, Keys, LayerSpec, Merges, Reads, no_merges

Ints = NDArray[np.signedinteger[Any]]


def reads(spec: LayerSpec, numbers: Ints, items: Ints, groups: Ints, block_size: int) -> Reads:
    """Return a step's items, their keys and what merges their parts, of what `StepPlan.listed` says."""
    _, _, parts, floats, scratch, needed = (int(n) for n in numbers)
    fields = items.astype(np.int64).T
    seq, token, tokens, head, heads, kept, kept_end, near, _, start, stop, part, group = fields
    ratio = spec.gqa_ratio
    cut = part >= 0
    rows = tokens * ratio
    held = Items(
        seq, token * ratio, rows, head, heads, np.where(cut, part * floats, -1),
        np.where(cut, rows * heads * (spec.v_head_size + 2), 0), seq,
    )  # fmt: skip
    # Visible keys are counted from the first kept one on, without the gap (`Tiles::next`).
    first = kept_end - kept
    which = np.arange(len(seq))
    some = kept < kept_end
    keys = Keys(
        np.concatenate([which[some], which]),
        np.concatenate([(kept + start)[some], near + np.maximum(start - first, 0)]),
        np.concatenate([(kept + np.minimum(stop, first))[some], near + stop - first]),
    )
    faults = []
    if scratch < needed:
        faults.append(f"an item needs {needed} bytes of scratch, a thread has {scratch}")
    if len(cut) and (part.max() >= parts or (cut & (group >= len(groups))).any()):
        faults.append(f"a part or group is beyond the {parts} parts or {len(groups)} groups")
        return Reads(ratio, spec.num_kv_heads, held, keys, no_merges(), faults=faults)
    # A group's last item merges. All of its items have the same rows.
    last = np.zeros(len(groups), np.int64)
    last[group[cut]] = which[cut]
    count = np.bincount(group[cut], minlength=len(groups))
    faults += [
        f"group {i} waits for {n} parts, {m} items have one"
        for i, (n, m) in enumerate(zip(groups[:, 1].tolist(), count.tolist(), strict=True))
        if n != m
    ]
    places = chain.from_iterable(range(a, a + n) for a, n in groups.tolist())
    merges = Merges(
        held.seq[last], held.row[last], rows[last], head[last], heads[last],
        np.concatenate([[0], groups[:, 1].cumsum()]), np.fromiter(places, np.int64) * floats,
    )  # fmt: skip
    return Reads(
        ratio, spec.num_kv_heads, held, keys, merges, parts * floats, 0, block_size, faults
    )
