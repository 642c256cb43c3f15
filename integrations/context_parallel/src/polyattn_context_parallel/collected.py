"""How do rows of several tokens attend? All that they see is collected in order, queries are shared out.

Each rank has its zigzag pieces of every sequence's new tokens. What the cache holds of the
sequences, each rank's blocks, and the step's keys and values are brought together in a cache that
lives for the layer's call, each sequence in order. Over it runs the ordinary plan of the rank's own
queries, so that whatever the layer computes is computed by the code that computes it on one device.
(Llama 3, arXiv 2407.21783, section 3.3.2, gathers keys and values likewise.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from polyattn import Batch, CacheWindow, KVCache, LayerGroup
from polyattn.errors import BatchError
from polyattn.host import raw
from torch import Tensor

from polyattn_context_parallel.heads import own_heads
from polyattn_context_parallel.ranks import ContextParallel
from polyattn_context_parallel.room import Room
from polyattn_context_parallel.shards import Blocks, Zigzag
from polyattn_context_parallel.step import ContextStep, Found, Layer, raw_bytes


@dataclass(frozen=True)
class Layout:
    """Where a step's sequences lie while it runs, and what comes there from the ranks' caches.

    `fetched` int64: the blocks of each rank's cache that are collected, in order; every rank's are
    neighbours, so that engine blocks are whole. `table` int32 (num_seqs, blocks), `lens`: as a
    batch over the room has them. `slots` int64 (num_tokens,): where the step's own tokens go.
    """

    fetched: Tensor
    table: Tensor
    lens: list[int]
    slots: Tensor
    num_blocks: int

    @classmethod
    def of(cls, batch: Batch, blocks: Blocks, gone: Sequence[range], new: bool = True) -> Layout:
        """Lay out each sequence without its blocks that are gone; without `new` the cache has all."""
        assert batch.block_table is not None
        per, lens = blocks.engine_block, []
        rows: list[int] = []
        columns: list[int] = []
        counts = []
        for row, (length, query) in enumerate(zip(batch.lens, batch.query_lens, strict=True)):
            context = max(length - query, 0) if new else length
            present = [c for c in range(-(-context // per)) if c not in gone[row]]
            rows += [row] * len(present)
            columns += present
            counts.append((len(present), -(-length // per) - len(gone[row])))
            lens.append(length - len(gone[row]) * per)
        at = torch.tensor([rows, columns], dtype=torch.int64).to(batch.device)
        fetched = batch.block_table[at[0], at[1]].long()
        table, num_blocks = _table(counts, len(rows), blocks.size)
        placed = Batch(batch.starts, lens, torch.from_numpy(table).to(batch.device))
        slots = placed.tail_slots(blocks.block_size)
        assert placed.block_table is not None
        return cls(fetched, placed.block_table, lens, slots, num_blocks)

    def fetch(self, cache: KVCache, room: KVCache, context: ContextParallel) -> None:
        """Bring the ranks' blocks of the sequences into the room."""
        count = len(self.fetched)
        if not count:
            return
        for mine, whole in ((cache.key, room.key), (cache.value, room.value)):
            if whole is room.value and room.value_in_key:
                break
            sent = raw(mine)[self.fetched].contiguous()
            received = sent.new_empty(context.size, *sent.shape)
            context.all_gather(received.view(torch.uint8).view(context.size, -1), raw_bytes(sent))
            there = raw(whole)[: count * context.size].unflatten(0, (count, context.size))
            there.copy_(received.transpose(0, 1))


def _table(
    counts: Sequence[tuple[int, int]], fetched: int, size: int
) -> tuple[np.ndarray[Any, Any], int]:
    """Return a block table int32 over fetched blocks, then new ones, and how many there are in all."""
    width = max((total for _, total in counts), default=0) * size
    table = np.zeros((len(counts), width), np.int32)
    old, new = 0, fetched * size
    for row, (found, total) in enumerate(counts):
        more = (total - found) * size
        table[row, : found * size] = np.arange(old, old + found * size)
        table[row, found * size : total * size] = np.arange(new, new + more)
        old, new = old + found * size, new + more
    return table, new


class CollectedStep(ContextStep):
    """Every rank's own pieces over all keys.

    `own`: each rank has its own tokens only, and gets theirs; else every rank has all tokens of the
    step, and gets all, or with `by_heads` its own heads of all.
    """

    def __init__(
        self, group: LayerGroup, room: Room, context: ContextParallel, blocks: Blocks, batch: Batch,
        own: bool, by_heads: bool,
    ):  # fmt: skip
        self.room, self.context, self.own, self.by_heads = room, context, own, by_heads
        if batch.block_table is None:
            raise BatchError(
                f"{group.spec} attends over a cache; the batch has no block_table: pass one"
            )
        contexts = [max(n - q, 0) for n, q in zip(batch.lens, batch.query_lens, strict=True)]
        window = CacheWindow.of(group.spec, blocks.engine_block)
        gone = [range(0) if window is None else window.gone(first) for first in contexts]
        self.layout = Layout.of(batch, blocks, gone)
        self.zigzag = Zigzag.of(batch, context.size)
        device = batch.device
        self.mine = torch.from_numpy(self.zigzag.tokens(context.rank)).to(device)
        self.places = torch.from_numpy(self.zigzag.places()).to(device)
        self.slots = None if batch.slot_mapping is None else blocks.slots(batch.slot_mapping)
        self.plan = group.plan(self._queries(batch))

    def _queries(self, batch: Batch) -> Batch:
        """Return this rank's pieces as rows over the room."""
        layout, starts, lens, rows = self.layout, [0], [], []
        for row, first, last in self.zigzag.pieces(self.context.rank):
            if first == last:
                continue
            starts.append(starts[-1] + last - first)
            behind = batch.query_lens[row] - last
            lens.append(max(layout.lens[row] - behind, 0))
            rows.append(row)
        table = layout.table[torch.tensor(rows, dtype=torch.int64, device=batch.device)]
        return Batch(starts, lens, table, device=batch.device)

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        if key is None or value is None:
            raise BatchError("rows of several tokens bring their keys and values; key is None")
        if self.own:
            key, value = self._everyones(key), self._everyones(value)
        room = self.room.take(self.layout.num_blocks)
        self.layout.fetch(cache, room, self.context)
        layer.store(key, value, room, self.layout.slots)
        if self.slots is not None:
            layer.store(key, value, cache, self.slots)
        rows = query if self.own else query[self.mine]
        out, lse = layer(rows, None, None, room, self.plan)
        if self.own:
            return out, lse
        out, lse = self._everyones(out), self._everyones(lse)
        if not self.by_heads:
            return out, lse
        heads = own_heads(out.shape[1], self.context.rank, self.context.size)
        return out[:, heads].contiguous(), lse[:, heads].contiguous()

    def _everyones(self, tensor: Tensor) -> Tensor:
        """Return all of the step's rows, of which each rank has its own."""
        longest = self.zigzag.longest
        if not longest:
            return tensor
        sent = tensor.new_zeros(longest, *tensor.shape[1:])
        sent[: len(tensor)] = tensor
        received = sent.new_empty(self.context.size, *sent.shape)
        self.context.all_gather(
            received.view(torch.uint8).view(self.context.size, -1), raw_bytes(sent)
        )
        return received.flatten(0, 1)[self.places]
