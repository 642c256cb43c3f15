"""TRITON_TOKEN_SCAN: recurrences whose every channel has a decay of its own, a token at a time."""

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
)
from torch import Tensor

from polyattn_triton.launch import Launcher, power
from polyattn_triton.scan import ScanPlan, dense
from polyattn_triton.token_kernels import channel_kernel, unit_kernel

Tensors = Mapping[str, Tensor]
UNITS = 64
"""Channels of RG-LRU that a program holds."""
VALUES = 32
"""Value channels that a program holds, each with all keys."""
INPUTS = {
    AttentionKind.KDA: ("q", "k", "v", "g", "beta", "", ""),
    AttentionKind.RWKV7: ("r", "k", "v", "w", "", "a", "b"),
    AttentionKind.PHI_LINEAR: ("q", "k", "v", "", "", "", ""),
}
"""The inputs of `channel_kernel`, in its order, of the kinds that it serves."""
_channel, _unit = Launcher(channel_kernel), Launcher(unit_kernel)


def token_constants(spec: LayerSpec) -> tuple[Any, ...]:
    """Return the constants of `spec`'s kernel, in its order."""
    form = spec.recurrent
    assert form is not None
    if spec.kind is AttentionKind.RG_LRU:
        return spec.num_heads, UNITS
    phi = spec.kind is AttentionKind.PHI_LINEAR
    values = spec.v_head_size + phi  # the normaliser's column is a program's with all values
    block = power(values) if phi else min(VALUES, power(values))
    return (
        spec.num_heads // spec.num_kv_heads, spec.head_size, values, power(spec.head_size), block,
        spec.kind is AttentionKind.KDA, phi, form.feature_map == "relu", form.qk_norm,
    )  # fmt: skip


def token_options(spec: LayerSpec) -> dict[str, int]:
    """Return the launch options of `spec`'s kernel: a wider tile has more warps."""
    if spec.kind is AttentionKind.RG_LRU:
        return {"num_warps": 1}
    return {"num_warps": 8 if spec.kind is AttentionKind.PHI_LINEAR else 4, "num_stages": 1}


class TritonTokenScan(RecurrentBackend):
    """One launch a step, prefill and decode alike."""

    name: ClassVar[str] = "TRITON_TOKEN_SCAN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self._none = torch.empty(0, device=str(device.torch_device))
        self._constants, self._options = token_constants(spec), token_options(spec)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        return ScanPlan(batch)

    def run(
        self, plan: Plan, inputs: Tensors, params: Tensors, states: Tensor, out: Tensor
    ) -> None:
        assert isinstance(plan, ScanPlan)
        if self.spec.kind is AttentionKind.RG_LRU:
            self._units(plan, inputs, params, states, out)
        else:
            self._channels(plan, inputs, states, out)

    def _units(
        self, plan: ScanPlan, inputs: Tensors, params: Tensors, states: Tensor, out: Tensor
    ) -> None:
        given = [dense(inputs[name]) for name in ("x", "input_gate", "recurrent_gate")]
        strides = tuple(tensor.stride(0) for tensor in (*given, out, states))
        _unit(
            (plan.batch.num_seqs, triton.cdiv(self.spec.num_heads, UNITS), 1),
            (*given, params["Lambda"], out, states, plan.starts, plan.seq_lens, plan.slots),
            (), strides, (), self._constants, self._options,
        )  # fmt: skip

    def _channels(self, plan: ScanPlan, inputs: Tensors, states: Tensor, out: Tensor) -> None:
        spec, constants = self.spec, self._constants
        given = [dense(inputs[n]) if n else self._none for n in INPUTS[spec.kind]]
        q, k, v, g, beta, a, b = given
        strides = [s for t in (q, k, v, g, a, b) for s in (*t.stride(), 0)[:2]]
        strides += [beta.stride(0), *out.stride()[:2], *states.stride()[:2]]
        _channel(
            (plan.batch.num_seqs, spec.num_heads, triton.cdiv(constants[2], constants[4])),
            (*given, out, states, plan.starts, plan.seq_lens, plan.slots),
            (spec.scale,), tuple(strides), (), constants, self._options,
        )  # fmt: skip
