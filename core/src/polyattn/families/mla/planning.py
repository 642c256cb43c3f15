"""How is a step of MLA planned? Short rows absorbed, over latents; long ones expanded, in pieces.

Multi-head latent attention (DeepSeek-AI, 2024): all heads' keys and values are made from one latent
a token, `k = [W_UK c, k_rope]`, `v = W_UV c`, and the cache holds `[c, k_rope]` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.attention.rotation import rotation_of
from polyattn.families.mla.absorption import Weights, absorb, expand_rows, project
from polyattn.runtime.backend import (
    AttentionBackend,
    LayerParams,
    MergeBackend,
    SparseBackend,
    StoreBackend,
)
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.calls import planned_call
from polyattn.runtime.decompositions import Part, by_phase
from polyattn.runtime.group import LayerGroup, StepPlanner
from polyattn.runtime.merge import MergeBuffers
from polyattn.runtime.plan import Call, Rows, StepPlan, StorePlan
from polyattn.runtime.rotation import NewTokens, Rotation
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_padding, check_pages
from polyattn.runtime.store import claimed_rotation
from polyattn.spec.decompose import expanded
from polyattn.spec.kinds import AttentionKind

ALIGNED = 16
"""Bytes: what kernels store at a time."""
EXPANDED_BYTES = 256 << 20
"""Keys and values that a prefill makes of cached latents at a time: the bound of its workspace."""


@dataclass(frozen=True)
class Expansion:
    """A piece of a prefill: which cached tokens its keys and values are made of, and its call.

    `slots` int64 (tokens,): the sequences' tokens one after another.
    """

    call: Call
    slots: Tensor


class LatentStep(StepPlan):
    """A step over latents: absorbed calls, the pieces of expanded ones, and what is stored."""

    def __init__(self, group: LayerGroup, batch: Batch):
        super().__init__(group, batch)
        self.absorbed: list[Call] = []
        self.expansions: list[Expansion] = []
        self.store: StorePlan | None = None
        self.rotation: Rotation | None = None
        self.table: Tensor | None = None
        spec, tokens = group.spec, batch.num_tokens
        self.query_shape = torch.Size((tokens, spec.num_heads, spec.head_size))
        self.out_shape = torch.Size((tokens, spec.num_heads, spec.v_head_size))

    @property
    def calls(self) -> tuple[Call, ...]:
        return (*self.absorbed, *(piece.call for piece in self.expansions))

    def run(
        self,
        query: Tensor,
        entry: Tensor | None,
        cache: KVCache,
        weights: Weights | None,
        params: LayerParams,
        topk: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Store the step's latents (num_tokens, 1, rank + rope) and attend. Writes `out`, `lse`.

        Without `weights` query and output are the absorbed ones, (num_tokens, heads, rank + rope)
        and (num_tokens, heads, rank).
        """
        self.check_blocks(cache)
        planner = self.group.planner
        assert isinstance(planner, Planner)
        if params.rotate or (self.store is not None and entry is not None):
            query = self._store(planner, query, entry, cache, params)
        slots = None if topk is None else self._slots_of(topk)
        for call in self.absorbed:
            rows: Any = slice(None) if call.rows is None else call.rows
            taken = query[rows]
            given = taken if weights is None else absorb(taken, weights[0])
            view = call.view(cache)
            # Straight to the caller's, where that is what a backend writes: all rows, dense, aligned.
            whole = weights is None and call.rows is None
            whole = whole and out.is_contiguous() and out.data_ptr() % ALIGNED == 0
            found, found_lse = out, lse
            if not whole:
                found = query.new_empty(*given.shape[:2], cache.format.v_head_size)
                found_lse = None if lse is None else lse.new_empty(given.shape[:2])
            if slots is None:
                call.backend.run(call.plan, given, None, None, view, params, found, found_lse)
            else:
                call.backend.run(call.plan, given, slots[rows], view, params, found, found_lse)
            if whole:
                continue
            out[rows] = found if weights is None else project(found, weights[1])
            if lse is not None and found_lse is not None:
                lse[rows] = found_lse
        if self.expansions:
            assert weights is not None
            self._run_expanded(planner, query, cache, weights, params, out, lse)

    def _store(
        self,
        planner: Planner,
        query: Tensor,
        entry: Tensor | None,
        cache: KVCache,
        params: LayerParams,
    ) -> Tensor:
        """Store the latents, rotated where the layer rotates. Returns the query, rotated alike."""
        rotation = self.rotation if params.rotate else None
        if self.store is None or entry is None:
            if rotation is None:
                return query
            return rotation.applied_to_query(query).to(query.dtype)
        value = entry[..., : cache.format.v_head_size]
        if rotation is None:
            planner.store.run(self.store, entry, value, cache, params)
            return query
        new = NewTokens(query, entry, value)
        found: Tensor = planner.rotated_by(self.store, rotation, new, cache, params, False)[0]
        return found

    def _slots_of(self, topk: Tensor) -> Tensor:
        """Return the cache rows of chosen positions, int32 (num_tokens, topk), -1 for none."""
        assert self.table is not None and self.group.cache_format is not None
        if not self.table.shape[1]:
            return torch.full_like(topk, -1)
        size, positions = self.group.cache_format.block_size, topk.clamp(min=0).long()
        blocks = self.table.long().gather(1, positions // size)
        return (blocks * size + positions % size).int().masked_fill_(topk < 0, -1)

    def _run_expanded(
        self,
        planner: Planner,
        query: Tensor,
        cache: KVCache,
        weights: Weights,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        rows: Any = self.expansions[0].call.rows
        rows = slice(None) if rows is None else rows
        taken = query[rows]
        if taken.dtype != query.dtype or not taken.is_contiguous():
            taken = taken.contiguous()
        several = len(self.expansions) > 1
        total, total_lse, part, part_lse = planner.buffers.take(
            taken, planner.spec.v_head_size, several
        )
        for index, piece in enumerate(self.expansions):
            key, value = expand_rows(cache, piece.slots, weights, params, query.dtype)
            result, result_lse = (part, part_lse) if index else (part, total_lse)
            piece.call.backend.run(
                piece.call.plan, taken, key, value, None, LayerParams(), result, result_lse
            )
            if not several:
                break
            if index == 0:
                total.copy_(result)
            else:
                planner.merge.run(total, total_lse, part, part_lse)
        out[rows] = total.to(out.dtype) if several else part
        if lse is not None:
            lse[rows] = total_lse.to(lse.dtype)


class Planner(StepPlanner):
    """Plans for MLA and sparse MLA over a latent cache.

    A sparse layer has no expanded form: both its phases attend to rows that are chosen for them.
    """

    def __init__(self, group: LayerGroup):
        self.group, self.spec = group, group.spec
        selection = group.selection
        self.sparse = self.spec.kind is AttentionKind.SPARSE_MLA
        decode, prefill = selection.backend("decode"), selection.backend("prefill")
        assert decode is not None and prefill is not None
        self.names = {"decode": decode.name, "prefill": prefill.name}
        base: type[Any] = SparseBackend if self.sparse else AttentionBackend
        self.decode: Any = group.backend("decode", base, cache=group.kernel_format(decode))
        self.longest_decode = decode.capabilities.decode_query_lens
        if self.sparse:
            self.sparse_prefill = group.backend(
                "prefill", SparseBackend, cache=group.kernel_format(prefill)
            )
        self.store = group.backend("store", StoreBackend, cache=group.cache_format)
        self.rotated_by = claimed_rotation(group, self.store)
        self.merge = group.backend("merge", MergeBackend)
        self.buffers = MergeBuffers()

    def plan(self, batch: Batch, reuse: Any = None) -> LatentStep:
        """Plan one step. Raises `BatchError`."""
        check_padding(batch, list(self.names.values()))
        assert self.group.cache_format is not None
        check_pages(self.spec, batch, self.group.cache_format.block_size)
        if reuse is not None and not (batch.all_decode and reuse.batch.all_decode):
            raise BatchError("a captured step of MLA is of single-token rows alone")
        step = LatentStep(self.group, batch)
        phases = by_phase(batch, 1 if self.sparse else self.longest_decode)
        for phase, part in (("decode", phases.decode), ("prefill", phases.prefill)):
            if part is None or not part.batch.num_tokens:
                continue
            if phase == "decode" or self.sparse:
                earlier = reuse.absorbed[0] if reuse is not None else None
                step.absorbed.append(self._absorbed(phase, part, earlier))
            else:
                self._plan_expansions(step, part)
        if self.sparse and batch.block_table is not None:
            step.table = batch.block_table  # as it is, where a captured graph reads it
            if not batch.all_decode:
                counts = torch.tensor(batch.query_lens, dtype=torch.int64, device=batch.device)
                step.table = torch.repeat_interleave(batch.block_table, counts, dim=0)
        if batch.slot_mapping is not None:
            step.store = self.store.plan(batch.slot_mapping)
        if self.spec.rope is not None:
            step.rotation = rotation_of(self.spec, batch, None if reuse is None else reuse.rotation)
        return step

    def _absorbed(self, phase: str, part: Part, earlier: Call | None) -> Call:
        backend = self.decode if phase == "decode" else self.sparse_prefill
        cache = None if self.sparse else self.group.cache_format  # chosen rows lie in no blocks
        return planned_call(cache, phase, self.names[phase], backend, part, earlier)

    def _plan_expansions(self, step: LatentStep, part: Part) -> None:
        """List the pieces: each query's own new tokens, then the context in pieces that fit."""
        spec, batch = self.spec, part.batch
        queries = batch.query_lens
        contexts = [max(n - q, 0) for n, q in zip(batch.lens, queries, strict=True)]
        # A padding row (one query token, length 0) has no new token either.
        fresh = [min(n, q) for n, q in zip(batch.lens, queries, strict=True)]
        step.expansions.append(self._piece(batch, part.rows, contexts, fresh, causal=True))
        width = spec.num_heads * (spec.head_size + spec.v_head_size)
        rows = EXPANDED_BYTES // (width * STORAGE_DTYPES[spec.dtype].itemsize)
        # An empty query has nothing to attend with.
        counts = [n if q else 0 for n, q in zip(contexts, queries, strict=True)]
        longest = max(counts, default=0)
        if not longest:
            return
        step_size = max(1, rows // sum(n > 0 for n in counts))
        for start in range(0, longest, step_size):
            lens = [min(max(n - start, 0), step_size) for n in counts]
            firsts = [start] * len(lens)
            step.expansions.append(self._piece(batch, part.rows, firsts, lens, causal=False))

    def _piece(
        self,
        batch: Batch,
        rows: Rows,
        firsts: Sequence[int],
        lens: Sequence[int],
        causal: bool,
    ) -> Expansion:
        """Plan the prefill over tokens `firsts[i]` to `firsts[i] + lens[i]` of each sequence."""
        assert batch.block_table is not None and self.group.cache_format is not None
        size, counts = self.group.cache_format.block_size, np.asarray(lens)
        seq = np.repeat(np.arange(len(counts)), counts)
        begin = np.asarray(firsts) - np.concatenate([[0], counts.cumsum()[:-1]])
        position = np.arange(len(seq)) + begin[seq]
        at = torch.from_numpy(np.stack([seq, position // size, position % size]).astype(np.int64))
        at = at.to(batch.device)
        slots = batch.block_table[at[0], at[1]].long() * size + at[2]
        keys = Batch(batch.starts, list(lens), device=batch.device)
        backend = self.group.backend("prefill", AttentionBackend, spec=expanded(self.spec))
        plan = backend.plan(keys if causal else keys.over_context())
        return Expansion(Call("prefill", self.names["prefill"], backend, plan, rows), slots)
