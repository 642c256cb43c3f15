"""The keys that the three parts of Unified Attention read in a step: their masks, as ranges of keys.

Follows `unified`, from the metadata's tensors. The batch tells which key a row or a block holds, not
`metadata`'s plan, so a mistake of the plan isn't repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import Batch, Items, Keys, LayerSpec, Reads, no_merges

from polyattn_hpu.buckets import SLICE
from polyattn_hpu.metadata import Metadata
from polyattn_hpu.unified import positions

Ints = NDArray[np.int64]
SEEN_AT_A_TIME = 1 << 24
"""Elements of the shared part's mask that are read at a time."""


def reads_of(spec: LayerSpec, meta: Metadata, batch: Batch, table: Any) -> Reads:
    """Return what a step reads; an item is one query token with all heads.

    `table` (num_seqs, blocks): the step's block table on the host, None without a cache.
    """
    queries = np.asarray(batch.query_lens, np.int64)
    seq = np.repeat(np.arange(len(queries)), queries)
    token = np.arange(len(seq)) - np.repeat(np.cumsum(queries) - queries, queries)
    group, heads, faults = spec.gqa_ratio, spec.num_kv_heads, list[str]()
    nothing = 0 * seq
    items = Items(
        seq, token * group, nothing + group, nothing, nothing + heads, nothing - 1, nothing, seq
    )
    parts = [
        *_own(meta, batch, seq, table is not None, faults),
        *_shared(meta, seq, table, faults),
        *_unique(meta, seq, table, faults),
    ]
    keys = Keys(*np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1))
    return Reads(group, heads, items, keys, no_merges(), faults=faults, spec=spec)


def _runs(mask: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """Return the runs of a mask (rows, keys): each one's row, first key and the key behind it."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, begin = np.nonzero(edges == 1)
    return row, begin, np.nonzero(edges == -1)[1]


def _own(
    meta: Metadata, batch: Batch, seq: Ints, cached: bool, faults: list[str]
) -> Iterator[NDArray[Any]]:
    """Yield the keys of the causal part: rows of the step's own keys, or of keys passed whole."""
    queries, lens = np.asarray(batch.query_lens, np.int64), np.asarray(batch.lens, np.int64)
    if cached:  # own keys lie where the queries do
        origin, rows = np.cumsum(queries) - lens, queries
    else:
        origin, rows = np.asarray(batch.key_starts, np.int64), lens
    for index, mask in enumerate(meta.causal_masks):
        row, begin, end = _runs(mask.cpu().numpy())
        row = row + index * SLICE
        there = row < len(seq)
        faults += [f"row {at} of padding sees keys" for at in np.unique(row[~there])]
        row, begin, end = row[there], begin[there], end[there]
        mine = seq[row]
        first = origin[mine] + lens[mine] - rows[mine]
        outside = (begin < first) | (end > first + rows[mine])
        faults += [
            f"sequence {mine[i]}: own keys in rows {begin[i]} to {end[i]} are read, it has "
            f"{first[i]} to {first[i] + rows[mine[i]]}"
            for i in np.flatnonzero(outside)
        ]
        yield np.stack([row, begin - origin[mine], end - origin[mine]])


def _shared(meta: Metadata, seq: Ints, table: Any, faults: list[str]) -> Iterator[NDArray[Any]]:
    """Yield the keys of the shared part: blocks that several query tokens use."""
    if meta.bucket.phase[1] != "s":
        return
    size = meta.block_size
    blocks, starts = (t.cpu().numpy() for t in (meta.shared_blocks, meta.shared_starts))
    member = meta.member.cpu().numpy()
    for at, entry in np.argwhere(member[: len(table)]):
        _hold(table, at, int(starts[entry]), int(blocks[entry]), size, faults)
    each = max(1, SEEN_AT_A_TIME // (size * meta.bucket.query))
    for first in range(0, len(blocks), each):
        some = slice(first, first + each)
        position = positions(meta.shared_starts[some], size).flatten()
        mask = meta.tokens.sees_cached(position).cpu().numpy()
        using = member[:, some][meta.tokens.sequence.cpu().numpy()]
        seen = mask.reshape(len(mask), -1, size) & using[:, :, None]
        which, begin, end = _runs(seen.reshape(-1, size))
        row, entry = np.divmod(which, using.shape[1])
        faults += [f"row {i} of padding sees keys" for i in np.unique(row[row >= len(seq)])]
        there = row < len(seq)
        low = starts[some][entry]
        yield np.stack([row, low + begin, low + end])[:, there]


def _unique(meta: Metadata, seq: Ints, table: Any, faults: list[str]) -> Iterator[NDArray[Any]]:
    """Yield the keys of the unique part: blocks that one query token uses."""
    if meta.bucket.phase[2] != "u":
        return
    starts, groups, rows = (
        t.cpu().numpy() for t in (meta.unique_starts, meta.unique_groups, meta.unique_rows)
    )
    blocks = (
        np.arange(len(starts)) if meta.unique_blocks is None else meta.unique_blocks.cpu().numpy()
    )
    which, begin, end = _runs(meta.unique_masks.cpu().numpy())
    row, low = rows[which], starts[which]
    for entry in np.unique(which):
        at = int(rows[entry])
        if at >= len(seq) or groups[entry] != seq[at]:
            faults.append(
                f"block {blocks[entry]} is added to sequence {groups[entry]}, row {at} asks"
            )
        else:
            _hold(
                table, int(seq[at]), int(starts[entry]), int(blocks[entry]), meta.block_size, faults
            )
    there = row < len(seq)
    yield np.stack([row, low + begin, low + end])[:, there]


def _hold(table: Any, seq: int, start: int, block: int, size: int, faults: list[str]) -> None:
    """Report a block other than the one that holds a sequence's keys from `start`."""
    at, rest = divmod(start, size)
    own = table[seq, at] if at < table.shape[1] else None
    if rest or own != block:
        faults.append(f"sequence {seq}, key {start}: read from block {block}, it lies in {own}")
