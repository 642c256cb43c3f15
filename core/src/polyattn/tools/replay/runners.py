"""Runs the layers of one group: random inputs in, outputs checked, time taken.

There are no weights of a model here: queries, keys, values and parameters are random. One runner a
family, all with the same `step(batch, checker)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polyattn import (
    Attention,
    Batch,
    Indexer,
    IndexerSpec,
    KVCache,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    Recurrent,
    Role,
    SelectedLayers,
    SparseAttention,
    StepPlan,
    select,
)
from polyattn.families.attention.workload import widths
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, raw
from polyattn.runtime.step.chosen_pages import newest_groups
from polyattn.tools.replay.check import Checker


class Ranks(Protocol):
    """The processes that share a run's sequences, as a run sees them: rank 0 prints.

    `polyattn.tools.replay.ranks` has them, with `polyattn-context-parallel`.
    """

    rank: int
    size: int

    def longest(self, seconds: float) -> float:
        """Return the largest of the ranks' numbers, the same on all of them."""

    def runner(self, layers: SelectedLayers, options: Options, num_blocks: int) -> Runner:
        """Return what runs a group of decoder layers on all ranks."""


@dataclass(frozen=True)
class Options:
    """How to serve. `layers` counts the layers of each group that really run.

    `snapshots`: recurrent states kept of prefixes. `context`: the ranks that share keys, of which
    `cache_bytes` are each one's.
    """

    layers: int = 1
    token_budget: int = 2048
    max_seqs: int = 64
    snapshots: int = 16
    cache_bytes: int = 1 << 30
    check_tokens: int = 2
    seed: int = 0
    context: Ranks | None = None

    @property
    def state_slots(self) -> int:
        """Slots of a recurrent layer: one a sequence, and the snapshots."""
        return self.max_seqs + self.snapshots


class Runner:
    """The common part of the families: the group, a source of random numbers, a clock."""

    def __init__(self, layers: SelectedLayers, options: Options):
        self.group, self.spec = LayerGroup(layers.selection), layers.spec
        self.group.finish_builds()
        self.generator = torch.Generator().manual_seed(options.seed)
        self.device = self.group.torch_device
        self.count = min(options.layers, len(layers.layers))
        self.scale = {"auto": 1.0, "int8": 0.04}.get(self.spec.kv_cache_dtype, 1.0)
        self._stock: dict[int, Tensor] = {}
        self.indexer: Indexer | None = None
        self.index_keys: list[Tensor] = []
        self.num_caches = layers.num_caches(self.count)
        self.sources = layers.kv_source[: self.count]
        self.own = [i == source for i, source in zip(layers.layers, self.sources, strict=False)]
        self.saved_bytes, self.seconds = 0, 0.0

    def step(self, batch: Batch, checker: Checker) -> float:
        """Run every layer over `batch`; returns the seconds that its plan and the layers took."""
        before = self.seconds
        self.run(batch, checker)
        return self.seconds - before

    def run(self, batch: Batch, checker: Checker) -> None:
        """Plan a step and run every layer, all `timed`, and check the results."""
        raise NotImplementedError

    def draw(self, tokens: int, *shape: int) -> Tensor:
        """Return (tokens, *shape) random numbers.

        Taken from a stock at a random place: fresh ones for each layer would cost more than the
        attention that they are for.
        """
        width = 1
        for size in shape:
            width *= size
        need = tokens * width
        stock = self._stock.get(width)
        if stock is None or len(stock) < 2 * need:
            stock = torch.randn(2 * max(need, 1 << 16), generator=self.generator)
            stock = stock.to(STORAGE_DTYPES[self.spec.dtype]).to(self.device)
            self._stock[width] = stock
        # Kernels load 16 bytes at a time, so the place is a multiple of 16 elements.
        at = int(torch.randint((len(stock) - need) // 16 + 1, (1,), generator=self.generator)) * 16
        return stock[at : at + need].view(tokens, *shape)

    def paged(self) -> list[Tensor]:
        """Return all caches: keys (num_blocks, block_size, ...), states (num_slots, ...)."""
        raise NotImplementedError

    def allocate(self, num_blocks: int) -> list[KVCache]:
        """Return each layer's cache, which layers that read another's share with it."""
        caches = {
            each: self.group.allocate_cache(num_blocks) for each in dict.fromkeys(self.sources)
        }
        return [caches[source] for source in self.sources]

    def owned(self, caches: Sequence[KVCache | None]) -> list[Tensor]:
        """Return the keys and values of the caches that layers own, and the index keys."""
        own = (c for c, own in zip(caches, self.own, strict=True) if own and c is not None)
        stored = [t for c in own for t in ((c.key,) if c.value_in_key else (c.key, c.value))]
        return stored + self.index_keys

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, or states, within every layer's cache: int64 (copies,) each."""
        for stored in map(raw, self.paged()):
            stored[targets] = stored[sources]

    def index(self, spec: LayerSpec, num_blocks: int) -> None:
        """Have an indexer, and index keys for each layer."""
        self.indexer = Indexer(select(spec, self.group.device))
        self.index_keys = [self.indexer.allocate_cache(num_blocks) for _ in range(self.count)]

    def chosen(self, index: int, batch: Batch) -> Tensor | None:
        """Store the step's index keys and choose for each token; without an indexer the newest."""
        if self.indexer is None:
            return newest_groups(self.spec, batch) if self.spec.chooses else None
        spec, tokens, keys = self.indexer.spec, batch.num_tokens, self.index_keys[index]
        slots = entry_slots(batch, spec.tokens_per_entry, keys.shape[1])
        self.indexer.store(self.draw(len(slots), spec.head_size), keys, slots)
        query = self.draw(tokens, spec.num_heads, spec.head_size)
        weights = self.draw(tokens, spec.num_heads) if spec.fold == "weighted" else None
        return self.indexer(query, keys, batch, weights)

    def planned(self, batch: Batch) -> StepPlan:
        """Plan a step; `saved_bytes` counts what its calls over shared blocks don't read again."""
        plan = self.group.plan(batch)
        saved = sum(call.saved_bytes for call in plan.calls)
        self.saved_bytes += saved * self.count
        return plan

    def timed(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Return a call's result, a layer's without its LSE; `seconds` counts what it took."""
        started = self.clock()
        result = call(*args, **named)
        self.seconds += self.clock() - started
        return result[0] if isinstance(result, tuple) else result

    def clock(self) -> float:
        """Seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def entry_slots(batch: Batch, tokens_per_entry: int, block_size: int) -> Tensor:
    """Return where a cache takes the entries that a step's tokens close, int64 (entries,)."""
    assert batch.slot_mapping is not None and batch.block_table is not None
    if tokens_per_entry == 1:
        return batch.slot_mapping
    slots, table = [], batch.block_table.tolist()
    for blocks, length, query in zip(table, batch.lens, batch.query_lens, strict=True):
        closed = range((length - query) // tokens_per_entry, length // tokens_per_entry)
        slots += [blocks[e // block_size] * block_size + e % block_size for e in closed]
    return torch.tensor(slots, dtype=torch.int64, device=batch.device)


class AttentionRunner(Runner):
    """Attention layers and their paged caches."""

    def __init__(self, layers: SelectedLayers, options: Options, num_blocks: int):
        super().__init__(layers, options)
        spec = self.spec
        self.layers = [
            Attention(
                self.group,
                sinks=torch.randn(spec.num_heads, generator=self.generator)
                if spec.learned_sinks
                else None,
                k_scale=self.scale,
                v_scale=self.scale,
                rotate=None if spec.rope is None else not spec.rope.learned,
                checks=True,
                own_keys=own,
            )
            for own in self.own
        ]
        self.caches: list[KVCache | None] = [None] * self.count
        if spec.cached:
            self.caches = [*self.allocate(num_blocks)]

    def paged(self) -> list[Tensor]:
        return self.owned(self.caches)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random (query, key, value) for one layer and step."""
        query, key, value = (self.draw(tokens, *width) for width in widths(self.spec))
        return query, key, value

    def run(self, batch: Batch, checker: Checker) -> None:
        plan, stores = self.timed(self.planned, batch), self.spec.role is not Role.CROSS
        for layer, cache, own in zip(self.layers, self.caches, self.own, strict=True):
            query, key, value = self.inputs(batch.num_tokens)
            new = (key, value) if stores and own else (None, None)
            out = self.timed(layer, query, *new, cache, plan)
            checker.check(layer, query, new, cache, batch, out)


class LatentRunner(Runner):
    """MLA layers, their latent caches, and for sparse ones the cache of index keys."""

    def __init__(self, layers: SelectedLayers, options: Options, num_blocks: int):
        super().__init__(layers, options)
        weights = latent_weights(self.spec, self.generator)
        self.layers = [
            LatentAttention(self.group, *weights, k_scale=self.scale, checks=True, own_keys=own)
            for own in self.own
        ]
        self.caches = self.allocate(num_blocks)
        latent = self.spec.latent
        assert latent is not None
        self.latent = latent
        if self.spec.sparse is not None:
            budget = self.spec.sparse.budget
            small = IndexerSpec(num_heads=1, head_size=1, budget=budget)  # for another layer's
            self.index(self.spec.replace(indexer=self.spec.indexer or small), num_blocks)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random (query, latent, rope key) for one layer and step."""
        return (
            self.draw(tokens, self.spec.num_heads, self.spec.head_size),
            self.draw(tokens, self.latent.rank),
            self.draw(tokens, self.latent.rope_head_size),
        )

    def run(self, batch: Batch, checker: Checker) -> None:
        plan = self.timed(self.planned, batch)
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            query, *new = self.inputs(batch.num_tokens)
            choice = self.timed(self.chosen, index, batch)
            stored = new if self.own[index] else (None, None)
            out = self.timed(layer, query, *stored, cache, plan, choice=choice)
            checker.check_latent(layer, query, cache, batch, choice, out)

    def paged(self) -> list[Tensor]:
        return self.owned(self.caches)


class SparseRunner(Runner):
    """Layers over keys that a choice names: their indexer's, or for another layer's the newest.

    The blocks are one for each `block_size` tokens, also where an entry stands for several.
    """

    def __init__(self, layers: SelectedLayers, options: Options, num_blocks: int):
        super().__init__(layers, options)
        spec = self.spec
        sinks = torch.randn(spec.num_heads, generator=self.generator)
        self.layers = [
            SparseAttention(
                self.group,
                sinks=sinks if spec.learned_sinks else None,
                k_scale=self.scale,
                v_scale=self.scale,
                rotate=None if spec.rope is None else False,
                checks=True,
                own_keys=own,
            )
            for own in self.own
        ]
        self.caches = self.allocate(num_blocks)
        if spec.indexer is not None:
            self.index(spec, num_blocks)

    def paged(self) -> list[Tensor]:
        return self.owned(self.caches)

    def run(self, batch: Batch, checker: Checker) -> None:
        spec, sparse = self.spec, self.spec.sparse
        assert sparse is not None
        step = batch
        if sparse.tokens_per_entry > 1:  # whose rows are no tokens'
            step = Batch(batch.starts, batch.lens, batch.block_table)
        plan = self.timed(self.planned, step)
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            query = self.draw(batch.num_tokens, spec.num_heads, spec.head_size)
            slots = entry_slots(batch, sparse.tokens_per_entry, cache.block_size)
            key = self.draw(len(slots), spec.num_kv_heads, spec.head_size)
            value = self.draw(len(slots), spec.num_kv_heads, spec.v_head_size)
            if layer.own_keys:
                self.timed(layer.store, key, None if sparse.value_in_key else value, cache, slots)
            choice = self.timed(self.chosen, index, batch)
            out = self.timed(layer, query, None, None, cache, plan, choice=choice)
            checker.check_sparse(layer, query, cache, batch, choice, out)


class RecurrentRunner(Runner):
    """Recurrent layers and their states, a slot for each running sequence and each snapshot."""

    def __init__(self, layers: SelectedLayers, options: Options):
        super().__init__(layers, options)
        self.layers = [
            Recurrent(self.group, checks=True, **recurrent_params(self.spec, self.generator))
            for _ in range(self.count)
        ]
        self.states = [self.group.allocate_states(options.state_slots) for _ in range(self.count)]

    def paged(self) -> list[Tensor]:
        return [states.data for states in self.states]

    def run(self, batch: Batch, checker: Checker) -> None:
        plan = self.timed(self.planned, batch)
        for layer, states in zip(self.layers, self.states, strict=True):
            inputs = recurrent_inputs(self.spec, batch.num_tokens, self.generator, self.device)
            sampled = checker.sample_states(batch, states)
            out = self.timed(layer, *inputs, states=states, plan=plan)
            checker.check_recurrent(layer, inputs, states, batch, out, sampled)
