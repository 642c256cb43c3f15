"""What is the right answer for a recurrence? The published one, a token at a time, in float64.

It can be read beside `polyattn.spec.recurrence`, and shares no code with any backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import elu, relu, silu, softplus

from polyattn.runtime.functions.pointwise import feature_mod
from polyattn.runtime.step.batch import Batch
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of

Tensors = Mapping[str, Tensor]
Advanced = tuple[Tensor, Tensor]
"""What a token makes: its output, and the state after it."""


def scan(
    spec: LayerSpec, inputs: Tensors, params: Tensors, state: Tensor, before: int
) -> tuple[Tensor, Tensor]:
    """Run one sequence, `inputs` (tokens, …), from `state`; returns the output and the new state.

    `before`: tokens that the sequence had already; 0: it begins here, and the state is 0.
    """
    outputs = []
    tokens = next(iter(inputs.values())).shape[0]
    ring = spec.recurrent is not None and spec.recurrent.draft_tokens > 0
    if ring:  # the oldest input first
        state = state.roll(-before, -1)
    for t in range(tokens):
        token = {name: tensor[t] for name, tensor in inputs.items()}
        steps = FIRST_STEPS if before + t == 0 and spec.kind in FIRST_STEPS else STEPS
        output, state = steps[spec.kind](spec, token, params, state)
        outputs.append(output)
    if ring:
        state = state.roll(before + tokens, -1)
    shape = shape_of(spec, form_of(spec).output, tokens)
    return (torch.stack(outputs) if outputs else state.new_zeros(shape)), state


def forward(
    spec: LayerSpec,
    inputs: Tensors,
    params: Tensors,
    states: Tensor,
    batch: Batch,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Run a batch from `states` (slots, …); returns the output and the states afterwards.

    Both in `dtype` on the CPU; a padding row's output is 0. With `batch.state_targets` the states go
    there, a sequence's last or each token's.
    """
    assert batch.state_slots is not None
    inputs = {name: tensor.detach().to("cpu", dtype) for name, tensor in inputs.items()}
    params = {name: tensor.detach().to("cpu", dtype) for name, tensor in params.items()}
    states = states.detach().to("cpu", dtype, copy=True)
    form = form_of(spec)
    output = torch.zeros(shape_of(spec, form.output, batch.num_tokens), dtype=dtype, device="cpu")
    for index, slot in enumerate(batch.state_slots.tolist()):
        rows = slice(batch.starts[index], batch.starts[index + 1])
        if slot < 0 or rows.start == rows.stop:
            continue
        before = batch.lens[index] - batch.query_lens[index]
        state = states[slot] if before else torch.zeros_like(states[slot])
        part = {name: tensor[rows] for name, tensor in inputs.items()}
        if batch.state_targets is None:
            output[rows], states[slot] = scan(spec, part, params, state, before)
            continue
        state, targets = state.clone(), batch.state_targets[index].reshape(-1).tolist()
        for token in range(rows.stop - rows.start):
            one = {name: tensor[token : token + 1] for name, tensor in part.items()}
            at = slice(rows.start + token, rows.start + token + 1)
            output[at], state = scan(spec, one, params, state, before + token)
            if batch.state_targets.dim() == 2:
                states[targets[token]] = state
        if batch.state_targets.dim() == 1:
            states[targets[0]] = state
    return output, states


def _short_conv(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    assert spec.recurrent is not None
    window = torch.cat([state, x["x"][:, None]], dim=1)
    y = (params["weight"] * window[:, -spec.recurrent.conv_width :]).sum(1)
    if "bias" in params:
        y = y + params["bias"]
    return (silu(y) if spec.recurrent.activation == "silu" else y), window[:, 1:]


def _step_size(spec: LayerSpec, dt: Tensor, params: Tensors) -> Tensor:
    assert spec.recurrent is not None
    if "dt_bias" in params:
        dt = dt + params["dt_bias"]
    return softplus(dt) if spec.recurrent.dt_softplus else dt


def _mamba1(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    dt = _step_size(spec, x["dt"], params)[:, None]
    assert spec.recurrent is not None
    B, C = x["B"], x["C"]
    if spec.recurrent.channel_groups > 1:
        each = spec.num_heads // spec.recurrent.channel_groups
        B, C = B.repeat_interleave(each, 0), C.repeat_interleave(each, 0)
    state = torch.exp(dt * params["A"]) * state + dt * B * x["x"][:, None]
    y = (state * C).sum(1)
    y = y + params["D"] * x["x"] if "D" in params else y
    return (y * silu(x["z"]) if spec.recurrent.gated else y), state


def _mamba2(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    dt = _step_size(spec, x["dt"], params)[:, None, None]
    each = spec.num_heads // spec.num_kv_heads
    B, C = (x[name].repeat_interleave(each, 0) for name in "BC")
    decay = torch.exp(dt * params["A"][:, None, None])
    state = decay * state + dt * x["x"][:, :, None] * B[:, None]
    y = torch.einsum("hkn,hn->hk", state, C)
    y = y + params["D"][:, None] * x["x"] if "D" in params else y
    assert spec.recurrent is not None
    return (y * silu(x["z"]) if spec.recurrent.gated else y), state


def _linear(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    each = spec.num_heads // spec.num_kv_heads
    q, k = (x[name].repeat_interleave(each, 0) for name in "qk")
    state = torch.exp(params["decay"])[:, None, None] * state + k[:, :, None] * x["v"][:, None]
    return spec.scale * torch.einsum("hk,hkv->hv", q, state), state


def _gdn(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    assert spec.recurrent is not None
    each = spec.num_heads // spec.num_kv_heads
    q, k = (x[name].repeat_interleave(each, 0) for name in "qk")
    if spec.recurrent.qk_norm:
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    decay = torch.exp(x["g"])
    # One rate a head, or (KDA) one for each of the key's channels.
    state = (decay[:, :, None] if decay.dim() == 2 else decay[:, None, None]) * state
    read = torch.einsum("hk,hkv->hv", k, state)
    state = state + k[:, :, None] * (x["beta"][:, None] * (x["v"] - read))[:, None]
    return spec.scale * torch.einsum("hk,hkv->hv", q, state), state


def _rwkv6(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    fresh = x["k"][:, :, None] * x["v"][:, None]
    seen = state + params["u"][:, :, None] * fresh
    state = torch.exp(x["w"])[:, :, None] * state + fresh
    return spec.scale * torch.einsum("hk,hkv->hv", x["r"], seen), state


def _rwkv7(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    read = torch.einsum("hk,hkv->hv", x["a"], state)
    state = torch.exp(x["w"])[:, :, None] * state
    state = state + x["b"][:, :, None] * read[:, None] + x["k"][:, :, None] * x["v"][:, None]
    return spec.scale * torch.einsum("hk,hkv->hv", x["r"], state), state


def _rg_lru(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    log_a = -8 * softplus(params["Lambda"]) * torch.sigmoid(x["recurrent_gate"])
    root = torch.sqrt(-torch.expm1(2 * log_a))  # 1 - a a, whose digits a close to 1 would cancel
    state = torch.exp(log_a) * state + root * torch.sigmoid(x["input_gate"]) * x["x"]
    return state, state


def _rg_lru_first(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    state = torch.sigmoid(x["input_gate"]) * x["x"]
    return state, state


def _phi_linear(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    assert spec.recurrent is not None
    phi = feature_mod(spec)
    if phi is None:
        phi = (lambda t: elu(t) + 1) if spec.recurrent.feature_map == "elu+1" else relu
    each = spec.num_heads // spec.num_kv_heads
    q, k = (phi(x[name].repeat_interleave(each, 0)) for name in "qk")
    value = torch.cat([x["v"], torch.ones_like(x["v"][:, :1])], 1)
    state = state + k[:, :, None] * value[:, None]
    read = torch.einsum("hk,hkv->hv", q, state)
    return read[:, :-1] / (read[:, -1:] + 1e-6), state


STEPS = {
    AttentionKind.SHORT_CONV: _short_conv,
    AttentionKind.MAMBA1: _mamba1,
    AttentionKind.MAMBA2: _mamba2,
    AttentionKind.LINEAR: _linear,
    AttentionKind.GDN: _gdn,
    AttentionKind.KDA: _gdn,
    AttentionKind.RWKV6: _rwkv6,
    AttentionKind.RWKV7: _rwkv7,
    AttentionKind.RG_LRU: _rg_lru,
    AttentionKind.PHI_LINEAR: _phi_linear,
}
"""What one token does, each as its paper writes it."""
FIRST_STEPS = {AttentionKind.RG_LRU: _rg_lru_first}
"""What a sequence's first token does, where that differs."""
