"""mamba-ssm's chunked scan (Mamba-2)."""

from __future__ import annotations

from typing import Any

from polyattn import AttentionKind, RecurrentSpec
from polyattn.host import recurrence, refuse
from torch import Tensor

from polyattn_recurrent.calls import check_inputs, given, limited, per_head, widths

__all__ = ["mamba_chunk_scan_combined"]

NO_LIMIT = (0.0, float("inf"))
"""mamba-ssm's default. It holds a step at 0 that has no softplus and is negative."""


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT, return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:  # fmt: skip
    """Scan `x` (batch, seqlen, heads, size), `dt` (batch, seqlen, heads), `B`, `C` (…, groups, state).

    States (batch, heads, size, state size). `chunk_size` changes no result. Returns the output, or
    (output, final states).
    """
    refuse(seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_varlen_states=return_varlen_states)
    rows, count = x.shape[:2]
    flat = [t.flatten(0, 1) for t in (x, dt, B, C)]
    gate = None if z is None else z.flatten(0, 1)
    out, after = scan(
        flat, gate, [count] * rows, A, D, dt_bias, dt_softplus, tuple(dt_limit), initial_states
    )
    out = out.view(x.shape)
    if not return_final_states:
        return out
    return out, after if initial_states is None else after.to(initial_states.dtype)


def scan(
    inputs: list[Tensor], z: Tensor | None, lens: list[int], A: Tensor, D: Tensor | None,
    bias: Tensor | None, softplus: bool, limit: tuple[float, ...] | None, states: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run Mamba-2 over packed x, dt, B and C, gated by `z`. `limit` None: a step may be negative.

    Returns the output and the states afterwards.
    """
    check_inputs(*inputs, z, A, D, bias)
    (x, dt, B, C, *gate), wide = widths(inputs, z)
    if limit is not None and not (softplus and limit == NO_LIMIT):
        dt, bias, softplus = limited(dt, bias, softplus, (limit[0], limit[1])), None, False
    skip = D if D is None or D.dim() == 1 else per_head("D", D, D.dim() - 1)
    recurrent = RecurrentSpec(
        state_size=B.shape[-1], dt_softplus=softplus, gated=z is not None, bc_in_float32=wide
    )
    out, after = recurrence(
        [x, dt, B, C, *gate], given(A=A, D=skip, dt_bias=bias), lens, states,
        kind=AttentionKind.MAMBA2, num_heads=x.shape[1], num_kv_heads=B.shape[1],
        head_size=x.shape[2], recurrent=recurrent,
    )  # fmt: skip
    return out.to(inputs[0].dtype), after
