"""mamba-ssm's selective scan (Mamba-1)."""

from __future__ import annotations

from typing import Any

from polyattn import AttentionKind, PolyattnError, RecurrentSpec
from polyattn.host import recurrence
from torch import Tensor

from polyattn_recurrent.calls import check_inputs, given, widths

__all__ = ["selective_scan_fn"]


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:  # fmt: skip
    """Scan `u`, `delta`, `z` (batch, channels, seqlen), `B`, `C` (batch, [groups,] state size, seqlen).

    `A` (channels, state size). Returns the output, or (output, last state float32).
    """
    if B.dim() not in (3, 4) or C.dim() != B.dim():
        raise PolyattnError(
            f"B {tuple(B.shape)}, C {tuple(C.shape)}: both must be (batch, state size, seqlen), or "
            "(batch, groups, state size, seqlen)"
        )
    tokens = [_tokens(t) for t in (u, delta, B, C)]
    gate = None if z is None else _tokens(z)
    rows, channels, count = u.shape
    out, state = scan(tokens, gate, [count] * rows, A, D, delta_bias, delta_softplus, None)
    out = out.view(rows, count, channels).transpose(1, 2)
    return (out, state) if return_last_state else out


def _tokens(tensor: Tensor) -> Tensor:
    return tensor.movedim(-1, 1).flatten(0, 1)


def scan(
    inputs: list[Tensor], z: Tensor | None, lens: list[int], A: Tensor, D: Tensor | None,
    bias: Tensor | None, softplus: bool, states: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run Mamba-1 over packed x, dt, B and C, gated by `z`; B and C (tokens, [groups,] state size).

    Returns the output and the states afterwards.
    """
    check_inputs(*inputs, z, A, D, bias)
    (x, dt, B, C, *gate), wide = widths(inputs, z)
    groups = B.shape[1] if B.dim() == 3 else 1
    if groups == 1:
        B, C = B.flatten(1), C.flatten(1)
    recurrent = RecurrentSpec(
        state_size=A.shape[1],
        dt_softplus=softplus,
        gated=z is not None,
        channel_groups=groups,
        bc_in_float32=wide,
    )
    out, after = recurrence(
        [x, dt, B, C, *gate], given(A=A, D=D, dt_bias=bias), lens, states,
        kind=AttentionKind.MAMBA1, num_heads=A.shape[0], head_size=1, recurrent=recurrent,
    )  # fmt: skip
    return out.to(inputs[0].dtype), after
