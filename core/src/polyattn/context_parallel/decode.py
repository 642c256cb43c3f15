"""How do rows of one token attend? Every rank over the keys that it holds; then the states merge.

Where a key's part depends on nothing but the key, the rank's blocks are a cache like any other and
the order of keys doesn't matter. Where it depends on the key's place, one of two ways says it to a
backend that believes its keys are neighbours: what a window leaves is copied together, and under
ALiBi each block is a row of its own, whose distances are off by one number, which moves the row's
LSE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.api import select
from polyattn.context_parallel.merging import Merging
from polyattn.context_parallel.shards import Blocks
from polyattn.context_parallel.step import (
    ContextStep,
    Found,
    Layer,
    attend,
    sinks_of,
    width_of,
)
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.kv_cache import KVCache, raw
from polyattn.runtime.plan import StepPlan
from polyattn.selection.selection import Selection
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec


def without_sinks(group: LayerGroup) -> LayerGroup:
    """Return a group over the same cache by the same backends whose rows leave learned sinks out."""
    spec = group.spec.replace(learned_sinks=False)
    if spec == group.spec:
        return group
    names = ",".join(f"{phase}={info.name}" for phase, info in group.selection.backends)
    form = group.cache_format
    assert form is not None
    asked = spec.replace(block_size=form.block_size)
    return LayerGroup(select(asked, group.device, backend=names), cache_format=form)


def over_given_keys(group: LayerGroup, causal: bool) -> LayerGroup:
    """Return a group for keys that are given whole, all of which count, or those up to the query."""
    return LayerGroup(_given(group.selection, causal))


@lru_cache(maxsize=256)
def _given(selection: Selection, causal: bool) -> Selection:
    spec = selection.spec
    asked = LayerSpec(
        num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
        v_head_size=spec.v_head_size, scale=spec.scale, dtype=spec.dtype, cached=False,
        logit_soft_cap=spec.logit_soft_cap, needs_lse=True, deterministic=spec.deterministic,
        batch_invariant=spec.batch_invariant, causal=causal,
        role=Role.DECODER if causal else Role.CROSS,
    )  # fmt: skip
    return select(asked, selection.device)


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

    def __init__(self, given: LayerGroup, batch: Batch, blocks: Blocks, spec: LayerSpec):
        assert batch.block_table is not None
        rows, places = [], []
        for row, length in enumerate(batch.lens):
            seen = _seen_places(spec, length, blocks)
            rows.append(np.full(len(seen), row))
            places.append(seen)
        lens = [len(seen) for seen in places]
        at = np.stack([np.concatenate(rows), np.concatenate(places)]).astype(np.int64)
        seqs, local = torch.from_numpy(at).to(batch.device)
        self.blocks = batch.block_table[seqs, local // blocks.block_size].long()
        self.offsets = local % blocks.block_size
        self.plan = given.plan(Batch(batch.starts, lens, device=batch.device))

    def run(self, layer: Layer, query: Tensor, cache: KVCache, out: Tensor, lse: Tensor) -> None:
        params = layer.params
        key = self._read(cache.key, params.k_scale, query.dtype)
        value = self._read(cache.value, params.v_scale, query.dtype)
        plan: Any = self.plan
        plan.call(query, key, value, None, replace(params, sinks=None), out, lse)

    def _read(self, stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        found = raw(stored)[self.blocks, self.offsets].view(stored.dtype)
        if stored.dtype.itemsize > 1:
            return found
        return (found.to(torch.float32) * scale).to(dtype)


def _seen_places(spec: LayerSpec, length: int, blocks: Blocks) -> np.ndarray[Any, Any]:
    """Return this rank's places of a sequence that its last token sees, in order."""
    first = 0 if spec.sliding_window is None else max(length - spec.sliding_window, 0)
    chunk = 0 if spec.chunk_size is None else (length - 1) // spec.chunk_size * spec.chunk_size
    runs = [(0, min(spec.sink_tokens, first)), (first, length)]
    held = [blocks.held([max(start, chunk), stop]) for start, stop in runs]
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
        found = each.new_empty(len(each), *out.shape[1:])
        found_lse = lse.new_empty(len(each), lse.shape[1])
        attend(layer, self.plan, each, cache, found, found_lse)
        lses = found_lse.view(self.rows, self.columns, -1)
        lses = lses + self.behind[..., None].to(lses.dtype) * slopes.to(lses.dtype)
        torch.logsumexp(lses, 1, out=lse)
        weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
        parts = found.view(self.rows, self.columns, *out.shape[1:]).to(lses.dtype)
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
    spec: LayerSpec,
    group: LayerGroup,
    given: LayerGroup | None,
    batch: Batch,
    blocks: Blocks,
) -> LocalState:
    """Plan rows of one token over this rank's keys; `batch` speaks of all ranks' keys."""
    if given is not None:
        return CopiedTogether(given, batch, blocks, spec)
    if spec.alibi:
        return BlockByBlock(group, batch, blocks)
    local = Batch(
        batch.starts, blocks.held(batch.lens).tolist(), batch.block_table, device=batch.device
    )
    return InAnyOrder(group.plan(local))
