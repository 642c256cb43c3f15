"""TORCH_SCAN: every recurrent family in torch, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from polyattn.kernel import (
    AttentionKind,
    Batch,
    Invariance,
    LayerSpec,
    Plan,
    RecurrentBackend,
    RecurrentFrame,
    feature_mod,
)
from torch import Tensor
from torch.nn.functional import conv1d, elu, relu, silu, softplus

from polyattn_cpu.scans import (
    bonus_scan,
    delta_scan,
    first_order,
    gated_scan,
    low_rank_scan,
    selective_scan,
)

Tensors = Mapping[str, Tensor]
Advanced = tuple[Tensor, Tensor]
"""What a token makes: its output, and the state after it."""


VECTORS = 32
"""Elements that torch's loops take at a time: two of the widest vectors."""
ON_ONE_THREAD = 1 << 15
"""Elements up to which torch's loops run on one thread."""


class ScanPlan(Plan):
    """Each sequence's slot, and how many tokens it had before the step; 0: it starts fresh."""

    __slots__ = ("before", "slots")

    def __init__(self, batch: Batch):
        super().__init__(batch)
        assert batch.state_slots is not None
        self.slots = batch.state_slots.tolist()
        self.before = [n - q for n, q in zip(batch.lens, batch.query_lens, strict=True)]


class TorchScan(RecurrentBackend):
    """Prefill one sequence at a time, decode all sequences at once.

    Where bits must not follow from the batch, a sequence at a time alone; where they must not follow from
    steps either, a token at a time. Each is then a copy, so that it lies alike for what vectors load. Of
    RG-LRU, which has no product, tokens of several sequences go together anyway (`_together`).
    """

    name: ClassVar[str] = "TORCH_SCAN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        return ScanPlan(batch)

    def run(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        batch, level = plan.batch, self.spec.batch_invariant
        together = self._together(frame, len(plan.slots))
        singly = [0] * len(plan.slots)  # tokens of each sequence that go one by one
        if level >= Invariance.STEPS:
            singly = batch.query_lens
        elif together > 1 if level else batch.all_decode:
            singly = [int(count == 1) for count in batch.query_lens]
        for at in range(max(singly, default=0)):
            some = [i for i, count in enumerate(singly) if count > at]
            for begin in range(0, len(some), together):
                part = some[begin : begin + together]
                rows = [batch.starts[i] + at for i in part]
                slots, before = [plan.slots[i] for i in part], [plan.before[i] + at for i in part]
                self._tokens(
                    rows, slots, before, frame.inputs, frame.params, frame.states, frame.out
                )
        self._sequences(plan, singly, frame.inputs, frame.params, frame.states, frame.out)

    def _together(self, frame: RecurrentFrame, sequences: int) -> int:
        """Return of how many sequences the next tokens are taken at once.

        At a level, as many as torch's operators compute on one thread, if each token fills their vectors:
        then no element's arithmetic follows from its place.
        """
        if not self.spec.batch_invariant:
            return max(1, sequences)
        width = frame.out[0].numel() if len(frame.out) else 1
        by_element = self.spec.kind is AttentionKind.RG_LRU and width % VECTORS == 0
        return max(1, ON_ONE_THREAD // width) if by_element else 1

    def _sequences(
        self,
        plan: ScanPlan,
        done: list[int],
        inputs: Tensors,
        params: Tensors,
        states: Tensor,
        out: Tensor,
    ) -> None:
        run, starts = SEQUENCES[self.spec.kind], plan.batch.starts
        for index, slot in enumerate(plan.slots):
            rows = slice(starts[index], starts[index + 1])
            if slot < 0 or done[index] or rows.start == rows.stop:
                continue
            state = states[slot]
            if not plan.before[index]:
                state.zero_()
            narrow = state.dtype.itemsize == 2 and self.spec.kind is not AttentionKind.SHORT_CONV
            alone = bool(self.spec.batch_invariant)
            state = state.float() if narrow else state.clone() if alone else state
            part = {name: x[rows].clone() if alone else x[rows] for name, x in inputs.items()}
            if self.spec.kind is AttentionKind.RG_LRU:  # the first token has another formula
                part["fresh"] = out.new_tensor(plan.before[index] == 0, dtype=torch.bool)
            elif _is_ring(self.spec):
                part["before"] = torch.tensor(plan.before[index], device="cpu")
            gate = part.pop("z", None)
            if gate is None:
                run(self.spec, part, params, state, out[rows])
            else:
                y = torch.empty_like(out[rows], dtype=state.dtype)
                run(self.spec, part, params, state, y)
                out[rows] = (y * silu(gate.to(y.dtype))).to(out.dtype)
            if narrow or alone:
                states[slot] = state.to(states.dtype)

    def _tokens(
        self,
        tokens: list[int],
        of_slots: list[int],
        before: list[int],
        inputs: Tensors,
        params: Tensors,
        states: Tensor,
        out: Tensor,
    ) -> None:
        """Advance each slot's state by a token, after so many earlier ones of its sequence."""
        live = [i for i, slot in enumerate(of_slots) if slot >= 0]
        if not live:
            return
        rows = torch.tensor([tokens[i] for i in live], device=out.device)
        slots = torch.tensor([of_slots[i] for i in live], device=out.device)
        begun = torch.tensor([before[i] != 0 for i in live], device=out.device)
        state = states[slots]
        # Not a product: an unused slot may hold NaN.
        state = torch.where(begun.view(-1, *[1] * (state.dim() - 1)), state, 0.0)
        if self.spec.kind is not AttentionKind.SHORT_CONV:
            state = state.to(_compute(states))
        part = {name: tensor[rows].to(_compute(states)) for name, tensor in inputs.items()}
        if self.spec.kind is AttentionKind.RG_LRU:
            part["fresh"] = ~begun
        elif _is_ring(self.spec):
            part["before"] = torch.tensor([before[i] for i in live], device=out.device)
        output, state = TOKENS[self.spec.kind](self.spec, part, params, state)
        if "z" in part:
            output = output * silu(part["z"])
        states[slots] = state.to(states.dtype)
        out[rows] = output.to(out.dtype)


def _is_ring(spec: LayerSpec) -> bool:
    """Whether the state is a convolution's with room for drafts, each input at its position."""
    assert spec.recurrent is not None
    return spec.recurrent.draft_tokens > 0


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
    compute, length, ring = _compute(state), state.shape[1], _is_ring(spec)
    before = int(x["before"]) if ring else 0
    # The oldest input first; a ring has it where the next is to go.
    oldest_first = state.roll(-before, 1) if ring else state
    joined = torch.cat([oldest_first.to(compute), x["x"].T.to(compute)], dim=1)
    weight = params["weight"].to(joined.dtype)
    bias = params.get("bias")
    bias = None if bias is None else bias.to(joined.dtype)
    seen = joined[:, length + 1 - weight.shape[1] :]
    y = conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
    window = joined[:, joined.shape[1] - length :]
    state.copy_(window.roll(before + len(x["x"]), 1) if ring else window)
    out.copy_(_activate(spec, y).T)


def _mamba1_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    x = {name: tensor.to(state.dtype) for name, tensor in x.items()}
    dt = step_size(spec, x["dt"], params)
    y = torch.empty_like(x["x"])
    for index, channels in enumerate(_channels(spec)):
        B, C = (x[name] if x[name].dim() == 2 else x[name][:, index] for name in "BC")
        y[:, channels] = selective_scan(
            x["x"][:, channels], dt[:, channels], params["A"][channels], B, C, state[channels]
        )
    out.copy_(y + params["D"] * x["x"] if "D" in params else y)


def _channels(spec: LayerSpec) -> list[slice]:
    """Return the channels of each of Mamba-1's groups."""
    assert spec.recurrent is not None
    each = spec.num_heads // spec.recurrent.channel_groups
    return [slice(first, first + each) for first in range(0, spec.num_heads, each)]


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
    g = params["decay"].expand(len(x["v"]), -1)
    _grouped_scan(spec, x["q"].to(state.dtype) * spec.scale, x["k"], x["v"], g, state, out)


def _grouped_scan(
    spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, out: Tensor
) -> None:
    """Scan with a state of (heads, K, V), laid out as (groups, K, heads of a group * V)."""
    groups, heads = spec.num_kv_heads, spec.num_heads
    by_key = state.view(groups, heads // groups, *state.shape[1:]).transpose(1, 2)
    # A reshape is a view if there is one key, and would share the state's memory.
    wide = by_key.clone(memory_format=torch.contiguous_format)
    gated_scan(q, k, v, g, wide.flatten(2), out)
    by_key.copy_(wide)


def _rg_lru_terms(x: Tensors, params: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln a, the state's input, and its input at a sequence's first token."""
    log_a = -8.0 * softplus(params["Lambda"]) * torch.sigmoid(x["recurrent_gate"])
    gated = torch.sigmoid(x["input_gate"]) * x["x"]
    return log_a, torch.sqrt(-torch.expm1(2.0 * log_a)) * gated, gated


def _rg_lru_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    fresh = x["fresh"]
    x = {name: tensor.to(state.dtype) for name, tensor in x.items()}
    log_a, enters, gated = _rg_lru_terms(x, params)
    enters[0] = torch.where(fresh, gated[0], enters[0])
    first_order(log_a.exp_(), enters, state)
    out.copy_(enters)
    state.copy_(enters[-1])


def _phi(spec: LayerSpec, tensor: Tensor) -> Tensor:
    assert spec.recurrent is not None
    if (phi := feature_mod(spec)) is not None:
        return phi(tensor)
    return elu(tensor) + 1.0 if spec.recurrent.feature_map == "elu+1" else relu(tensor)


def _phi_inputs(spec: LayerSpec, x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return phi(q), phi(k) and the values with a column of ones, which sums up the weights."""
    one = torch.ones_like(x["v"][..., :1])
    return _phi(spec, x["q"]), _phi(spec, x["k"]), torch.cat([x["v"], one], dim=-1)


def _normalised(read: Tensor) -> Tensor:
    return read[..., :-1] / (read[..., -1:] + 1e-6)


def _phi_linear_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    x = {name: tensor.to(state.dtype) for name, tensor in x.items()}
    q, k, v = _phi_inputs(spec, x)
    read = torch.empty_like(v)
    _grouped_scan(spec, q, k, v, v.new_zeros(v.shape[:2]), state, read)
    out.copy_(_normalised(read))


def _rwkv6_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    r, w, k, v = (x[name].to(state.dtype).transpose(0, 1) for name in "rwkv")
    out.copy_(bonus_scan(r * spec.scale, k, v, w, params["u"], state).transpose(0, 1))


def _rwkv7_sequence(
    spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor
) -> None:
    r, w, k, v, a, b = (x[name].to(state.dtype).transpose(0, 1) for name in "rwkvab")
    out.copy_(low_rank_scan(r * spec.scale, k, v, w, a, b, state).transpose(0, 1))


def _kda_sequence(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor, out: Tensor) -> None:
    x = {name: tensor.to(state.dtype) for name, tensor in x.items()}
    q, k = (t.transpose(0, 1) for t in _delta_keys(spec, x))
    v, g, beta = x["v"].transpose(0, 1), x["g"].transpose(0, 1), x["beta"].T[..., None]
    # The rule reads the decayed state, and writes beta times the difference from it.
    out.copy_(low_rank_scan(q, beta * k, v, g, k * g.exp(), -beta * k, state).transpose(0, 1))


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


def _conv_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    x_row, width = x["x"][..., None], params["weight"].shape[1]
    if _is_ring(spec):
        length = state.shape[2]
        back = torch.arange(1 - width, 1, device=state.device)
        at = ((x["before"][:, None] + back) % length)[:, None].expand(-1, state.shape[1], -1)
        window = torch.cat([state.gather(2, at[..., :-1]).to(x_row.dtype), x_row], dim=2)
        state = state.scatter(2, at[..., -1:], x_row.to(state.dtype))
    else:
        window = torch.cat([state.to(x_row.dtype), x_row], dim=2)
        state = window[..., 1:]
    y = (window * params["weight"]).sum(-1)
    return _activate(spec, y + params["bias"] if "bias" in params else y), state


def _mamba1_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    dt = step_size(spec, x["dt"], params)[..., None]
    # (sequences, 1 or a channel's group's, N)
    B, C = (x[name] if x[name].dim() == 3 else x[name][:, None] for name in "BC")
    if B.shape[1] > 1:
        each = spec.num_heads // B.shape[1]
        B, C = B.repeat_interleave(each, 1), C.repeat_interleave(each, 1)
    state = torch.exp(dt * params["A"]) * state + dt * x["x"][..., None] * B
    y = (state * C).sum(-1)
    return (y + params["D"] * x["x"] if "D" in params else y), state


def _mamba2_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    dt = step_size(spec, x["dt"], params)[..., None]
    each = spec.num_heads // spec.num_kv_heads
    B, C = x["B"].repeat_interleave(each, 1), x["C"].repeat_interleave(each, 1)
    fresh = (dt * x["x"])[..., None] * B[:, :, None]
    state = torch.exp(dt * params["A"][:, None])[..., None] * state + fresh
    y = (state @ C[..., None])[..., 0]
    return (y + params["D"][:, None] * x["x"] if "D" in params else y), state


def _linear_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    each = spec.num_heads // spec.num_kv_heads
    q, k = x["q"].repeat_interleave(each, 1), x["k"].repeat_interleave(each, 1)
    state = params["decay"].exp()[:, None, None] * state + k[..., None] * x["v"][:, :, None]
    return spec.scale * (q[:, :, None] @ state)[:, :, 0], state


def _gdn_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    q, k = _delta_keys(spec, x)
    decay = x["g"].exp()[..., None]  # one a head; KDA: one for each of the key's channels
    state = (decay if decay.dim() == 4 else decay[..., None]) * state
    fresh = x["beta"][..., None] * (x["v"] - (k[:, :, None] @ state)[:, :, 0])
    state = state + k[..., None] * fresh[:, :, None]
    return (q[:, :, None] @ state)[:, :, 0], state


def _rwkv6_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    r, fresh = x["r"][:, :, None], x["k"][..., None] * x["v"][:, :, None]
    read = r @ (state + params["u"][..., None] * fresh)
    return spec.scale * read[:, :, 0], x["w"].exp()[..., None] * state + fresh


def _rwkv7_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    read = x["a"][:, :, None] @ state
    state = x["w"].exp()[..., None] * state + x["b"][..., None] * read
    state = state + x["k"][..., None] * x["v"][:, :, None]
    return spec.scale * (x["r"][:, :, None] @ state)[:, :, 0], state


def _rg_lru_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    log_a, enters, gated = _rg_lru_terms(x, params)
    state = log_a.exp_() * state + torch.where(x["fresh"][:, None], gated, enters)
    return state, state


def _phi_linear_token(spec: LayerSpec, x: Tensors, params: Tensors, state: Tensor) -> Advanced:
    q, k, v = _phi_inputs(spec, x)
    each = spec.num_heads // spec.num_kv_heads
    q, k = q.repeat_interleave(each, 1), k.repeat_interleave(each, 1)
    state = state + k[..., None] * v[:, :, None]
    return _normalised((q[:, :, None] @ state)[:, :, 0]), state


KINDS = AttentionKind
SEQUENCES: dict[AttentionKind, Callable[..., None]] = {
    KINDS.SHORT_CONV: _conv_sequence,
    KINDS.MAMBA1: _mamba1_sequence,
    KINDS.MAMBA2: _mamba2_sequence,
    KINDS.LINEAR: _linear_sequence,
    KINDS.GDN: _gdn_sequence,
    KINDS.KDA: _kda_sequence,
    KINDS.RWKV6: _rwkv6_sequence,
    KINDS.RWKV7: _rwkv7_sequence,
    KINDS.RG_LRU: _rg_lru_sequence,
    KINDS.PHI_LINEAR: _phi_linear_sequence,
}
TOKENS: dict[AttentionKind, Callable[..., Advanced]] = {
    KINDS.SHORT_CONV: _conv_token,
    KINDS.MAMBA1: _mamba1_token,
    KINDS.MAMBA2: _mamba2_token,
    KINDS.LINEAR: _linear_token,
    KINDS.GDN: _gdn_token,
    KINDS.KDA: _gdn_token,
    KINDS.RWKV6: _rwkv6_token,
    KINDS.RWKV7: _rwkv7_token,
    KINDS.RG_LRU: _rg_lru_token,
    KINDS.PHI_LINEAR: _phi_linear_token,
}
