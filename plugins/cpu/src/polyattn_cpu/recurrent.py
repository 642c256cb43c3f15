"""TORCH_SCAN: every recurrent family in torch, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from polyattn.kernel import AttentionKind, Batch, LayerSpec, Plan, RecurrentBackend
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from polyattn_cpu.scans import delta_scan, gated_scan, selective_scan

Tensors = Mapping[str, Tensor]


class ScanPlan(Plan):
    """Each sequence's slot, and whether it starts fresh."""

    __slots__ = ("fresh", "slots")

    def __init__(self, batch: Batch):
        super().__init__(batch)
        assert batch.state_slots is not None
        self.slots = batch.state_slots.tolist()
        self.fresh = [n == q for n, q in zip(batch.lens, batch.query_lens, strict=True)]


class TorchScan(RecurrentBackend):
    """Prefill one sequence at a time, decode all sequences at once."""

    name: ClassVar[str] = "TORCH_SCAN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        return ScanPlan(batch)

    def run(
        self, plan: Plan, inputs: Tensors, params: Tensors, states: Tensor, out: Tensor
    ) -> None:
        assert isinstance(plan, ScanPlan)
        if plan.batch.all_decode:
            self._tokens(plan, inputs, params, states, out)
        else:
            self._sequences(plan, inputs, params, states, out)

    def _sequences(
        self, plan: ScanPlan, inputs: Tensors, params: Tensors, states: Tensor, out: Tensor
    ) -> None:
        run, starts = SEQUENCES[self.spec.kind], plan.batch.starts
        for index, slot in enumerate(plan.slots):
            rows = slice(starts[index], starts[index + 1])
            if slot < 0 or rows.start == rows.stop:
                continue
            state = states[slot]
            if plan.fresh[index]:
                state.zero_()
            part = {name: tensor[rows] for name, tensor in inputs.items()}
            run(self.spec, part, params, state, out[rows])

    def _tokens(
        self, plan: ScanPlan, inputs: Tensors, params: Tensors, states: Tensor, out: Tensor
    ) -> None:
        live = [i for i, slot in enumerate(plan.slots) if slot >= 0]
        if not live:
            return
        rows = torch.tensor(live, device=out.device)
        slots = torch.tensor([plan.slots[i] for i in live], device=out.device)
        begun = torch.tensor([not plan.fresh[i] for i in live], device=out.device)
        state = states[slots]
        # Not a product: an unused slot may hold NaN.
        state = torch.where(begun.view(-1, *[1] * (state.dim() - 1)), state, 0.0)
        part = {name: tensor[rows].to(_compute(states)) for name, tensor in inputs.items()}
        output, state = TOKENS[self.spec.kind](self.spec, part, params, state)
        states[slots] = state.to(states.dtype)
        out[rows] = output.to(out.dtype)


def _compute(states: Tensor) -> torch.dtype:
    """The dtype of the arithmetic; a convolution's state is in the layer's own."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


def step_size(spec: LayerSpec, dt: Tensor, params: Tensors) -> Tensor:
    """Return Mamba's step size."""
    assert spec.recurrent is not None
    if "dt_bias" in params:
        dt = dt + params["dt_bias"]
    return softplus(dt) if spec.recurrent.dt_softplus else dt


def unit(tensor: Tensor) -> Tensor:
    """Scale the last dimension to length 1, as delta-rule models do."""
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6)


def _activate(spec: LayerSpec, y: Tensor) -> Tensor:
    assert spec.recurrent is not None
    return silu(y) if spec.recurrent.activation == "silu" else y


def _conv_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    compute = _compute(state)
    joined = torch.cat([state.to(compute), x["x"].T.to(compute)], dim=1)
    weight = params["weight"].to(joined.dtype)
    bias = params.get("bias")
    y = conv1d(
        joined[None], weight[:, None], None if bias is None else bias.to(joined.dtype),
        groups=len(weight),
    )[0]  # fmt: skip
    state.copy_(joined[:, joined.shape[1] - state.shape[1] :])
    out.copy_(_activate(spec, y).T)


def _mamba1_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    x = {name: tensor.to(state.dtype) for name, tensor in x.items()}
    dt = step_size(spec, x["dt"], params)
    y = selective_scan(x["x"], dt, params["A"], x["B"], x["C"], state)
    out.copy_(y + params["D"] * x["x"] if "D" in params else y)


def _mamba2_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    dt = step_size(spec, x["dt"].to(state.dtype), params)
    groups = spec.num_kv_heads
    # (heads, V, K) as (groups, K, heads of a group * V)
    wide = state.view(groups, -1, state.shape[2]).transpose(1, 2).contiguous()
    gated_scan(x["C"], x["B"], x["x"], dt * params["A"], wide, out, dt, params.get("D"))
    state.view(groups, -1, state.shape[2]).copy_(wide.transpose(1, 2))


def _linear_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    groups, heads = spec.num_kv_heads, spec.num_heads
    shape = (groups, heads // groups, *state.shape[1:])
    wide = state.view(shape).transpose(1, 2).reshape(groups, state.shape[1], -1)
    g = params["decay"].expand(len(x["v"]), -1)
    gated_scan(x["q"].to(state.dtype) * spec.scale, x["k"], x["v"], g, wide, out)
    back = wide.view(groups, state.shape[1], heads // groups, -1).transpose(1, 2)
    state.copy_(back.reshape(state.shape))


def _gdn_sequence(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor) -> None:
    x = {name: tensor.to(state.dtype) for name, tensor in x.items()}
    q, k = _delta_keys(spec, x)
    v, g, beta = x["v"].transpose(0, 1), x["g"].T, x["beta"].T
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    out.copy_(delta_scan(q, k, v, g, beta, state).transpose(0, 1))


def _delta_keys(spec: LayerSpec, x: Tensors) -> tuple[Tensor, Tensor]:
    assert spec.recurrent is not None
    q, k = x["q"], x["k"]
    if spec.recurrent.qk_norm:
        q, k = unit(q), unit(k)
    each = spec.num_heads // spec.num_kv_heads
    return q.repeat_interleave(each, 1) * spec.scale, k.repeat_interleave(each, 1)


def _conv_token(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor
) -> tuple[Tensor, Tensor]:
    window = torch.cat([state.to(x["x"].dtype), x["x"][..., None]], dim=2)
    y = (window * params["weight"]).sum(-1)
    return _activate(spec, y + params["bias"] if "bias" in params else y), window[..., 1:]


def _mamba1_token(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor
) -> tuple[Tensor, Tensor]:
    dt = step_size(spec, x["dt"], params)[..., None]
    state = torch.exp(dt * params["A"]) * state + dt * x["x"][..., None] * x["B"][:, None]
    y = (state @ x["C"][..., None])[..., 0]
    return (y + params["D"] * x["x"] if "D" in params else y), state


def _mamba2_token(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor
) -> tuple[Tensor, Tensor]:
    dt = step_size(spec, x["dt"], params)[..., None]
    each = spec.num_heads // spec.num_kv_heads
    B, C = x["B"].repeat_interleave(each, 1), x["C"].repeat_interleave(each, 1)
    fresh = (dt * x["x"])[..., None] * B[:, :, None]
    state = torch.exp(dt * params["A"][:, None])[..., None] * state + fresh
    y = (state @ C[..., None])[..., 0]
    return (y + params["D"][:, None] * x["x"] if "D" in params else y), state


def _linear_token(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor
) -> tuple[Tensor, Tensor]:
    each = spec.num_heads // spec.num_kv_heads
    q, k = x["q"].repeat_interleave(each, 1), x["k"].repeat_interleave(each, 1)
    state = params["decay"].exp()[:, None, None] * state + k[..., None] * x["v"][:, :, None]
    return spec.scale * (q[:, :, None] @ state)[:, :, 0], state


def _gdn_token(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = _delta_keys(spec, x)
    state = x["g"].exp()[..., None, None] * state
    fresh = x["beta"][..., None] * (x["v"] - (k[:, :, None] @ state)[:, :, 0])
    state = state + k[..., None] * fresh[:, :, None]
    return (q[:, :, None] @ state)[:, :, 0], state


KINDS = AttentionKind
SEQUENCES: dict[AttentionKind, Callable[..., None]] = {
    KINDS.SHORT_CONV: _conv_sequence,
    KINDS.MAMBA1: _mamba1_sequence,
    KINDS.MAMBA2: _mamba2_sequence,
    KINDS.LINEAR: _linear_sequence,
    KINDS.GDN: _gdn_sequence,
}
TOKENS: dict[AttentionKind, Callable[..., tuple[Tensor, Tensor]]] = {
    KINDS.SHORT_CONV: _conv_token,
    KINDS.MAMBA1: _mamba1_token,
    KINDS.MAMBA2: _mamba2_token,
    KINDS.LINEAR: _linear_token,
    KINDS.GDN: _gdn_token,
}
