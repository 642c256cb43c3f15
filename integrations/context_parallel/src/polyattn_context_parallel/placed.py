"""What if the engine says where keys are? Each rank's batch speaks of its own keys; states merge.

So are Star Attention's two phases (Acharya, Jia, Ginsburg, arXiv 2411.17116). First every rank
attends to the context's first part, the anchor, and to its own part, and keeps the keys of its own:
an approximation that needs nothing of the other ranks but the anchor. Then the question and what is
generated attend to all parts, exactly, their own keys on one rank.
"""

from __future__ import annotations

from typing import Any

from polyattn import Batch, KVCache, LayerGroup
from polyattn.errors import BatchError
from torch import Tensor

from polyattn_context_parallel.merging import Merging
from polyattn_context_parallel.ranks import ContextParallel, ParallelError
from polyattn_context_parallel.room import Room, plain_group, side_by_side
from polyattn_context_parallel.step import (
    ContextStep,
    Found,
    Layer,
    attend,
    raw_bytes,
    sinks_of,
    width_of,
)


class Placed:
    """What a group's layers share: kernels for the rank that holds the new keys, and for the others."""

    def __init__(self, group: LayerGroup):
        self.group, self.new = group, plain_group(group)
        self._old: LayerGroup | None = None

    @property
    def old(self) -> LayerGroup:
        """Several new tokens over keys that all of them see."""
        if self._old is None:
            self._old = plain_group(self.group, causal=False)
        return self._old


class PlacedStep(ContextStep):
    """Every rank has all queries, each batch the rank's own keys; one brings slots for the new ones."""

    def __init__(self, placed: Placed, context: ContextParallel, batch: Batch, merging: Merging):
        self.slots, self.merging = batch.slot_mapping, merging
        several = batch.max_query_len > 1
        if several and placed.group.spec.latent is not None:
            raise BatchError(
                "rows of several tokens over placed latents: an MLA layer takes them a token at a time, "
                "or with keys='blocks'"
            )
        group = placed.new
        if self.slots is None and several:
            group = placed.old
        self.plan = group.plan(Batch(
            batch.starts, batch.lens, batch.block_table, device=batch.device
        ))  # fmt: skip

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        if self.slots is not None and key is not None and value is not None:
            layer.store(key, value, cache, self.slots)
        out, lse = self.merging.take(query, width_of(layer, cache))
        attend(layer, self.plan, query, cache, out, lse)
        return self.merging.merged(sinks_of(layer))


class AnchoredStep(ContextStep):
    """Each rank's own part of every context, behind the first rank's: Star Attention's first phase.

    `anchors`: tokens of the first rank's part of each sequence.
    """

    def __init__(
        self, group: LayerGroup, room: Room, context: ContextParallel, batch: Batch,
        anchors: list[int],
    ):  # fmt: skip
        if batch.lens != batch.query_lens:
            raise BatchError(
                "the first phase takes each rank's whole part of the contexts; seq_lens must be the "
                "query's lengths"
            )
        assert group.cache_format is not None
        self.room, self.context = room, context
        self.anchors, self.slots = sum(anchors), batch.slot_mapping
        before = [0] * len(anchors) if context.rank == 0 else anchors
        size, device = group.cache_format.block_size, batch.device
        lens = [a + n for a, n in zip(before, batch.lens, strict=True)]
        table, self.num_blocks = side_by_side(lens, size, device)
        whole = Batch(batch.starts, lens, table, device=device)
        self.own_slots = whole.tail_slots(size)
        self.anchor_slots = Batch.from_lens(before, before, table, size, device=device).slot_mapping
        self.plan: Any = group.plan(whole)

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        if key is None or value is None:
            raise BatchError("the first phase brings the context's keys and values; key is None")
        room = self.room.take(self.num_blocks)
        anchor = [self._anchor(tensor) for tensor in (key, value)]
        if self.context.rank:
            assert self.anchor_slots is not None
            layer.store(anchor[0], anchor[1], room, self.anchor_slots)
        layer.store(key, value, room, self.own_slots)
        if self.slots is not None:
            layer.store(key, value, cache, self.slots)
        result: Found = layer(query, None, None, room, self.plan)
        return result

    def _anchor(self, tensor: Tensor) -> Tensor:
        """Return the first rank's keys or values, (anchors, heads, size)."""
        anchor = tensor.new_empty(self.anchors, *tensor.shape[1:])
        if self.context.rank == 0:
            anchor.copy_(tensor)
        if anchor.numel():
            self.context.broadcast(raw_bytes(anchor))
        return anchor


def check_one_stores(context: ContextParallel, batch: Batch) -> None:
    """Check that one rank, and no other, keeps the new tokens. Raises `ParallelError`."""
    storing = [
        rank for rank, (n,) in enumerate(context.numbers([batch.slot_mapping is not None])) if n
    ]
    if len(storing) != 1:
        raise ParallelError(
            f"ranks {storing} bring slot_mapping; one rank, and no other, must keep the new tokens"
        )
