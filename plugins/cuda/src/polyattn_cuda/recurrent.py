"""FLA, FLA_CHANNELS, MAMBA_SSM and CAUSAL_CONV1D: libraries' recurrent kernels over our state slots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from typing import ClassVar

import torch
from polyattn.kernel import AttentionKind, Batch, Plan, RecurrentBackend, RecurrentFrame
from torch import Tensor

Tensors = Mapping[str, Tensor]


class SlotPlan(Plan):
    """Which sequences take part: padding rows and empty queries don't, nor does any read their slots.

    `rows` int64: the tokens that take part, None for all. `starts` int64 (taken + 1,) on the device;
    `slots`, `begun` (taken,): where each one's state is, and whether it continues from it.
    """

    __slots__ = ("begun", "lens", "rows", "slots", "starts")

    def __init__(self, batch: Batch):
        super().__init__(batch)
        assert batch.state_slots is not None
        live = [i for i, n in enumerate(batch.lens) if n and batch.query_lens[i]]
        self.lens = [batch.query_lens[i] for i in live]
        self.starts = torch.tensor([0, *accumulate(self.lens)], device=batch.device)
        rows = [batch.starts[i] + t for i in live for t in range(batch.query_lens[i])]
        whole = len(rows) == batch.num_tokens
        self.rows = None if whole else torch.tensor(rows, device=batch.device)
        self.slots = batch.state_slots[torch.tensor(live, dtype=torch.int64, device=batch.device)]
        begun = [batch.lens[i] > batch.query_lens[i] for i in live]
        self.begun = torch.tensor(begun, dtype=torch.bool, device=batch.device)

    def take(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the inputs without padding rows."""
        if self.rows is None:
            return dict(inputs)
        return {name: tensor[self.rows] for name, tensor in inputs.items()}

    def initial(self, states: Tensor) -> Tensor:
        """Return each sequence's state, zero where it starts fresh."""
        initial = states[self.slots]
        # Not a product: an unused slot may hold NaN.
        return torch.where(self.begun.view(-1, *[1] * (initial.dim() - 1)), initial, 0.0)

    def put(self, frame: RecurrentFrame, result: Tensor) -> None:
        """Write the output of the tokens that take part."""
        if self.rows is None:
            frame.set_out(result)
        else:
            frame.out[self.rows] = result.to(frame.out.dtype)


class SlotStates(RecurrentBackend):
    """Gathers the states that a step continues, and scatters the new ones."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> SlotPlan:
        return SlotPlan(batch)

    def run(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        if plan.lens:
            call = self.decode if plan.batch.all_decode else self.prefill
            call(plan, frame)

    @abstractmethod
    def prefill(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        """Run sequences of any number of tokens."""

    @abstractmethod
    def decode(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        """Run sequences of one token each."""


FORGOTTEN = -104.0
"""Of a log decay: e^-104 is 0 in float32. Sums of less lose digits; infinity less itself is NaN."""


def step_size(dt: Tensor, params: Tensors, softplus: bool) -> Tensor:
    """Return Mamba's step size, float32."""
    dt = dt.float() + params["dt_bias"] if "dt_bias" in params else dt.float()
    return torch.nn.functional.softplus(dt) if softplus else dt


class FlashLinearAttention(SlotStates):
    """fla's chunked and recurrent kernels; states (heads, K, V)."""

    name: ClassVar[str] = "FLA"

    def prefill(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        run = self._delta if self.spec.kind is AttentionKind.GDN else self._gated
        x, initial = plan.take(frame.inputs), plan.initial(frame.states)
        result, frame.states[plan.slots] = run(plan, x, frame.params, initial)
        plan.put(frame, result)

    decode = prefill

    def _gated(
        self, plan: SlotPlan, x: Tensors, params: Tensors, initial: Tensor
    ) -> tuple[Tensor, Tensor]:
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

        q, k, v = x["q"], x["k"], x["v"]
        if self.spec.gqa_ratio > 1:
            q, k = (t.repeat_interleave(self.spec.gqa_ratio, 1) for t in (q, k))
        call = fused_recurrent_simple_gla if plan.batch.all_decode else chunk_simple_gla
        result, final = call(
            q=q[None], k=k[None], v=v[None], g=params["decay"].expand(1, len(v), -1).contiguous(),
            scale=self.spec.scale, initial_state=initial, output_final_state=True,
            cu_seqlens=plan.starts,
        )  # fmt: skip
        return result[0], final

    def _delta(
        self, plan: SlotPlan, x: Tensors, params: Tensors, initial: Tensor
    ) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import (
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )

        assert self.spec.recurrent is not None
        call, g = fused_recurrent_gated_delta_rule, x["g"][None].float()
        if not plan.batch.all_decode:  # chunks take differences of sums
            call, g = chunk_gated_delta_rule, g.clamp(min=FORGOTTEN)
        result, final = call(
            q=x["q"][None], k=x["k"][None], v=x["v"][None], g=g,
            beta=x["beta"][None], scale=self.spec.scale, initial_state=initial,
            output_final_state=True, use_qk_l2norm_in_kernel=self.spec.recurrent.qk_norm,
            cu_seqlens=plan.starts,
        )  # fmt: skip
        return result[0], final


class FlashLinearChannels(SlotStates):
    """fla's kernels where each key channel has a decay of its own; states (heads, K, V)."""

    name: ClassVar[str] = "FLA_CHANNELS"

    def prefill(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from fla.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7

        spec, decode = self.spec, plan.batch.all_decode
        assert spec.recurrent is not None
        tensors = {name: tensor[None] for name, tensor in plan.take(frame.inputs).items()}
        options: dict[str, bool] = {}
        if spec.kind is AttentionKind.KDA:
            call = fused_recurrent_kda if decode else chunk_kda
            tensors["g"] = tensors["g"].float()
            options["use_qk_l2norm_in_kernel"] = spec.recurrent.qk_norm
        else:
            call = fused_recurrent_rwkv7 if decode else chunk_rwkv7
        if not decode:
            rate = "g" if "g" in tensors else "w"
            tensors[rate] = tensors[rate].clamp(min=FORGOTTEN)
        result, final = call(
            **tensors,
            scale=spec.scale,
            initial_state=plan.initial(frame.states),
            output_final_state=True,
            cu_seqlens=plan.starts,
            **options,
        )
        frame.states[plan.slots] = final
        plan.put(frame, result[0])

    decode = prefill


class MambaSSM(SlotStates):
    """mamba-ssm's Mamba-2 kernels: sequences of one length in one call."""

    name: ClassVar[str] = "MAMBA_SSM"

    def prefill(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        assert self.spec.recurrent is not None
        params, states = frame.params, frame.states
        x, initial = plan.take(frame.inputs), plan.initial(states)
        # Within a chunk it takes exp(min(0, .)) of what lies between two tokens: none may grow. A
        # negative step counts as 0.
        soft = self.spec.recurrent.dt_softplus
        negative = not soft and bool((step_size(x["dt"], params, softplus=False) < 0).any())
        if negative or bool((params["A"] > 0).any()):
            plan.put(frame, self._by_token(plan, x, params, states))
            return
        result = torch.empty_like(x["x"])
        for first, last, length in _runs(plan.lens):
            rows = slice(int(sum(plan.lens[:first])), int(sum(plan.lens[:last])))
            part = {n: t[rows].unflatten(0, (last - first, length)) for n, t in x.items()}
            output, final = mamba_chunk_scan_combined(
                part["x"], part["dt"], params["A"], part["B"], part["C"], CHUNK, D=params.get("D"),
                dt_bias=params.get("dt_bias"), initial_states=initial[first:last],
                dt_softplus=self.spec.recurrent.dt_softplus, return_final_states=True,
            )  # fmt: skip
            result[rows] = output.flatten(0, 1)
            states[plan.slots[first:last]] = final.to(states.dtype)
        plan.put(frame, result)

    def decode(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        states = frame.states
        states[plan.slots] = plan.initial(states)
        x = plan.take(frame.inputs)
        plan.put(frame, self._update(x, frame.params, states, plan.slots))

    def _by_token(self, plan: SlotPlan, x: Tensors, params: Tensors, states: Tensor) -> Tensor:
        """Run sequences of any number of tokens, the n-th of all of them in one call."""
        states[plan.slots] = plan.initial(states)
        result = torch.empty_like(x["x"])
        starts = [0, *accumulate(plan.lens)]
        for step in range(max(plan.lens)):
            live = [i for i, length in enumerate(plan.lens) if length > step]
            rows = torch.tensor([starts[i] + step for i in live], device=result.device)
            slots = plan.slots[torch.tensor(live, device=plan.slots.device)]
            result[rows] = self._update({n: t[rows] for n, t in x.items()}, params, states, slots)
        return result

    def _update(self, x: Tensors, params: Tensors, states: Tensor, slots: Tensor) -> Tensor:
        """Run one token of each sequence; `states` at `slots` become those after it."""
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        assert self.spec.recurrent is not None
        spec, recurrent = self.spec, self.spec.recurrent
        shape = (spec.num_heads, spec.head_size, recurrent.state_size)

        def wide(name: str) -> Tensor | None:
            result = params.get(name)
            return None if result is None else result[:, None].expand(shape[:2])

        result: Tensor = selective_state_update(
            states, x["x"], x["dt"][..., None].expand(-1, -1, spec.head_size),
            params["A"][:, None, None].expand(shape), x["B"], x["C"], D=wide("D"),
            dt_bias=wide("dt_bias"), dt_softplus=recurrent.dt_softplus,
            state_batch_indices=slots.int(),
        )  # fmt: skip
        return result


CHUNK = 256
"""Tokens of a chunk, as Mamba-2's own models have it."""


def _runs(lens: list[int]) -> list[tuple[int, int, int]]:
    """Return (first, last, length) of neighbours of one length."""
    runs: list[tuple[int, int, int]] = []
    for index, length in enumerate(lens):
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], index + 1, length)
        else:
            runs.append((index, index + 1, length))
    return runs


class CausalConv1d(SlotStates):
    """causal-conv1d's kernels: sequences of one length in one call, channels last."""

    name: ClassVar[str] = "CAUSAL_CONV1D"

    def prefill(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        from causal_conv1d import causal_conv1d_fn

        x, initial = plan.take(frame.inputs)["x"], plan.initial(frame.states)
        x = x.contiguous() if x.stride(0) % 8 else x  # the kernel reads 8 channels at once
        result = torch.empty_like(x)
        assert self.spec.recurrent is not None
        for first, last, length in _runs(plan.lens):
            rows = slice(int(sum(plan.lens[:first])), int(sum(plan.lens[:last])))
            part = x[rows].unflatten(0, (last - first, length)).transpose(1, 2)
            # Both states channels last, as the kernel wants them beside such an input.
            before = initial[first:last].transpose(1, 2).contiguous().transpose(1, 2)
            output, final = causal_conv1d_fn(
                part,
                frame.params["weight"].to(x.dtype),
                _bias(frame.params, x),
                initial_states=before,
                return_final_states=True,
                activation=self.spec.recurrent.activation,
            )
            result[rows] = output.transpose(1, 2).flatten(0, 1)
            frame.states[plan.slots[first:last]] = final
        plan.put(frame, result)

    def decode(self, plan: SlotPlan, frame: RecurrentFrame) -> None:
        from causal_conv1d import causal_conv1d_update

        assert self.spec.recurrent is not None
        x, state = plan.take(frame.inputs)["x"], plan.initial(frame.states)
        result = causal_conv1d_update(
            x,
            state,
            frame.params["weight"].to(x.dtype),
            _bias(frame.params, x),
            activation=self.spec.recurrent.activation,
        )
        frame.states[plan.slots] = state
        plan.put(frame, result)


def _bias(params: Tensors, x: Tensor) -> Tensor | None:
    bias = params.get("bias")
    return None if bias is None else bias.to(x.dtype)
