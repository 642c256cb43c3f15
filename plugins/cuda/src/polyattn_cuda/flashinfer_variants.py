"""How does FLASHINFER serve a variant's functions? Its JIT compiles what they are traced to."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionVariant,
    Batch,
    LayerParams,
    LayerSpec,
    Pointwise,
    trace,
    untraceable,
)
from torch import Tensor

from polyattn_cuda.flashinfer_source import NAME, SCALARS, TABLE, declaration


def variant_problem(variant: AttentionVariant) -> str | None:
    """Say why a variant's functions can't be generated, or None."""
    return untraceable(variant, "FlashInfer's JIT", "cuda")


class Functions:
    """A layer's variant, as FlashInfer's JIT compiles it."""

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
        source = declaration(self.trace, self.softmax, kernels)
        said = f"{source}{spec.dtype}{spec.head_size}{spec.v_head_size}"
        name = f"polyattn_{hashlib.sha256(said.encode()).hexdigest()[:20]}"
        return [
            name, kind, kind, kind, torch.int32, spec.head_size, spec.v_head_size, [TABLE], ["int64_t"],
            list(SCALARS), ["double", "double"], NAME, source,
        ]  # fmt: skip

    def given(self, batch: Batch, params: LayerParams) -> tuple[Tensor, float, float]:
        """Return what a wrapper's `run` hands on: the table of inputs, scale and soft cap."""
        inputs = {**batch.inputs, **params.inputs, **self.captured}
        rows = [batch.seq_index.data_ptr(), *self.trace.addresses(inputs)]
        table = torch.tensor(rows, dtype=torch.int64).to(batch.device)
        return table, self.spec.scale, self.spec.logit_soft_cap or 0.0
