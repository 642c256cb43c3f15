"""The keys that a rank attends to: its own, all of them collected in order, or an anchor and its own.

A decode's rows attend to what the rank holds, and states merge. If a key's weight depends only on the
key, the rank's blocks are a cache like any other. If it depends on the key's place, a backend must not
treat the rank's keys as neighbours. The keys that a window shows are therefore copied together. Under
ALiBi each block is a row of its own. Its distances are off by one number, which moves the row's LSE.

Longer rows attend to everything in order. Each rank's blocks and the step's keys come together in a cache
that lasts for the call. The ordinary plan of the rank's own queries runs over it. (Llama 3, arXiv
2407.21783, section 3.3.2, gathers keys and values likewise.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from polyattn import Batch, CacheWindow, KVCache, LayerGroup, LayerSpec, select
from polyattn.errors import BatchError
from polyattn.host import Frame, Op, key_ranges, raw
from torch import Tensor

from polyattn_context_parallel.ops import Attend, InRoom, Room, StoreKeys, keys_by
from polyattn_context_parallel.ranks import ContextParallel, raw_bytes
from polyattn_context_parallel.shards import Blocks, Zigzag


@dataclass(frozen=True)
class Layout:
    """Where a step's sequences lie while it runs, and which blocks of the ranks' caches go there.

    `fetched` int64: the collected blocks of each rank's cache, in order. All ranks' parts of an engine
    block lie side by side. `table` int32 (num_seqs, blocks) and `lens` belong to a batch over the room.
    `slots` int64 (num_tokens,): where the step's own tokens go.
    """

    context: ContextParallel
    fetched: Tensor
    table: Tensor
    lens: list[int]
    slots: Tensor
    num_blocks: int

    @classmethod
    def of(
        cls,
        context: ContextParallel,
        batch: Batch,
        blocks: Blocks,
        gone: Sequence[range],
        new: bool = True,
    ) -> Layout:
        """Lay out each sequence without its dropped blocks. Without `new` the cache holds all keys."""
        assert batch.block_table is not None
        per, lens = blocks.engine_block, []
        rows: list[int] = []
        columns: list[int] = []
        counts = []
        for row, (length, query) in enumerate(zip(batch.lens, batch.query_lens, strict=True)):
            cached = max(length - query, 0) if new else length
            present = [c for c in range(-(-cached // per)) if c not in gone[row]]
            rows += [row] * len(present)
            columns += present
            counts.append((len(present), -(-length // per) - len(gone[row])))
            lens.append(length - len(gone[row]) * per)
        at = torch.tensor([rows, columns], dtype=torch.int64, device="cpu").to(batch.device)
        fetched = batch.block_table[at[0], at[1]].long()
        table, num_blocks = _table(counts, len(rows), blocks.size)
        placed = Batch(batch.starts, lens, torch.from_numpy(table).to(batch.device))
        slots = placed.tail_slots(blocks.block_size)
        assert placed.block_table is not None
        return cls(context, fetched, placed.block_table, lens, slots, num_blocks)

    def fetch(self, cache: KVCache, room: KVCache) -> None:
        """Copy the sequences' blocks of all ranks into the room."""
        count, size = len(self.fetched), self.context.size
        if not count:
            return
        for mine, whole in ((cache.key, room.key), (cache.value, room.value)):
            if whole is room.value and room.value_in_key:
                break
            received = self.context.gathered(raw(mine)[self.fetched])
            there = raw(whole)[: count * size].unflatten(0, (count, size))
            there.copy_(received.transpose(0, 1))


def _table(
    counts: Sequence[tuple[int, int]], fetched: int, size: int
) -> tuple[np.ndarray[Any, Any], int]:
    """Return a block table int32 over fetched blocks, then new ones, and the total number of blocks."""
    width = max((total for _, total in counts), default=0) * size
    table = np.zeros((len(counts), width), np.int32)
    old, new = 0, fetched * size
    for row, (cached, total) in enumerate(counts):
        more = (total - cached) * size
        table[row, : cached * size] = np.arange(old, old + cached * size)
        table[row, cached * size : total * size] = np.arange(new, new + more)
        old, new = old + cached * size, new + more
    return table, new


def collected(room: Room, context: ContextParallel, blocks: Blocks, batch: Batch) -> InRoom:
    """Plan this rank's pieces of a step's queries over all keys. Raises `BatchError`."""
    group = room.group
    if batch.block_table is None:
        raise BatchError(
            f"{group.spec} attends over a cache; the batch has no block_table: pass one"
        )
    contexts = [max(n - q, 0) for n, q in zip(batch.lens, batch.query_lens, strict=True)]
    window = CacheWindow.of(group.spec, blocks.engine_block)
    gone = [range(0) if window is None else window.gone(first) for first in contexts]
    layout = Layout.of(context, batch, blocks, gone)
    starts, lens, rows = [0], [], []
    for row, first, last in Zigzag.of(batch, context.size).pieces(context.rank):
        if first == last:
            continue
        starts.append(starts[-1] + last - first)
        lens.append(max(layout.lens[row] - (batch.query_lens[row] - last), 0))
        rows.append(row)
    table = layout.table[torch.tensor(rows, dtype=torch.int64, device=batch.device)]
    plan = group.plan(Batch(starts, lens, table, device=batch.device))

    def fetch(frame: Frame, inner: Frame) -> None:
        if frame.key is None:
            raise BatchError("rows of several tokens bring their keys and values; key is None")
        assert frame.cache is not None and inner.cache is not None
        layout.fetch(frame.cache, inner.cache)

    return InRoom(Attend(plan, sinks=True), room, layout.num_blocks, fetch, layout.slots)


def anchored(room: Room, context: ContextParallel, batch: Batch, anchors: list[int]) -> InRoom:
    """Plan each rank's own part of every context, behind the first rank's: Star Attention's first phase.

    Every rank attends to the context's first part, the anchor, and to its own part. That approximation
    needs nothing of the other ranks but the anchor (Acharya, Jia, Ginsburg, arXiv 2411.17116).
    `anchors`: tokens of the first rank's part of each sequence. Raises `BatchError`.
    """
    if batch.lens != batch.query_lens:
        raise BatchError(
            "the first phase takes each rank's whole part of the contexts; seq_lens must be the "
            "query's lengths"
        )
    group, device, count = room.group, batch.device, sum(anchors)
    assert group.cache_format is not None
    before = [0] * len(anchors) if context.rank == 0 else anchors
    size = group.cache_format.block_size
    lens = [a + n for a, n in zip(before, batch.lens, strict=True)]
    table, num_blocks = side_by_side(lens, size, device)
    whole = Batch(batch.starts, lens, table, device=device)
    slots = Batch.from_lens(before, before, table, size, device=device).slot_mapping
    assert slots is not None
    store = StoreKeys(group, slots)

    def anchor(tensor: Tensor) -> Tensor:
        """Return the first rank's keys or values, (anchors, heads, size)."""
        first = tensor.new_empty(count, *tensor.shape[1:])
        if context.rank == 0:
            first.copy_(tensor)
        if first.numel():
            context.broadcast(raw_bytes(first))
        return first

    def fetch(frame: Frame, inner: Frame) -> None:
        if frame.key is None:
            raise BatchError("the first phase brings the context's keys and values; key is None")
        key, value = keys_by(anchor, frame)
        if context.rank:
            store.run(inner.but(key=key, value=value))

    plan = Attend(group.plan(whole), sinks=True)
    return InRoom(plan, room, num_blocks, fetch, whole.tail_slots(size))


def held(group: LayerGroup, room: Room, batch: Batch, blocks: Blocks, spec: LayerSpec) -> Op:
    """Plan rows of one token over this rank's keys; `batch` speaks of all ranks' keys.

    If the rank has no key of a row, the row gets output 0 and LSE -inf. `group`: of `spec` without
    learned sinks, windows and chunks.
    """
    if masked(spec):
        return _copied_together(group, room, batch, blocks, spec)
    if spec.alibi:
        return BlockByBlock(group, batch, blocks)
    lens = blocks.held(batch.lens).tolist()
    return Attend(group.plan(Batch(batch.starts, lens, batch.block_table, device=batch.device)))


def _copied_together(
    group: LayerGroup, room: Room, batch: Batch, blocks: Blocks, spec: LayerSpec
) -> InRoom:
    """Plan over this rank's keys that a window, a chunk or sink tokens leave visible."""
    assert batch.block_table is not None
    size = blocks.block_size
    places = [_seen_places(spec, length, blocks) for length in batch.lens]
    lens = [len(visible) for visible in places]
    table, num_blocks = side_by_side(lens, size, batch.device)
    rows = np.repeat(np.arange(len(lens)), lens)
    at = [rows, np.concatenate(places), np.concatenate([np.arange(n) for n in lens])]
    seqs, old, new = torch.from_numpy(np.stack(at).astype(np.int64)).to(batch.device)
    source = batch.block_table[seqs, old // size].long(), old % size
    target = table[seqs, new // size].long(), new % size

    def fetch(frame: Frame, inner: Frame) -> None:
        cache, there = frame.cache, inner.cache
        assert cache is not None and there is not None
        raw(there.key)[target] = raw(cache.key)[source]
        raw(there.value)[target] = raw(cache.value)[source]

    plan = group.plan(Batch(batch.starts, lens, table, device=batch.device))
    return InRoom(Attend(plan), room, num_blocks, fetch)


def _seen_places(spec: LayerSpec, length: int, blocks: Blocks) -> np.ndarray[Any, Any]:
    """Return this rank's places of a sequence that its last token sees, in order."""
    kept_start, kept_stop, near_start, near_stop = key_ranges(spec, length - 1, length - 1, length)
    ranges = [blocks.held([kept_start, kept_stop]), blocks.held([near_start, near_stop])]
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


class BlockByBlock(Op):
    """ALiBi over scattered blocks: each block of each sequence is a row. The rows' states merge here.

    A backend puts a row's query at its last key. All true distances are larger by one number. So slope
    times that number is added to the LSE, and the output needs no change.
    """

    def __init__(self, group: LayerGroup, batch: Batch, blocks: Blocks):
        assert batch.block_table is not None
        size, lens = blocks.block_size, np.asarray(batch.lens)
        mine = blocks.held(lens)
        self.seqs, self.columns = len(lens), max(1, int(-(-mine.max(initial=0) // size)))
        first = np.arange(self.columns) * size
        counts = (mine[:, None] - first).clip(0, size)
        last = np.arange(self.columns) * blocks.engine_block + blocks.rank * size + counts - 1
        behind = np.where(counts > 0, last - (lens - 1)[:, None], 0)
        self.behind = torch.from_numpy(behind).to(batch.device)
        table = batch.block_table.new_zeros(self.seqs, self.columns)
        width = min(self.columns, batch.block_table.shape[1])
        table[:, :width] = batch.block_table[:, :width]
        total = self.seqs * self.columns
        starts, table = list(range(total + 1)), table.view(total, 1)
        flat = Batch(starts, counts.ravel().tolist(), table, device=batch.device)
        self.attend = Attend(group.plan(flat))
        self.inner = (self.attend,)

    def run(self, frame: Frame) -> None:
        slopes, out, lse = frame.params.alibi_slopes, frame.out, frame.lse
        assert slopes is not None and lse is not None
        query = frame.query.repeat_interleave(self.columns, 0)
        parts = query.new_empty(len(query), *out.shape[1:])
        lses = lse.new_empty(len(query), lse.shape[1])
        self.attend.run(frame.but(query=query, out=parts, lse=lses))
        lses = lses.view(self.seqs, self.columns, -1)
        lses = lses + self.behind[..., None].to(lses.dtype) * slopes.to(lses.dtype)
        torch.logsumexp(lses, 1, out=lse)
        weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
        parts = parts.view(self.seqs, self.columns, *out.shape[1:]).to(lses.dtype)
        out.copy_(torch.einsum("rch,rchd->rhd", weights, parts))


def order_matters(spec: LayerSpec) -> str | None:
    """Return the feature that makes a key's part depend on its place, or None for full attention."""
    for name in ("sliding_window", "chunk_size", "sink_tokens", "alibi"):
        if getattr(spec, name):
            return name
    return None


def masked(spec: LayerSpec) -> bool:
    """Return whether a causal row may not see every key before it."""
    return spec.sliding_window is not None or spec.chunk_size is not None


def side_by_side(lens: Sequence[int], size: int, device: torch.device) -> tuple[Tensor, int]:
    """Return a block table int32 of consecutive sequences in blocks of `size`, and its block count."""
    blocks = [-(-n // size) for n in lens]
    table = torch.zeros(len(lens), max(blocks, default=0), dtype=torch.int32, device="cpu")
    for row, (first, count) in enumerate(zip(accumulate(blocks, initial=0), blocks, strict=False)):
        table[row, :count] = torch.arange(first, first + count, device="cpu")
    return table.to(device), sum(blocks)


def plain_group(group: LayerGroup, *, causal: bool = True, masked: bool = True) -> LayerGroup:
    """Return a group of the same backends over the same cache, without learned sinks.

    With `masked=False` a row sees all of its keys: no window, chunk or sink tokens. Raises
    `SelectionError` if one of the backends can't serve that.
    """
    spec = group.spec.replace(learned_sinks=False, causal=causal)
    if not masked:
        spec = spec.replace(sliding_window=None, window_right=None, chunk_size=None, sink_tokens=0)
    if spec == group.spec:
        return group
    names = ",".join(f"{phase}={info.name}" for phase, info in group.selection.backends)
    form = group.cache_format
    assert form is not None
    plain = spec.replace(block_size=form.block_size)
    return LayerGroup(select(plain, group.device, backend=names), cache_format=form)
