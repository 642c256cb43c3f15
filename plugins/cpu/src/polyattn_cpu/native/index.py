"""NATIVE_INDEX: scores index keys and chooses the best candidates in one call."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    AddressedIndex,
    BatchError,
    CacheFormat,
    Device,
    IndexBackend,
    IndexFrame,
    LayerSpec,
    Plan,
)
from torch import Tensor

from polyattn_cpu.native.attention import DTYPES, TORCH_DTYPES, kernels
from polyattn_cpu.native.library import NativeError, isa

_INDEX = struct.Struct("@4P7qd18if4x")


class NativeIndex(IndexBackend):
    """Scores in float32. The same choice for any threads, and in any batch."""

    name: ClassVar[str] = "NATIVE_INDEX"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.by = isa()
        self._by = self.by.encode()

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        within = frame.within
        if within is not None:
            within = within.int()
            if not within.numel():  # which has no address, as if all counted
                within = torch.full((len(frame.query), 1, 1), -1, dtype=torch.int32, device="cpu")
            if within.stride(2) != 1:
                within = within.contiguous()
        packed, (query, _table, weights) = self._packed(plan, frame, within)
        self._bound(packed, len(frame.keys))(query, frame.keys, weights, frame.out)

    def addressed(self, plan: Plan, frame: IndexFrame) -> AddressedIndex | None:
        packed, held = self._packed(plan, frame)
        theirs = frame.query, plan.batch.block_table, frame.weights
        if any(one is not other for one, other in zip(held, theirs, strict=True)):
            return None  # it is a copy
        return self._bound(packed, len(frame.keys))

    def _bound(self, packed: bytes, blocks: int) -> AddressedIndex:
        """Return the call of a step's `pa_index` for the tensors of any of its layers."""
        library, by, threads = kernels(), self._by, torch.get_num_threads()

        # A cold call pays for each function and object that it touches.
        def run(query: Tensor, keys: Tensor, weights: Tensor | None, out: Tensor) -> None:
            heads = 0 if weights is None else weights.data_ptr()
            at = query.data_ptr(), keys.data_ptr(), heads, out.data_ptr()
            failed = library.pa_choose(by, packed, threads, *at)
            if failed:
                raise self._failure(failed, blocks)

        return run

    def _packed(
        self, plan: Plan, frame: IndexFrame, within: Tensor | None = None
    ) -> tuple[bytes, tuple[Any, ...]]:
        """Return `pa_index`, and the query, the block table and the weights of its form."""
        spec, batch, keys, out = self.spec.indexer, plan.batch, frame.keys, frame.out
        assert spec is not None and batch.block_table is not None
        query, table = frame.query, batch.block_table
        if query.stride(-1) != 1:
            query = query.contiguous()
        if table.stride(-1) != 1:
            table = table.contiguous()
        weights, steps = frame.weights, (0, 0, 0)
        if weights is not None:
            weights = weights.float().contiguous()
        if within is not None:
            steps = within.stride(0), within.stride(1) * (within.shape[1] > 1), within.shape[2]
        blocks, block_size, _ = keys.shape
        scaled, part = spec.cache_dtype == "fp8_scaled", spec.budget
        packed = _INDEX.pack(
            0 if within is None else within.data_ptr(), table.data_ptr(),
            batch.query_start_loc.data_ptr(), batch.seq_lens.data_ptr(),
            *query.stride()[:2], keys.stride(0) * keys.itemsize, blocks, table.stride(0),
            *steps[:2],
            part if isinstance(part, float) else 0.0,
            query.shape[0], batch.num_seqs, spec.num_heads, spec.head_size, *out.shape[1:],
            TORCH_DTYPES[query.dtype], DTYPES["fp8_e4m3"] if scaled else TORCH_DTYPES[keys.dtype],
            block_size, scaled, spec.activation == "relu",
            spec.tokens_per_entry, spec.pool, spec.forced_first, spec.forced_last, spec.tail,
            spec.within or 1, steps[2], spec.scale,
        )  # fmt: skip
        return packed, (query, table, weights)

    def _failure(self, failed: int, blocks: int) -> Exception:
        if failed > 0:
            return BatchError(
                f"block_table points outside the index cache's {blocks} blocks; the tokens of the "
                "sequences that do have no choice"
            )
        return NativeError(
            f"NATIVE_INDEX by {self.by}: there is no memory; let other work end first"
        )
