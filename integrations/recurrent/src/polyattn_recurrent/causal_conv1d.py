"""causal-conv1d's functions: a short convolution along each channel."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import AttentionKind, PolyattnError, RecurrentSpec
from polyattn.host import recurrence
from torch import Tensor

from polyattn_recurrent.calls import blank_padding, check_inputs, given, leave, states_of

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False,
    final_states_out: Tensor | None = None, activation: str | None = None,
) -> Any:  # fmt: skip
    """Convolve `x` (batch, channels, seqlen) by `weight` (channels, width).

    States (batch, channels, width - 1). `seq_idx` (batch, seqlen): which sequence each token of a row is
    of, negative for padding, whose output is 0; then there are no states. Returns the output, or
    (output, final states).
    """
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise PolyattnError(
                "seq_idx beside initial_states or return_final_states: a row of several sequences has "
                "no state of its own; leave one out"
            )
        out, _ = _convolve(x, weight, bias, None, activation, _lens(seq_idx))
        return out.masked_fill((seq_idx < 0)[:, None], 0)
    out, after = _convolve(x, weight, bias, initial_states, activation)
    if not return_final_states:
        return out
    return out, after if final_states_out is None else final_states_out.copy_(after)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve new tokens, (batch, channels) or (batch, channels, seqlen), after `conv_state`.

    `conv_state` (batch or slots, channels, width - 1 or more) holds the last inputs and is changed in
    place; `conv_state_indices` (batch,): each sequence's slot. A row whose slot is negative is padding:
    it reads and writes no state, and its output is 0. `cache_seqlens` (batch,): tokens that each
    sequence had; then `conv_state` is a ring, position p's input in column p modulo its columns.
    """
    tokens = x[..., None] if x.dim() == 2 else x
    before = states_of(conv_state, conv_state_indices)
    width, columns = weight.shape[1], before.shape[-1]
    if cache_seqlens is not None:  # the oldest input first
        turn = torch.arange(columns, device=x.device) + cache_seqlens[:, None]
        before = before.gather(2, _columns(turn, before))
    out, _ = _convolve(tokens, weight, bias, before[..., columns - width + 1 :], activation)
    inputs = torch.cat([before, tokens.to(before.dtype)], -1)[..., -columns:]
    if cache_seqlens is not None:
        turn = torch.arange(columns, device=x.device) + cache_seqlens[:, None] + tokens.shape[2]
        inputs = torch.empty_like(inputs).scatter_(2, _columns(turn, inputs), inputs)
    leave(conv_state, conv_state_indices, inputs)
    out = blank_padding(out, conv_state_indices)
    return out[..., 0] if x.dim() == 2 else out


def _lens(seq_idx: Tensor) -> list[int]:
    """Return how many tokens each sequence has, row after row."""
    lens: list[int] = []
    for row in seq_idx:
        lens += row.unique_consecutive(return_counts=True)[1].tolist()
    return lens


def _columns(positions: Tensor, ring: Tensor) -> Tensor:
    """Return the columns of `ring` (batch, channels, columns) that hold positions (batch, columns)."""
    return (positions % ring.shape[2])[:, None].expand_as(ring).long()


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    activation: str | None,
    lens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    check_inputs(x, weight, bias)
    rows, channels, count = x.shape
    recurrent = RecurrentSpec(
        conv_width=weight.shape[1], activation="silu" if activation == "swish" else activation
    )
    out, after = recurrence(
        [x.transpose(1, 2).reshape(rows * count, channels)], given(weight=weight, bias=bias),
        lens or [count] * rows, states, kind=AttentionKind.SHORT_CONV, num_heads=channels, head_size=1,
        recurrent=recurrent,
    )  # fmt: skip
    return out.view(rows, count, channels).transpose(1, 2), after
