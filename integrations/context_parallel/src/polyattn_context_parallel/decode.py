"""How do rows of one token attend? Every rank over the keys that it holds; then the states merge.

Where a key's part depends on nothing but the key, the rank's blocks are a cache like any other and
the order of keys doesn't matter. Where it depends on the key's place, one of two ways says it to a
backend that believes its keys are neighbours: what a window leaves is copied together, and under
ALiBi each block is a row of its own, whose distances are off by one number, which moves the row's
LSE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from polyattn import Batch, KVCache, LayerGroup, LayerSpec, StepPlan
from polyattn.host import key_ranges, raw
from torch import Tensor

from polyattn_context_parallel.merging import Merging
from polyattn_context_parallel.room import Room, side_by_side
from polyattn_context_parallel.shards import Blocks
from polyattn_context_parallel.step import (
    ContextStep,
    Found,
    Layer,
    attend,
    sinks_of,
    width_of,
)


class LocalState(ABC):
    """Rows of one token over this rank's keys."""

    @abstractmethod
    def run(self, layer: Layer, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor) -> None:
        """Write the state: output 0 and LSE -inf for a row of which this rank has no key."""


class InAnyOrder(LocalState):
    """Full attention: the rank's blocks as they are."""

    def __init__(self, plan: StepPlan):
        self.plan = plan

    def run(self, layer: Layer, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor) -> None:
        attend(layer, self.plan, query, cache, out, lse)


class CopiedTogether(LocalState):
    """Of this rank's keys those that a window, a chunk or the kept first tokens leave."""

    def __init__(
        self, group: LayerGroup, room: Room, batch: Batch, blocks: Blocks, spec: LayerSpec
    ):
        assert batch.block_table is not None
        self.room, size = room, blocks.block_size
        places = [_seen_places(spec, length, blocks) for length in batch.lens]
        lens = [len(visible) for visible in places]
        table, self.num_blocks = side_by_side(lens, size, batch.device)
        rows = np.repeat(np.arange(len(lens)), lens)
        at = [rows, np.concatenate(places), np.concatenate([np.arange(n) for n in lens])]
        seqs, old, new = torch.from_numpy(np.stack(at).astype(np.int64)).to(batch.device)
        self.source = batch.block_table[seqs, old // size].long(), old % size
        self.target = table[seqs, new // size].long(), new % size
        self.plan = group.plan(Batch(batch.starts, lens, table, device=batch.device))

    def run(self, layer: Layer, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor) -> None:
        room = self.room.take(self.num_blocks)
        raw(room.key)[self.target] = raw(cache.key)[self.source]
        raw(room.value)[self.target] = raw(cache.value)[self.source]
        attend(layer, self.plan, query, room, out, lse)


def _seen_places(spec: LayerSpec, length: int, blocks: Blocks) -> np.ndarray[Any, Any]:
    """Return this rank's places of a sequence that its last token sees, in order."""
    kept_start, kept_stop, near_start, near_stop = key_ranges(spec, length - 1, length - 1, length)
    held = [blocks.held([kept_start, kept_stop]), blocks.held([near_start, near_stop])]
    return np.concatenate([np.arange(start, stop) for start, stop in held])


class BlockByBlock(LocalState):
    """ALiBi over scattered blocks: each block of each sequence a row, whose states merge here.

    A backend puts a row's query at its last key. The true distance is the same number more for all
    of its keys, so slope times that number belongs to the LSE, and the output is right as it is.
    """

    def __init__(self, group: LayerGroup, batch: Batch, blocks: Blocks):
        assert batch.block_table is not None
        size, lens = blocks.block_size, np.asarray(batch.lens)
        held = blocks.held(lens)
        self.rows, self.columns = len(lens), max(1, int(-(-held.max(initial=0) // size)))
        first = np.arange(self.columns) * size
        counts = (held[:, None] - first).clip(0, size)
        last = np.arange(self.columns) * blocks.engine_block + blocks.rank * size + counts - 1
        behind = np.where(counts > 0, last - (lens - 1)[:, None], 0)
        self.behind = torch.from_numpy(behind).to(batch.device)
        table = batch.block_table.new_zeros(self.rows, self.columns)
        width = min(self.columns, batch.block_table.shape[1])
        table[:, :width] = batch.block_table[:, :width]
        total = self.rows * self.columns
        flat = Batch(
            list(range(total + 1)), counts.ravel().tolist(), table.view(total, 1),
            device=batch.device,
        )  # fmt: skip
        self.plan = group.plan(flat)

    def run(self, layer: Layer, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor) -> None:
        slopes = layer.params.alibi_slopes
        assert slopes is not None
        each = query.repeat_interleave(self.columns, 0)
        partial = each.new_empty(len(each), *out.shape[1:])
        partial_lse = lse.new_empty(len(each), lse.shape[1])
        attend(layer, self.plan, each, cache, partial, partial_lse)
        lses = partial_lse.view(self.rows, self.columns, -1)
        lses = lses + self.behind[..., None].to(lses.dtype) * slopes.to(lses.dtype)
        torch.logsumexp(lses, 1, out=lse)
        weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
        parts = partial.view(self.rows, self.columns, *out.shape[1:]).to(lses.dtype)
        out.copy_(torch.einsum("rch,rchd->rhd", weights, parts))


class DecodeStep(ContextStep):
    """Rows of one token, whose query every rank has. Each rank stores what falls into its blocks."""

    def __init__(self, local: LocalState, slots: Tensor | None, merging: Merging):
        self.local, self.slots, self.merging = local, slots, merging

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        if key is not None and value is not None and self.slots is not None:
            layer.store(key, value, cache, self.slots)
        out, lse = self.merging.take(query, width_of(layer, cache))
        self.local.run(layer, query, cache, out, lse)
        return self.merging.merged(sinks_of(layer))


def order_matters(spec: LayerSpec) -> str | None:
    """Name what makes a key's part depend on its place, None for full attention."""
    for name in ("sliding_window", "chunk_size", "sink_tokens", "alibi"):
        if getattr(spec, name):
            return name
    return None


def local_state(
    group: LayerGroup, room: Room, batch: Batch, blocks: Blocks, spec: LayerSpec
) -> LocalState:
    """Plan rows of one token over this rank's keys; `batch` speaks of all ranks' keys.

    `group`: of `spec`, but without learned sinks, and where that has a window or chunks without them.
    """
    if masked(spec):
        return CopiedTogether(group, room, batch, blocks, spec)
    if spec.alibi:
        return BlockByBlock(group, batch, blocks)
    local = Batch(
        batch.starts, blocks.held(batch.lens).tolist(), batch.block_table, device=batch.device
    )
    return InAnyOrder(group.plan(local))


def masked(spec: LayerSpec) -> bool:
    """Whether a causal row doesn't see every key before it."""
    return spec.sliding_window is not None or spec.chunk_size is not None
