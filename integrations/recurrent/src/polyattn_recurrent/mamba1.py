"""mamba-ssm's selective scan (Mamba-1)."""

from __future__ import annotations

from typing import Any

from polyattn import AttentionKind, PolyattnError
from polyattn.families.recurrent.function import recurrence
from polyattn.spec.layer import RecurrentSpec
from torch import Tensor

from polyattn_recurrent.calls import gated, given, refuse_gradients

__all__ = ["selective_scan_fn"]


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:  # fmt: skip
    """Scan `u`, `delta`, `z` (batch, channels, seqlen), `B`, `C` (batch, state size, seqlen).

    `A` (channels, state size). Returns the output, or (output, last state float32).
    """
    if B.dim() != 3 or C.dim() != 3:
        raise PolyattnError(
            f"B {tuple(B.shape)}, C {tuple(C.shape)}: they are (batch, state, seqlen)"
        )
    tokens = [_tokens(t) for t in (u, delta.float(), B.to(u.dtype), C.to(u.dtype))]
    rows, channels, count = u.shape
    out, state = scan(tokens, [count] * rows, A, D, delta_bias, delta_softplus, None)
    out = gated(out.view(rows, count, channels).transpose(1, 2), z)
    return (out, state) if return_last_state else out


def _tokens(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1])


def scan(
    inputs: list[Tensor], lens: list[int], A: Tensor, D: Tensor | None, bias: Tensor | None,
    softplus: bool, states: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run Mamba-1 over packed x, dt, B and C. Returns the output and the states afterwards."""
    refuse_gradients(*inputs, A, D, bias)
    recurrent = RecurrentSpec(state_size=A.shape[1], dt_softplus=softplus)
    return recurrence(
        inputs, given(A=A, D=D, dt_bias=bias), lens, states, kind=AttentionKind.MAMBA1,
        num_heads=A.shape[0], head_size=1, recurrent=recurrent,
    )  # fmt: skip
