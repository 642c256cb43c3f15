"""How do whole prompts attend while keys go round? Each rank keeps its queries, keys come past.

Ring attention (Liu, Zaharia, Abbeel, arXiv 2310.01889) over zigzag pieces: at each turn a rank
attends to what it was passed while the next is under way, and merges the state. A turn is the keys'
piece against both of the rank's own, or both pieces of keys against its second: half of what is
there, on every rank, at every turn. What is passed is stored by the rank whose block it falls into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyattn.context_parallel.decode import over_given_keys
from polyattn.context_parallel.merging import add_sink
from polyattn.context_parallel.ranks import ContextParallel
from polyattn.context_parallel.shards import Blocks, Zigzag
from polyattn.context_parallel.step import ContextStep, Found, Layer, sinks_of
from polyattn.errors import BatchError
from polyattn.runtime.backend import MergeBackend
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.kv_cache import KVCache
from polyattn.runtime.merge import MergeBuffers


class Ring:
    """What a group's layers share: kernels for keys that are given, and where states meet."""

    def __init__(self, group: LayerGroup):
        self.causal, self.whole = over_given_keys(group, True), over_given_keys(group, False)
        self.merge = group.backend("merge", MergeBackend)
        self.states = MergeBuffers()


@dataclass(frozen=True)
class Turn:
    """One rank's keys: how this rank attends to them, and which of them it stores."""

    plan: Any
    slots: Tensor | None


class RingStep(ContextStep):
    """Whole prompts, of which every rank has its own pieces."""

    def __init__(self, ring: Ring, context: ContextParallel, blocks: Blocks, batch: Batch):
        for index, (length, query) in enumerate(zip(batch.lens, batch.query_lens, strict=True)):
            if length > query:
                raise BatchError(
                    f"seq_lens[{index}]={length} exceeds its query of {query} tokens; a ring takes whole "
                    "prompts, so give ContextGroup prefill='all_gather' for those with cached tokens"
                )
        self.ring, self.context = ring, context
        self.zigzag = Zigzag.of(batch, context.size)
        stored = None if batch.slot_mapping is None else blocks.slots(batch.slot_mapping)
        self.turns = []
        for turn in range(context.size):
            source = (context.rank - turn) % context.size
            tokens = torch.from_numpy(self.zigzag.tokens(source)).to(batch.device)
            slots = None if stored is None else stored[tokens]
            self.turns.append(Turn(self._plan(batch, source), slots))

    def _plan(self, batch: Batch, source: int) -> Any:
        """Plan this rank's pieces over the keys of `source`, whose pieces lie side by side."""
        rank, device = self.context.rank, batch.device
        mine, theirs = self.zigzag.pieces(rank), self.zigzag.pieces(source)
        starts, lens, firsts, at = [0], [], [], 0
        for index in range(0, len(mine), 2):
            queries = [last - first for _, first, last in mine[index : index + 2]]
            keys = [last - first for _, first, last in theirs[index : index + 2]]
            if batch.lens[mine[index][0]] == 0:  # a padding row
                seen = [0, 0]
            elif source == rank:
                seen = [keys[0], keys[0] + keys[1]]
            else:
                seen = [keys[0], keys[0]] if source < rank else [0, keys[0] + keys[1]]
            for query, count in zip(queries, seen, strict=True):
                starts.append(starts[-1] + query)
                lens.append(count if query else 0)
                firsts.append(at)
            at += sum(keys)
        group = self.ring.causal if source == rank else self.ring.whole
        return group.plan(Batch(starts, lens, key_starts=firsts, device=device))

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        if key is None or value is None:
            raise BatchError("a ring passes the step's keys and values on; key is None")
        params = replace(layer.params, sinks=None, k_scale=1.0, v_scale=1.0)
        total, total_lse, part, part_lse = self.ring.states.take(query, layer.spec.v_head_size)
        now = self._packed(key, value)
        later = torch.empty_like(now) if self.context.size > 1 else now
        for index, turn in enumerate(self.turns):
            last = index + 1 == len(self.turns)
            arrived = None if last else self.context.pass_on(later, now)
            found = self._unpacked(now, layer)
            if turn.slots is not None:
                count = len(turn.slots)
                layer.store(found[0][:count], found[1][:count], cache, turn.slots)
            lse = part_lse if index else total_lse
            turn.plan.call(query, *found, None, params, part, lse)
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

    def _unpacked(self, packed: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        spec, rows = layer.spec, self.zigzag.longest
        shapes = [(rows, spec.num_kv_heads, size) for size in (spec.head_size, spec.v_head_size)]
        sizes = [a * b * c for a, b, c in shapes]
        key, value = (
            part.view(shape) for part, shape in zip(packed.split(sizes), shapes, strict=True)
        )
        return key, value
