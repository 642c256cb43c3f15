"""How is a step of a sparse layer planned? As decodes by bounds, over buffers that each call fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.attention.rotation import rotation_of
from polyattn.families.sparse.pages import pages_of, visible_entries
from polyattn.runtime.backend import AttentionBackend, LayerParams, StoreBackend
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.group import LayerGroup, StepPlanner
from polyattn.runtime.plan import Call, StepPlan, StorePlan
from polyattn.runtime.rotation import NewTokens, Rotation, prepared
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_pages
from polyattn.runtime.store import claimed_rotation
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.decompose import paged, sparse_blocks

TABLE_BYTES = 64 << 20
"""What the block tables of a call's rows may take while they are made: longer steps come in pieces."""


@dataclass(frozen=True)
class Piece:
    """Some of a step's tokens, and their rows' block tables and lengths, which each layer writes.

    `call` is None where the host reads the lengths and plans at each call.
    """

    tokens: slice
    table: Tensor
    lens: Tensor
    call: Call | None


class SparseStep(StepPlan):
    """A step over chosen keys: what is stored, and a decode of each token and KV head."""

    def __init__(self, group: LayerGroup, batch: Batch, planner: Planner):
        super().__init__(group, batch)
        self.planner = planner
        self.pieces: list[Piece] = []
        self.store: StorePlan | None = None
        self.rotation: Rotation | None = None
        spec, tokens = group.spec, batch.num_tokens
        self.query_shape = torch.Size((tokens, spec.num_heads, spec.head_size))
        self.out_shape = torch.Size((tokens, spec.num_heads, spec.v_head_size))

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(piece.call for piece in self.pieces if piece.call is not None)

    def explain(self) -> str:
        spec, batch = self.group.spec, self.batch
        return (
            f"sparse: {batch.num_seqs} sequences, {batch.num_tokens} query tokens, {spec.sparse}: "
            f"{self.planner.name}"
        )

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        choice: Tensor,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Store the step's keys and values and attend. Writes `out` and `lse`."""
        if params.rotate or (self.store is not None and key is not None):
            query = self._store(query, key, value, cache, params)
        spec, planner = self.group.spec, self.planner
        view, steps = cache.in_pages_of(planner.page_size)
        seqs, visible = self._tokens()
        table = self.batch.block_table
        assert table is not None
        kernels = LayerParams(k_scale=params.k_scale, v_scale=params.v_scale)
        for piece in self.pieces:
            at = piece.tokens
            pages, lens = pages_of(
                spec, choice[at], visible[at], seqs[at], table, cache.block_size, planner.page_size,
                steps,
            )  # fmt: skip
            piece.table[:, : pages.shape[1]].copy_(pages)
            piece.lens.copy_(lens)
            call = piece.call or planner.call_of(planner.batch_of(piece, lens.tolist()))
            rows = len(lens)
            queries = query[at].reshape(rows, -1, spec.head_size)
            part = out.new_empty(rows, queries.shape[1], spec.v_head_size)
            part_lse = None
            if planner.spec.needs_lse:
                part_lse = torch.empty(part.shape[:2], dtype=torch.float32, device=part.device)
            call.backend.run(call.plan, queries, None, None, view, kernels, part, part_lse)
            result = part.view(-1, spec.num_heads, spec.v_head_size)
            result_lse = None if part_lse is None else part_lse.view(-1, spec.num_heads)
            if params.sinks is not None:
                assert result_lse is not None
                result, result_lse = with_sinks(result, result_lse, params.sinks)
            out[at] = result
            if lse is not None and result_lse is not None:
                lse[at] = result_lse

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Return each token's sequence and how many entries it sees, int64 (num_tokens,) on the device.

        From the device's own lengths, which a captured graph finds changed.
        """
        batch, spec = self.batch, self.group.spec
        assert spec.sparse is not None
        tokens = torch.arange(batch.num_tokens, device=batch.device)
        if batch.all_decode:
            seqs = tokens
        else:
            ends = batch.query_start_loc[1:].long()
            seqs = torch.searchsorted(ends, tokens, right=True).clamp(max=batch.num_seqs - 1)
        lens = batch.seq_lens.long()[seqs]
        positions = lens - batch.query_start_loc.long()[seqs + 1] + tokens
        return seqs, visible_entries(spec.sparse, spec.causal, positions, lens)

    def _store(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        params: LayerParams,
    ) -> Tensor:
        """Store the new tokens, rotated where the layer rotates. Returns the query, rotated alike."""
        planner, rotation = self.planner, self.rotation if params.rotate else None
        if self.store is not None and key is not None and value is not None:
            if rotation is None:
                planner.store.run(self.store, key, value, cache, params)
                return query
            new = NewTokens(query, key, value)
            rotated: Tensor = planner.rotated_by(
                self.store, rotation, new, cache, params, False
            )[0]  # fmt: skip
            return rotated
        if rotation is None:
            return query
        return prepared(NewTokens(query, None, None), rotation)[0].to(query.dtype)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a learned logit a head to the softmax's denominator.

    `output` (tokens, heads, size), `lse` float32 (tokens, heads). A row without keys stays as it is: not
    even the sink counts.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    weight = torch.exp(lse - total.masked_fill(lse == -torch.inf, 0.0))
    return (
        (output.to(weight.dtype) * weight[..., None]).to(output.dtype),
        total.masked_fill(lse == -torch.inf, -torch.inf),
    )


class Planner(StepPlanner):
    """Plans for sparse layers. One backend serves every token, whatever the phase."""

    def __init__(self, group: LayerGroup):
        self.group = group
        info = group.selection.backend("decode")
        assert info is not None and group.cache_format is not None and group.spec.sparse is not None
        self.name, form = info.name, group.cache_format
        self.spec = paged(group.spec, group.device.is_accelerator)
        self.page_size = sparse_blocks(group.spec)[1]
        self.form = CacheFormat(
            block_size=self.page_size, num_kv_heads=1, head_size=form.head_size,
            v_head_size=form.v_head_size, dtype=form.dtype, value_in_key=form.value_in_key,
        )  # fmt: skip
        self.backend = group.load("decode", info, AttentionBackend, self.spec, self.form)
        self.store = group.backend("store", StoreBackend, cache=form)
        self.rotated_by = claimed_rotation(group, self.store)
        sparse = group.spec.sparse
        self.rows = group.spec.num_heads if sparse.scope == "head" else group.spec.num_kv_heads
        self.width = sparse.budget * (sparse.granularity // self.page_size)

    def plan(self, batch: Batch, reuse: Any = None) -> SparseStep:
        """Plan one step. Raises `BatchError`."""
        spec, assigned = self.group.spec, self.group.cache_format
        assert assigned is not None and spec.sparse is not None
        if spec.sparse.tokens_per_entry == 1:
            check_pages(spec, batch, assigned.block_size)
        elif batch.slot_mapping is not None:
            raise BatchError(
                "slot_mapping stores a step's tokens, and an entry of this cache stands for "
                f"{spec.sparse.tokens_per_entry} of them; leave it out, and store entries by store()"
            )
        if batch.block_table is None and batch.num_tokens:
            raise BatchError(f"{spec} attends over a cache; the batch has no block_table")
        step = SparseStep(self.group, batch, self)
        most = max(1, TABLE_BYTES // (8 * 4 * self.rows * self.width))
        for first in range(0, batch.num_tokens, most):
            tokens = slice(first, min(first + most, batch.num_tokens))
            earlier = None if reuse is None else reuse.pieces[len(step.pieces)]
            step.pieces.append(self._piece(tokens, batch.device, step.pieces, earlier))
        if batch.slot_mapping is not None:
            step.store = self.store.plan(batch.slot_mapping)
        if spec.rope is not None:
            step.rotation = rotation_of(spec, batch, None if reuse is None else reuse.rotation)
        return step

    def _piece(
        self, tokens: slice, device: torch.device, before: list[Piece], earlier: Piece | None
    ) -> Piece:
        rows = (tokens.stop - tokens.start) * self.rows
        if earlier is not None:
            if len(earlier.lens) != rows:
                raise BatchError(
                    f"the captured step has {len(earlier.lens)} rows, this one {rows}; capture a graph "
                    "for each number of tokens"
                )
            return Piece(tokens, earlier.table, earlier.lens, earlier.call)
        if before and len(before[0].lens) == rows:  # one piece after another, over the same buffers
            return Piece(tokens, before[0].table, before[0].lens, before[0].call)
        table = torch.zeros(rows, self.width, dtype=torch.int32, device=device)
        piece = Piece(tokens, table, torch.zeros(rows, dtype=torch.int32, device=device), None)
        if not self.spec.length_bounds:
            return piece
        longest = self.width * self.page_size
        call = self.call_of(self.batch_of(piece, [longest] * rows))
        return Piece(tokens, table, piece.lens, call)

    def batch_of(self, piece: Piece, lens: list[int]) -> Batch:
        """Return a piece's rows as decodes; `lens` are their lengths, or the most that they may be."""
        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=piece.lens.device)
        batch = Batch.on_buffers(
            list(range(len(lens) + 1)), lens, starts, piece.lens, piece.table, None
        )
        batch.lens_are_bounds = self.spec.length_bounds
        return batch

    def call_of(self, batch: Batch) -> Call:
        """Return the backend's call for rows."""
        return Call("decode", self.name, self.backend, self.backend.plan(batch), None)
