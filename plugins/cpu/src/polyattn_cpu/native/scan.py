"""Recurrences by the native kernels: a plan per step, a call per layer."""

from __future__ import annotations

import struct
from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionKind,
    Batch,
    BatchError,
    CacheFormat,
    Device,
    LayerSpec,
    Plan,
    RecurrentBackend,
    RecurrentFrame,
)
from torch import Tensor

from polyattn_cpu.native.attention import DTYPES, TORCH_DTYPES, kernels
from polyattn_cpu.native.library import NativeError, isa

KINDS = {
    AttentionKind.SHORT_CONV: 0,
    AttentionKind.MAMBA1: 1,
    AttentionKind.MAMBA2: 2,
    AttentionKind.LINEAR: 3,
    AttentionKind.GDN: 4,
    AttentionKind.KDA: 5,
    AttentionKind.RWKV7: 6,
    AttentionKind.RWKV6: 7,
}
"""`pa_scan_kind` of each."""

PARAMS = {
    AttentionKind.SHORT_CONV: ("weight", "bias"),
    AttentionKind.MAMBA1: ("A", "D", "dt_bias"),
    AttentionKind.MAMBA2: ("A", "D", "dt_bias"),
    AttentionKind.LINEAR: ("decay",),
    AttentionKind.RWKV6: ("u",),
}
"""Parameters in the order in which `pa_scan` takes them."""

_HEAD = struct.Struct("@3q5q4Pq")
_ROWS = struct.Struct("@P3q")
_TAIL = struct.Struct("@3P2P2q3if")
_NO_ROWS = _ROWS.pack(0, 0, 0, 0)


class ScanPlan(Plan):
    """Each sequence's rows, slot and tokens before the step, and of drafts each token's slot, as the
    kernels read them. `highest`: the last of those slots. Raises `BatchError`.
    """

    __slots__ = ("before", "highest", "slots", "starts", "targets")

    def __init__(self, batch: Batch):
        super().__init__(batch)
        assert batch.state_slots is not None
        self.starts = torch.tensor(batch.starts, dtype=torch.int32, device="cpu")
        self.slots = batch.state_slots
        before = [n - q for n, q in zip(batch.lens, batch.query_lens, strict=True)]
        self.before = torch.tensor(before, dtype=torch.int32, device="cpu")
        self.targets, self.highest = batch.state_targets, -1
        if self.targets is not None:
            self.highest = _highest(batch, self.targets.tolist())


class NativeScan(RecurrentBackend):
    """Runs tokens one by one, with a piece of a head's state in the cache, for prefill and decode."""

    name: ClassVar[str] = "NATIVE_SCAN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.by = isa()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        return ScanPlan(batch)

    def run(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        inputs, params, states = frame.inputs, frame.params, frame.states
        spec = self.spec
        rows = b"".join(map(_rows, inputs.values())) + _NO_ROWS * (6 - len(inputs))
        weights = [params.get(name) for name in PARAMS.get(spec.kind, ())]
        whole = [None if weight is None else weight.contiguous() for weight in weights]
        pointers = [0 if weight is None else weight.data_ptr() for weight in whole]
        form = spec.recurrent
        assert form is not None
        if plan.highest >= states.shape[0]:
            raise BatchError(
                f"state_targets goes up to {plan.highest}: there are {states.shape[0]} slots"
            )
        goals = (0, 0) if plan.targets is None else (plan.targets.data_ptr(), plan.targets.shape[1])
        packed = (
            _HEAD.pack(
                KINDS[spec.kind], DTYPES[spec.dtype], TORCH_DTYPES[states.dtype],
                len(plan.slots), *_sizes(spec, states),
                plan.starts.data_ptr(), plan.slots.data_ptr(), plan.before.data_ptr(),
                *goals,
            )
            + rows
            + _TAIL.pack(
                *pointers, *[0] * (3 - len(pointers)), states.data_ptr(), frame.out.data_ptr(),
                states.shape[0], states.stride(0),
                form.dt_softplus, form.qk_norm, form.activation == "silu", spec.scale,
            )
        )  # fmt: skip
        failed = kernels().pa_scan_step(self.by.encode(), packed, torch.get_num_threads())
        if failed > 0:
            at = failed - 1
            raise BatchError(
                f"state_slots[{plan.batch.seq_ids[at]}]={int(plan.slots[at])} is out of range: there are "
                f"{states.shape[0]} slots, and -1 is a padding row"
            )
        if failed:
            raise NativeError(
                f"NATIVE_SCAN by {self.by}: there is no memory for its scratch; let other work end first"
            )


def _rows(tensor: Tensor) -> bytes:
    """Return `pa_rows` of (tokens, heads, size) or (tokens, heads)."""
    return _ROWS.pack(
        tensor.data_ptr(), tensor.stride(0), tensor.stride(1), TORCH_DTYPES[tensor.dtype]
    )


def _highest(batch: Batch, targets: list[list[int]]) -> int:
    """Return the last slot that a token's state goes to, -1 without any. Raises `BatchError`."""
    assert batch.state_slots is not None
    highest, slots = -1, batch.state_slots.tolist()
    for index, (row, slot, count) in enumerate(zip(targets, slots, batch.query_lens, strict=True)):
        mine = row[:count] if slot >= 0 else []
        if mine and min(mine) < 0:
            raise BatchError(
                f"state_targets[{index}, {mine.index(min(mine))}]={min(mine)}: each of the sequence's "
                f"{count} tokens needs a slot"
            )
        highest = max([highest, *mine])
    return highest


def _sizes(spec: LayerSpec, states: Tensor) -> tuple[int, int, int, int]:
    """Return heads, groups, and rows and columns of a head's state; a convolution's rows are the inputs
    that a token reads.
    """
    heads, groups, form = spec.num_heads, spec.num_kv_heads, spec.recurrent
    assert form is not None
    rows = states.shape[2] if states.dim() == 4 else 1
    if spec.kind is AttentionKind.SHORT_CONV:
        rows = form.conv_width - 1
    return heads, groups, rows, states.shape[-1]
