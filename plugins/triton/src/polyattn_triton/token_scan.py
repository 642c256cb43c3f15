"""TRITON_TOKEN_SCAN: RG-LRU, and linear attention with a normaliser, a token at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    AttentionKind,
    Batch,
    CacheFormat,
    Device,
    LayerSpec,
    Plan,
    RecurrentBackend,
    RecurrentFrame,
)
from torch import Tensor

from polyattn_triton.channels import by_token, channel_constants, given_inputs
from polyattn_triton.kernels.token import unit_kernel
from polyattn_triton.launch import Launcher
from polyattn_triton.scan import ScanPlan, dense

Tensors = Mapping[str, Tensor]
UNITS = 64
"""Channels of RG-LRU that a program holds."""
_unit = Launcher(unit_kernel)


def token_constants(spec: LayerSpec, drafts: bool = False) -> tuple[Any, ...]:
    """Return the constants of `spec`'s kernel, in its order. `drafts`: each token's state is kept."""
    if spec.kind is AttentionKind.RG_LRU:
        return spec.num_heads, UNITS, drafts
    return channel_constants(spec, drafts)


def token_options(spec: LayerSpec) -> dict[str, int]:
    """Return the launch options of `spec`'s kernel: a wider tile has more warps."""
    if spec.kind is AttentionKind.RG_LRU:
        return {"num_warps": 1}
    return {"num_warps": 8, "num_stages": 1}


class TritonTokenScan(RecurrentBackend):
    """One launch a step, prefill and decode alike."""

    name: ClassVar[str] = "TRITON_TOKEN_SCAN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self._none = torch.empty(0, device=str(device.torch_device))
        self._options = token_options(spec)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        return ScanPlan(batch)

    def run(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        if self.spec.kind is AttentionKind.RG_LRU:
            self._units(plan, frame.inputs, frame.params, frame.states, frame.out)
        else:
            meta = (plan.starts, plan.seq_lens, plan.slots)
            tensors = given_inputs(self.spec, frame.inputs, self._none)
            by_token(self.spec, tensors, frame.out, frame.states, meta, self._options, plan.targets)

    def _units(
        self, plan: ScanPlan, inputs: Tensors, params: Tensors, states: Tensor, out: Tensor
    ) -> None:
        tensors = [dense(inputs[name]) for name in ("x", "input_gate", "recurrent_gate")]
        to, each = plan.goal
        strides = (*[tensor.stride(0) for tensor in (*tensors, out, states)], each)
        _unit(
            (plan.batch.num_seqs, triton.cdiv(self.spec.num_heads, UNITS), 1),
            (*tensors, params["Lambda"], out, states, plan.starts, plan.seq_lens, plan.slots, to),
            (),
            strides,
            (),
            token_constants(self.spec, plan.targets is not None),
            self._options,
        )
