"""How do whole prompts attend while keys go round? Each rank keeps its queries, keys come past.

Ring attention (Liu, Zaharia, Abbeel, arXiv 2310.01889) over zigzag pieces: at each turn a rank
attends to what it was passed while the next is under way, and merges the state. A turn is the keys'
piece against both of the rank's own, or both pieces of keys against its second: half of what is
there, on every rank, at every turn. What is passed is stored by the rank whose block it falls into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from polyattn import Batch, KVCache, LayerGroup
from polyattn.errors import BatchError
from polyattn.host import MergeBackend, MergeBuffers
from torch import Tensor

from polyattn_context_parallel.merging import add_sink
from polyattn_context_parallel.ranks import ContextParallel
from polyattn_context_parallel.room import Room, plain_group, side_by_side
from polyattn_context_parallel.shards import Blocks, Zigzag
from polyattn_context_parallel.step import ContextStep, Found, Layer, attend, sinks_of


class Ring:
    """What a group's layers share: kernels for own keys and for others', and where states meet."""

    def __init__(self, group: LayerGroup, room: Room):
        self.own, self.others = plain_group(group), plain_group(group, causal=False)
        self.room = room
        self.merge = group.backend("merge", MergeBackend)
        self.states = MergeBuffers()


@dataclass(frozen=True)
class Turn:
    """One rank's keys: how this rank attends to them, and which of them it stores.

    `places` int64 (tokens,): where they lie in the room while the turn lasts.
    """

    plan: Any
    places: Tensor
    num_blocks: int
    slots: Tensor | None


class RingStep(ContextStep):
    """Whole prompts, of which every rank has its own pieces."""

    def __init__(self, ring: Ring, context: ContextParallel, blocks: Blocks, batch: Batch):
        for index, (length, query) in enumerate(zip(batch.lens, batch.query_lens, strict=True)):
            if length > query:
                raise BatchError(
                    f"seq_lens[{index}]={length} exceeds its query of {query} tokens; a ring takes whole "
                    "prompts, so pass prefill='all_gather' to ContextGroup for prompts with cached tokens"
                )
        self.ring, self.context = ring, context
        self.zigzag = Zigzag.of(batch, context.size)
        stored = None if batch.slot_mapping is None else blocks.slots(batch.slot_mapping)
        self.turns = []
        for turn in range(context.size):
            source = (context.rank - turn) % context.size
            tokens = torch.from_numpy(self.zigzag.tokens(source)).to(batch.device)
            slots = None if stored is None else stored[tokens]
            self.turns.append(self._turn(batch, source, blocks.block_size, slots))

    def _turn(self, batch: Batch, source: int, size: int, slots: Tensor | None) -> Turn:
        """Plan this rank's pieces over the keys of `source`, whose two pieces lie side by side."""
        rank, device = self.context.rank, batch.device
        mine, theirs = (_pairs(self.zigzag.pieces(r)) for r in (rank, source))
        keys = [a + b for a, b in theirs]
        table, num_blocks = side_by_side(keys, size, device)
        starts, lens = [0], []
        for length, queries, (first, second) in zip(batch.lens, mine, theirs, strict=True):
            if source == rank:
                visible = [first, first + second]
            else:
                visible = [first, first] if source < rank else [0, first + second]
            for query, count in zip(queries, visible, strict=True):
                starts.append(starts[-1] + query)
                lens.append(count if query and length else 0)  # a padding row has no key
        group = self.ring.own if source == rank else self.ring.others
        plan = group.plan(Batch(starts, lens, table.repeat_interleave(2, 0), device=device))
        places = Batch.from_lens(keys, keys, table, size, device=device).slot_mapping
        assert places is not None
        return Turn(plan, places, num_blocks, slots)

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        if key is None or value is None:
            raise BatchError("a ring passes the step's keys and values on; key is None")
        total, total_lse, part, part_lse = self.ring.states.take(query, layer.spec.v_head_size)
        now = self._packed(key, value)
        later = torch.empty_like(now) if self.context.size > 1 else now
        for index, turn in enumerate(self.turns):
            last = index + 1 == len(self.turns)
            arrived = None if last else self.context.pass_on(later, now)
            keys = self._unpacked(now, layer, len(turn.places))
            room = self.ring.room.take(turn.num_blocks)
            layer.store(*keys, room, turn.places)
            if turn.slots is not None:
                layer.store(*keys, cache, turn.slots)
            attend(layer, turn.plan, query, room, part, part_lse if index else total_lse)
            if index:
                self.ring.merge.run(total, total_lse, part, part_lse)
            else:
                total.copy_(part)
            if arrived is not None:
                arrived()
                now, later = later, now
        sinks = sinks_of(layer)
        if sinks is not None:
            add_sink(total, total_lse, sinks)
        return total.to(query.dtype, copy=True), total_lse.to(torch.float32, copy=True)

    def _packed(self, key: Tensor, value: Tensor) -> Tensor:
        """Return keys, then values, in one buffer as long as the longest rank's."""
        rows = self.zigzag.longest
        sizes = [rows * tensor.shape[1] * tensor.shape[2] for tensor in (key, value)]
        packed = key.new_zeros(sum(sizes))
        for tensor, part in zip((key, value), packed.split(sizes), strict=True):
            part[: tensor.numel()] = tensor.flatten()
        return packed

    def _unpacked(self, packed: Tensor, layer: Layer, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the `count` tokens that a rank really has."""
        spec, rows = layer.spec, self.zigzag.longest
        shapes = [(rows, spec.num_kv_heads, size) for size in (spec.head_size, spec.v_head_size)]
        sizes = [a * b * c for a, b, c in shapes]
        key, value = (
            part.view(shape)[:count]
            for part, shape in zip(packed.split(sizes), shapes, strict=True)
        )
        return key, value


def _pairs(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the lengths of each sequence's two pieces."""
    lens = [last - first for _, first, last in pieces]
    return list(zip(lens[0::2], lens[1::2], strict=True))
