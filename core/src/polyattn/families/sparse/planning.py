"""How is a step of a sparse layer planned? As decodes by bounds, over buffers that each call fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyattn.errors import BatchError
from polyattn.families.attention.rotation import rotation_of
from polyattn.runtime.backend import (
    Addressed,
    AddressedChoice,
    AttentionBackend,
    PageStrides,
    SparseBackend,
)
from polyattn.runtime.cache.kv_cache import ALLOCATORS, KVCache
from polyattn.runtime.group import LayerGroup, StepPlan, StepPlanner
from polyattn.runtime.inputs import form_of
from polyattn.runtime.merge import with_sinks
from polyattn.runtime.program import Call, Frame, LayerParams, Op
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import (
    ChosenPages,
    check_places,
    pages_of,
    token_places,
    visible_entries,
)
from polyattn.runtime.store import Store, claimed_rotation
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.decompose import questions, sparse_blocks

TABLE_BYTES = 64 << 20
"""What the block tables of a call's rows may take while they are made: longer steps come in pieces."""


@dataclass(slots=True)
class Known:
    """A call that passed all checks: what another one of its step must have in common with it.

    `query`, `choice`: `form_of` each. `result`: shape, dtype and device of
    the output; `alike`: an empty one is made like the query. `pages`: strides of the cache's pages, and
    pages between blocks, runs and heads. `run` does the call's work.
    """

    query: tuple[Any, ...]
    choice: tuple[Any, ...]
    result: tuple[Any, ...]
    alike: bool
    pages: tuple[Any, ...]
    run: AddressedChoice

    @classmethod
    def of(cls, frame: Frame, pages: tuple[Any, ...], run: AddressedChoice) -> Known:
        query, choice, out = frame.query, frame.choice, frame.out
        assert choice is not None
        result = out.shape, out.dtype, out.device
        alike = query.is_contiguous() and (query.shape, query.dtype) == result[:2]
        return cls(form_of(query), form_of(choice), result, alike, pages, run)


class Piece(Op):
    """Some of a step's tokens: decodes of each token, or of each KV head, over chosen keys.

    `table`, `lens`: the rows' block tables and lengths, which each call writes. `call` is None where the
    host reads the lengths and plans at each call, or where they differ from those of the call before:
    `AttentionBackend.plans_by_lengths`.
    """

    def __init__(
        self,
        planner: Planner,
        batch: Batch,
        tokens: slice,
        table: Tensor | None,
        lens: Tensor,
        call: Call | None = None,
    ):
        self.planner, self.batch, self.tokens = planner, batch, tokens
        if (tokens.start, tokens.stop) != (0, batch.num_tokens):
            self.rows = tokens
        self.table, self.lens, self.call = table, lens, call
        self.last: tuple[list[int], Call] | None = None
        self.chosen: ChosenPages | None = None
        self.run_by: tuple[Call, tuple[Any, ...], Addressed | None] | None = None
        self.chosen_by: tuple[Call, tuple[Any, ...], AddressedChoice | None] | None = None
        self.known: Known | None = None

    @property
    def calls(self) -> tuple[Call, ...]:
        return () if self.call is None else (self.call,)

    def run(self, frame: Frame) -> None:
        spec, sinks = self.planner.group.spec, frame.params.sinks
        out, lse = self.attended(frame)
        lse = None if lse is None else lse.view(-1, spec.num_heads)
        if sinks is not None:
            assert lse is not None
            out, lse = with_sinks(out.view(frame.out.shape), lse, sinks)
        if sinks is not None or not self._is_written_through(frame.out):
            frame.out.copy_(out.view(frame.out.shape))
        if frame.lse is not None and lse is not None:
            frame.lse.copy_(lse)

    def attended(self, frame: Frame) -> tuple[Tensor, Tensor | None]:
        """Return the rows' outputs and, where the layer or its sinks need them, their LSEs."""
        planner, cache, choice = self.planner, frame.cache, frame.choice
        assert cache is not None and choice is not None
        view, steps = cache.in_pages_of(planner.page_size, planner.spec.num_kv_heads)
        assert self.table is not None
        assert isinstance(planner.backend, AttentionBackend)
        chosen = self.chosen
        if chosen is None or chosen.steps != steps:  # caches of other strides
            chosen = self.chosen = ChosenPages(
                planner.group.spec,
                self.batch,
                self.tokens.start,
                planner.heads,
                cache.block_size,
                planner.page_size,
                steps,
                self.table,
                self.lens,
                choice,
            )
        chosen.choice = choice if choice.is_contiguous() else choice.contiguous()
        if self.last and (results := self._at_once(self.last[1], frame, view, chosen)):
            return results
        if not planner.backend.page(chosen):
            self.page(chosen)
        return self.called(self.call or self.planned(self.lens.tolist()), frame, view)

    def planned(self, lens: list[int]) -> Call:
        """Return the call for rows of these lengths."""
        planner = self.planner
        assert isinstance(planner.backend, AttentionBackend)
        if self.last and self.last[0] == lens:
            return self.last[1]
        call = planner.call_of(planner.batch_of(self, lens))
        if planner.backend.plans_by_lengths:
            self.last = lens, call
        return call

    def page(self, chosen: ChosenPages) -> None:
        """Write the rows' block tables and lengths by torch's operators."""
        spec, sparse = chosen.spec, chosen.spec.sparse
        assert sparse is not None and chosen.batch.block_table is not None
        seqs, positions, ends = (each[self.tokens] for each in token_places(self.batch))
        visible = visible_entries(sparse.tokens_per_entry, positions, ends, spec.causal)
        pages, lens = pages_of(
            sparse, chosen.heads, chosen.choice, visible, seqs, chosen.batch.block_table,
            chosen.block_size, chosen.page_size, chosen.steps,
        )  # fmt: skip
        chosen.table[:, : pages.shape[1]].copy_(pages)
        chosen.lens.copy_(lens)

    def called(
        self, call: Call, frame: Frame, cache: KVCache, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the backend's call for the rows, over a view of the cache."""
        spec, scales, lse, out = self.planner.spec, frame.params, self._lse(), frame.out
        shape, query = (self.lens.shape[0], spec.num_heads, spec.v_head_size), frame.query
        params = LayerParams(k_scale=scales.k_scale, v_scale=scales.v_scale)
        if self._is_written_through(out):
            query, strides = self._rows_of(query)
            run = self._addressed(call, strides, cache)
            if run is not None:
                run(query, cache.key, cache.value, params, out, lse)
                return out, lse
            out = out.view(shape)
        else:
            out = out.new_empty(shape)
        query = query.reshape(*shape[:2], spec.head_size)
        call.run(Frame(query, None, None, cache, params, out, lse, places))
        return out, lse

    def _is_written_through(self, out: Tensor) -> bool:
        """Whether a view of an output in other shapes is that output."""
        return self.planner.has_views and out.is_contiguous()

    def _lse(self) -> Tensor | None:
        if not self.planner.spec.needs_lse:
            return None
        shape = len(self.lens), self.planner.spec.num_heads
        return torch.empty(shape, dtype=torch.float32, device=self.lens.device)

    def _rows_of(self, query: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return a query that has rows at even distances, and the strides of rows and heads."""
        spec, (by_token, by_head, by_item) = self.planner.spec, query.stride()
        if query.shape[1] == spec.num_heads and by_item == 1:
            return query, (by_token, by_head)
        # Its rows aren't its tokens.
        return query.contiguous(), (spec.num_heads * spec.head_size, spec.head_size)

    def _addressed(self, call: Call, query: tuple[int, int], cache: KVCache) -> Addressed | None:
        """Return the backend's call by addresses, where it has one; it is made once a plan."""
        strides = query, *cache.strides
        if self.run_by is None or self.run_by[0] is not call or self.run_by[1] != strides:
            run = None
            if isinstance(call.backend, AttentionBackend):
                run = call.backend.addressed_pages(call.plan, _pages(query, cache))
            self.run_by = call, strides, run
        return self.run_by[2]

    def _at_once(
        self, call: Call, frame: Frame, cache: KVCache, chosen: ChosenPages
    ) -> tuple[Tensor, Tensor | None] | None:
        """Page and attend by one call of the backend; None if it has none, or rows have other lengths."""
        if not self._is_written_through(frame.out):
            return None
        query, strides = self._rows_of(frame.query)
        pages, choice = (*cache.strides, chosen.steps), chosen.choice
        form = strides, pages, choice.shape
        if self.chosen_by is None or self.chosen_by[0] is not call or self.chosen_by[1] != form:
            run = call.backend.addressed_choice(call.plan, _pages(strides, cache), chosen)
            self.chosen_by = call, form, run
        run = self.chosen_by[2]
        if run is None:
            return None
        lse = self._lse()
        if not run(query, cache.key, cache.value, frame.params, frame.out, lse, choice):
            return None
        if lse is None and query is frame.query and choice is frame.choice:
            self.known = Known.of(frame, pages, run)
        return frame.out, lse


def _pages(query: tuple[int, int], cache: KVCache) -> PageStrides:
    return PageStrides(query, cache.strides[0][:3], cache.strides[1][:3])


class RowsPiece(Piece):
    """Some of a step's tokens, each over the cache rows that are chosen for all of its heads."""

    def attended(self, frame: Frame) -> tuple[Tensor, Tensor | None]:
        cache, choice = frame.cache, frame.choice
        assert cache is not None and choice is not None and self.call is not None
        spec = self.planner.group.spec
        backend = self.planner.backend
        assert isinstance(backend, SparseBackend)
        places = backend.place(spec, choice, self.batch, cache.block_size, self.tokens.start)
        return self.called(self.call, frame, cache, places)


class SparseStep(StepPlan):
    """A step over chosen keys: the tokens to store, and the pieces to decode."""

    def __init__(self, batch: Batch, before: Store, pieces: list[Piece], planner: Planner):
        super().__init__(planner.group, batch, (before, *pieces))
        self.before, self.pieces, self.planner = before, pieces, planner
        self.alone = pieces[0] if len(pieces) == 1 else None
        spec, heads = self.group.spec, (batch.num_tokens, self.group.spec.num_kv_heads)
        # What a call may bring; entries of several tokens come by `store` alone.
        self._brought: tuple[Any, Any] = None, None
        if spec.sparse is not None and spec.sparse.tokens_per_entry == 1:
            self._brought = (*heads, spec.head_size), (*heads, spec.v_head_size)

    def again(
        self,
        params: LayerParams,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        choice: Tensor | None,
        out: Tensor | None,
    ) -> Tensor | None:
        """Run the step for tensors like those of an earlier call, and return the output.

        None where something differs, or may: all checks are then to be made, and nothing is wrong yet.
        """
        known = None if self.alone is None else self.alone.known
        # A cold call pays for each object that it touches, so this calls few functions.
        if (
            known is None
            or query.__class__ is not Tensor
            or choice is None
            or choice.__class__ is not Tensor
            or (query.shape, query.stride(), query.dtype, query.device) != known.query
            or (choice.shape, choice.stride(), choice.dtype, choice.device) != known.choice
            or query.requires_grad
            or forward_ad._current_level >= 0
            or self._num_blocks > cache.num_blocks
        ):
            return None
        view, steps = cache.in_pages_of(self.planner.page_size, self.planner.spec.num_kv_heads)
        if (*view.strides, steps) != known.pages:
            return None
        if out is None:
            if known.alike:
                out = torch.empty_like(query)
            else:
                out = query.new_empty(known.result[0], dtype=known.result[1])
        elif (
            out.__class__ is not Tensor
            or (out.shape, out.dtype, out.device) != known.result
            or out.requires_grad
            or not out.is_contiguous()
        ):
            return None
        if key is not None or value is not None:
            for each, shape in zip((key, value), self._brought, strict=True):
                if (
                    each.__class__ is not Tensor
                    or (each.shape, each.dtype, each.device) != (shape, query.dtype, query.device)
                    or each.requires_grad
                    or each.stride()[2] != 1
                ):
                    return None
            self.before.run(Frame(query, key, value, cache, params, out, None))
        if known.run(query, view.key, view.value, params, out, None, choice):
            return out
        return None

    def explain(self) -> str:
        spec, batch = self.group.spec, self.batch
        return (
            f"sparse: {batch.num_seqs} sequences, {batch.num_tokens} query tokens, {spec.sparse}: "
            f"{self.planner.name}"
        )


class Planner(StepPlanner):
    """Plans for sparse layers. One backend serves every token, in both phases."""

    def __init__(self, group: LayerGroup):
        self.group = group
        info = group.selection.backend("decode")
        assert info is not None and group.cache_format is not None and group.spec.sparse is not None
        self.name, form, claims = info.name, group.cache_format, info.capabilities
        nhd = form.layout == "NHD" and "NHD" in claims.layouts
        on_accelerator = group.device.is_accelerator
        (self.spec,) = questions(group.spec, "decode", on_accelerator, claims.kinds, nhd)
        self.kind: type[Piece] = Piece if self.spec.latent is None else RowsPiece
        page = sparse_blocks(group.spec)[1]  # a backend of smaller blocks walks several of a page
        self.page_size = claims.block_sizes.divisor_of(page) or page
        of_page = 1 if self.kind is RowsPiece else self.spec.num_kv_heads
        self.form = CacheFormat(
            block_size=self.page_size,
            num_kv_heads=of_page,
            head_size=form.head_size,
            v_head_size=form.v_head_size,
            dtype=form.dtype,
            value_in_key=form.value_in_key,
        )
        self.backend: AttentionBackend | SparseBackend
        if self.kind is Piece:
            self.backend = group.load("decode", info, AttentionBackend, self.spec, self.form)
        else:
            self.backend = group.load("decode", info, SparseBackend, self.spec, form)
        self.store = group.store
        self.rotated_by = claimed_rotation(group, self.store)
        sparse = group.spec.sparse
        rows = group.spec.num_kv_heads // of_page
        self.heads = torch.arange(rows, device=group.torch_device)
        if sparse.scope == "head":
            self.heads = self.heads.repeat_interleave(group.spec.gqa_ratio)
        self.rows = len(self.heads)
        # JAX's tensors have no such views.
        self.has_views = group.torch_device.type not in ALLOCATORS
        self.width = sparse.budget * (sparse.granularity // self.page_size)
        if self.kind is RowsPiece:
            self.width = sparse.most

    def check_cache(self, cache: KVCache) -> None:
        if self.kind is Piece:
            cache.in_pages_of(self.page_size, self.spec.num_kv_heads)
        else:
            check_places(cache)

    def check(self, batch: Batch) -> None:
        spec, assigned = self.group.spec, self.group.cache_format
        assert assigned is not None and spec.sparse is not None
        per_entry = spec.sparse.tokens_per_entry
        batch.check_queries()
        if per_entry == 1 or not spec.sparse.physical:
            batch.check_pages(assigned.block_size, per_entry)
        if per_entry > 1 and batch.slot_mapping is not None:
            raise BatchError(
                "slot_mapping stores a step's tokens, and an entry of this cache stands for "
                f"{per_entry} of them; leave it out, and store entries by store()"
            )
        if batch.block_table is None and batch.num_tokens:
            raise BatchError(
                f"{spec} attends over a cache; the batch has no block_table: pass Batch(block_table=...)"
            )

    def plan(self, batch: Batch) -> SparseStep:
        spec = self.group.spec
        pieces: list[Piece] = []
        most = max(1, TABLE_BYTES // (8 * 4 * self.rows * self.width))
        for first in range(0, batch.num_tokens, most):
            tokens = slice(first, min(first + most, batch.num_tokens))
            pieces.append(self._piece(batch, tokens, pieces))
        before = Store(spec, batch, self.store, self.rotated_by, rotation_of(spec, batch))
        return SparseStep(batch, before, pieces, self)

    def refill(self, step: SparseStep, batch: Batch) -> None:
        """Turn the tokens; the pieces read the step's own tensors, and each call's choice."""
        rotation_of(self.group.spec, batch, step.before.rotation)

    def _piece(self, batch: Batch, tokens: slice, before: list[Piece]) -> Piece:
        rows = (tokens.stop - tokens.start) * self.rows
        if before and len(before[0].lens) == rows:  # one piece after another, over the same buffers
            return self.kind(self, batch, tokens, before[0].table, before[0].lens, before[0].call)
        device, table = batch.device, None
        if self.kind is Piece:
            table = torch.zeros(rows, self.width, dtype=torch.int32, device=device)
        lens = torch.zeros(rows, dtype=torch.int32, device=device)
        piece = self.kind(self, batch, tokens, table, lens)
        if self.spec.length_bounds or self.kind is RowsPiece:
            longest = self.width * self.page_size
            piece.call = self.call_of(self.batch_of(piece, [longest] * rows))
        return piece

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
