"""Ring attention for whole prompts: each rank keeps its queries, and keys go from rank to rank.

Ring attention (Liu, Zaharia, Abbeel, arXiv 2310.01889) over zigzag pieces. At each turn a rank attends to
the keys that it was passed while the next ones are under way, and merges the state. A turn takes one
piece of keys and both of the rank's own pieces, or both pieces of keys and its second one. So every
rank computes half of the pairs at every turn. The rank whose block a key falls into stores it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from polyattn import Batch, LayerGroup
from polyattn.errors import BatchError
from polyattn.host import Frame, MergeBackend, MergeBuffers, Op
from torch import Tensor

from polyattn_context_parallel.keys import plain_group, side_by_side
from polyattn_context_parallel.merging import write_merged
from polyattn_context_parallel.ops import Attend, InRoom, Room, StoreKeys
from polyattn_context_parallel.ranks import ContextParallel
from polyattn_context_parallel.shards import Blocks, Zigzag


class RingKernels:
    """Shared by a group's layers: kernels for own keys and for other ranks' keys, and the merge."""

    def __init__(self, group: LayerGroup, room: Room):
        self.own, self.others = plain_group(group), plain_group(group, causal=False)
        self.room = room
        self.merge = group.backend("merge", MergeBackend)
        self.states = MergeBuffers()


@dataclass(frozen=True)
class Turn:
    """How this rank attends to `count` keys of one rank, and which of them it stores."""

    count: int
    attend: InRoom
    store: StoreKeys | None


class Ring(Op):
    """Whole prompts; every rank has its own pieces of them."""

    def __init__(
        self, kernels: RingKernels, context: ContextParallel, blocks: Blocks, batch: Batch
    ):
        for index, (length, query) in enumerate(zip(batch.lens, batch.query_lens, strict=True)):
            if length > query:
                raise BatchError(
                    f"seq_lens[{index}]={length} exceeds its query of {query} tokens; a ring takes whole "
                    "prompts, so pass prefill='all_gather' to ContextGroup for prompts with cached tokens"
                )
        self.kernels, self.context = kernels, context
        self.zigzag = Zigzag.of(batch, context.size)
        slots = None if batch.slot_mapping is None else blocks.slots(batch.slot_mapping)
        sources = ((context.rank - turn) % context.size for turn in range(context.size))
        self.turns = [self._turn(batch, source, blocks.block_size, slots) for source in sources]
        self.inner = [turn.attend for turn in self.turns]

    def _turn(self, batch: Batch, source: int, size: int, stored: Tensor | None) -> Turn:
        """Plan this rank's pieces over the keys of `source`, whose two pieces lie side by side."""
        rank, device, kernels = self.context.rank, batch.device, self.kernels
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
        group = kernels.own if source == rank else kernels.others
        plan = group.plan(Batch(starts, lens, table.repeat_interleave(2, 0), device=device))
        places = Batch.from_lens(keys, keys, table, size, device=device).slot_mapping
        attend = InRoom(Attend(plan), kernels.room, num_blocks, slots=places)
        tokens = torch.from_numpy(self.zigzag.tokens(source)).to(device)
        store = None if stored is None else StoreKeys(kernels.room.group, stored[tokens])
        return Turn(len(tokens), attend, store)

    def run(self, frame: Frame) -> None:
        key, value, kernels = frame.key, frame.value, self.kernels
        if key is None or value is None:
            raise BatchError("a ring passes the step's keys and values on; key is None")
        total, total_lse, part, part_lse = kernels.states.take(frame.query, frame.out.shape[2])
        # Keys, then values, in one buffer as long as the longest rank's.
        shapes = [(self.zigzag.longest, *tensor.shape[1:]) for tensor in (key, value)]
        sizes = [a * b * c for a, b, c in shapes]
        now = key.new_zeros(sum(sizes))
        for tensor, mine in zip((key, value), now.split(sizes), strict=True):
            mine[: tensor.numel()] = tensor.flatten()
        later = torch.empty_like(now) if self.context.size > 1 else now
        for index, turn in enumerate(self.turns):
            last = index + 1 == len(self.turns)
            arrived = None if last else self.context.pass_on(later, now)
            passed = [
                tensor.view(shape)[: turn.count]
                for tensor, shape in zip(now.split(sizes), shapes, strict=True)
            ]
            turned = frame.but(key=passed[0], value=passed[1])
            if turn.store is not None:
                turn.store.run(turned)
            turned.out, turned.lse = part, part_lse if index else total_lse
            turn.attend.run(turned)
            if index:
                kernels.merge.run(total, total_lse, part, part_lse)
            else:
                total.copy_(part)
            if arrived is not None:
                arrived()
                now, later = later, now
        write_merged(frame, total, total_lse, frame.params.sinks)


def _pairs(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the lengths of each sequence's two pieces."""
    lens = [last - first for _, first, last in pieces]
    return list(zip(lens[0::2], lens[1::2], strict=True))
