"""How does FLASHINFER serve a variant's functions? Its JIT compiles what they are traced to."""

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
    trace,
    untraceable,
)

from polyattn_cuda.flashinfer_source import NAME, Declared
from polyattn_cuda.trace_bounds import INT32


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
            self.trace, self.softmax, spec.logit_soft_cap is not None,
            spec.sliding_window is not None, kernels,
        )  # fmt: skip
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
        inputs = {**batch.inputs, **params.inputs, **self.captured}
        rows = iter(self.trace.addresses(inputs))
        numbers = []
        for name, declared in self.trace.inputs.items():
            next(rows)  # its address
            numbers += [next(rows) for _ in range(2 * len(declared.dims))]
            if max(inputs[name].shape, default=0) >= INT32:
                raise BatchError(
                    f"input {name!r} has shape {tuple(inputs[name].shape)}: FLASHINFER counts a "
                    f"dimension's elements in 32 bits; give it fewer than {INT32} or name TRITON_ATTN"
                )
        tensors = [inputs[name] for name in self.trace.inputs]
        cap = self.spec.logit_soft_cap or 0.0
        return batch.seq_index, *tensors, self.spec.scale, cap, *numbers
