"""mamba-ssm's single step, of Mamba-1 and Mamba-2."""

from __future__ import annotations

from torch import Tensor

from polyattn_recurrent import mamba1, mamba2
from polyattn_recurrent.calls import gated, per_head

__all__ = ["selective_state_update"]


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take one token of each sequence, and change `state` in place.

    Mamba-1: `x`, `dt` (batch, channels), `state` (batch or slots, channels, state size), `A` likewise
    without the batch. Mamba-2: `x` (batch, heads, size), `state` (…, heads, size, state size), and
    `dt`, `A`, `D`, `dt_bias` one number a head, expanded over the head's sizes.
    """
    before = state if state_batch_indices is None else state[state_batch_indices]
    lens = [1] * x.shape[0]
    if x.dim() == 2:
        tokens = [x, dt.float(), B.to(x.dtype), C.to(x.dtype)]
        out, after = mamba1.scan(tokens, lens, A, D, dt_bias, dt_softplus, before)
    else:
        dt, A = per_head("dt", dt, 1), per_head("A", A, 2)
        bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)
        tokens = [x, dt, B, C]
        out, after = mamba2.scan(tokens, lens, A, D, bias, dt_softplus, mamba2.NO_LIMIT, before)
    if state_batch_indices is None:
        state.copy_(after)
    else:
        state[state_batch_indices] = after.to(state.dtype)
    return gated(out, z)
