"""mamba-ssm's single step, of Mamba-1 and Mamba-2."""

from __future__ import annotations

from torch import Tensor

from polyattn_recurrent import mamba1, mamba2
from polyattn_recurrent.calls import blank_padding, is_per_head, leave, per_head, states_of

__all__ = ["selective_state_update"]


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take one token of each sequence, and change `state` in place.

    Mamba-1: `x`, `dt` (batch, channels), `state` (batch or slots, channels, state size), `A` likewise
    without the batch. Mamba-2: `x` (batch, heads, size), `state` (…, heads, size, state size), and
    `dt`, `A`, `D`, `dt_bias` one number a head, expanded over the head's sizes. A head whose sizes have
    numbers of their own is as many channels of Mamba-1. A row whose slot in `state_batch_indices` is
    negative is padding: it reads and writes no state, and its output is 0.
    """
    before = states_of(state, state_batch_indices)
    lens = [1] * x.shape[0]
    tied = is_per_head(A, 2) and all(is_per_head(t, 1) for t in (dt, D, dt_bias))
    if x.dim() == 3 and tied:
        dt, A = per_head("dt", dt, 1), per_head("A", A, 2)
        bias = None if dt_bias is None else per_head("dt_bias", dt_bias, 1)
        tokens = [x, dt, B, C]
        out, after = mamba2.scan(tokens, z, lens, A, D, bias, dt_softplus, None, before)
    else:
        channels = [x.flatten(1), dt.flatten(1), B, C]
        skip, bias = (t if t is None else t.flatten() for t in (D, dt_bias))
        gate = None if z is None else z.flatten(1)
        out, after = mamba1.scan(
            channels, gate, lens, A.flatten(0, -2), D=skip, bias=bias, softplus=dt_softplus,
            states=before.flatten(1, -2),
        )  # fmt: skip
    leave(state, state_batch_indices, after.view(before.shape))
    return blank_padding(out.view(x.shape), state_batch_indices)
