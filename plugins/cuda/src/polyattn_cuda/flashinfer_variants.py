"""Functions and masks in FLASHINFER: by its JIT, by its custom masks, or over chosen pages."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionVariant,
    Batch,
    BatchError,
    LayerParams,
    LayerSpec,
    Pointwise,
    over_chosen_pages,
    trace,
    untraceable,
    window_sizes,
)
from torch import Tensor

from polyattn_cuda.flashinfer_source import NAME, Declared
from polyattn_cuda.trace_bounds import INT32

MOST_BITS = 1 << 32
"""The most pairs of a step's queries and keys that a custom mask may have."""


def variant_problem(variant: AttentionVariant) -> str | None:
    """Say why a variant's functions can't be generated, or None."""
    return untraceable(variant, "FlashInfer's JIT", "cuda")


class Functions:
    """A layer's variant, and its step's mask beside it, as FlashInfer's JIT compiles them."""

    def __init__(self, spec: LayerSpec, pointwise: Pointwise, device: torch.device):
        self.spec = spec
        self.trace = trace(pointwise.score_mod, pointwise.mask_mods, pointwise.inputs)
        self.softmax = pointwise.softmax
        self.captured = self.trace.captured(device)

    @classmethod
    def of(cls, spec: LayerSpec, device: torch.device) -> Functions | None:
        """Return a layer's; None where it has no variant."""
        pointwise = Pointwise.of(spec, "cuda") if spec.variant else None
        return None if pointwise is None else cls(spec, pointwise, device)

    @property
    def by_fa3(self) -> bool:
        """Whether its FA3 kernels serve them, which hide no score but by a causal mask."""
        return self.trace.mask is None and self.spec.sliding_window is None

    def jit_args(self, kernels: str) -> list[Any]:
        """Return what wrappers take: the module's name, by its content, its types and its source."""
        spec, kind = self.spec, STORAGE_DTYPES[self.spec.dtype]
        declared = Declared(
            self.trace,
            self.softmax,
            spec.logit_soft_cap is not None,
            spec.sliding_window is not None,
            kernels,
        )
        source = declared.source()
        said = f"{source}{spec.dtype}{spec.head_size}{spec.v_head_size}"
        name = f"polyattn_{hashlib.sha256(said.encode()).hexdigest()[:20]}"
        return [
            name, kind, kind, kind, torch.int32, spec.head_size, spec.v_head_size, *declared.tensors,
            *declared.numbers, NAME, source,
        ]  # fmt: skip

    def given(self, batch: Batch, params: LayerParams) -> tuple[Any, ...]:
        """Return what a wrapper's `run` hands on: tensors, then numbers, as `Declared` names them.

        Raises `BatchError`.
        """
        inputs = {**batch.inputs, **params.inputs, **self.captured()}
        rows = iter(self.trace.addresses(inputs))
        numbers = []
        for name, declared in self.trace.inputs.items():
            next(rows)  # its address
            numbers += [next(rows) for _ in range(2 * len(declared.dims))]
            if max(inputs[name].shape, default=0) >= INT32:
                raise BatchError(
                    f"input {name!r} has shape {tuple(inputs[name].shape)}: FLASHINFER counts a "
                    f"dimension's elements in 32 bits; make it smaller than {INT32} or name TRITON_ATTN"
                )
        tensors = [inputs[name] for name in self.trace.inputs]
        cap = self.spec.logit_soft_cap or 0.0
        return batch.seq_index, *tensors, self.spec.scale, cap, *numbers


class StepMasks:
    """A step's mask beside the layer's own: as bits, or as a list of pages."""

    def __init__(self, spec: LayerSpec, pointwise: Pointwise, block_size: int | None):
        self.spec, self.pointwise, self.block_size = spec, pointwise, block_size

    @classmethod
    def of(cls, spec: LayerSpec, block_size: int | None) -> StepMasks | None:
        """Return a layer's; None where it has no mask, or a variant, which is compiled with it."""
        pointwise = None if spec.mask is None or spec.variant else Pointwise.of(spec)
        return None if pointwise is None else cls(spec, pointwise, block_size)

    def over_chosen(self, batch: Batch) -> Batch | None:
        """Return decodes over the pages that blocks choose, None where a window counts places."""
        spec = self.spec
        if spec.mask != "block_sparse" or spec.sliding_window or spec.length_bounds:
            return None
        if not batch.all_decode:
            return None
        return None if self.block_size is None else over_chosen_pages(batch, self.block_size)

    def bits(self, batch: Batch, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """Return what the step's queries see, bool (pairs,), and which tokens see nothing (tokens,).

        Raises `BatchError`.
        """
        pairs = sum(q * n for q, n in zip(batch.query_lens, batch.lens, strict=True))
        if pairs > MOST_BITS:
            raise BatchError(
                f"a mask of {pairs} pairs of queries and keys: FLASHINFER takes {MOST_BITS} at most; "
                "give the step fewer tokens, or name TRITON_ATTN"
            )
        left, right = window_sizes(spec)
        masks, blind = [], []
        for number, queries, keys in zip(batch.seq_ids, batch.query_lens, batch.lens, strict=True):
            device = batch.device
            query = torch.arange(keys - queries, keys, device=device)[:, None]
            key = torch.arange(keys, device=device)
            head = torch.zeros((), dtype=torch.int64, device=device)
            seen = self.pointwise.visible(
                (torch.tensor(number, device=device), head, query, key), batch.inputs
            )
            assert seen is not None
            seen = seen.expand(queries, keys)
            if spec.causal:
                seen = seen & (key <= query)
            if left >= 0:
                seen = seen & (key >= query - left)
            if right >= 0:
                seen = seen & (key <= query + right)
            masks.append(seen.flatten())
            blind.append(~seen.any(1))
        return torch.cat(masks), torch.cat(blind)
