"""flash-attn's `bert_padding`: padded rows to packed tokens and back. Differentiable throughout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    """Return `values[indices]`."""
    return values.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros (first_axis_dim, …) with `values` at `indices`."""
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    return out.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens that either mask (batch, seqlen) keeps.

    Returns the tokens of (batch, seqlen, …), their indices, `cu_seqlens` int32 (batch + 1,), the longest
    length, and how many of each row `attention_mask` alone keeps.
    """
    present = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, cu_seqlens, longest = _packed(present != 0)
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack rows that hold several sequences each, whose lengths a row of the mask lists."""
    lens = attention_mask_in_length.flatten()
    lens = lens[lens != 0]
    total = attention_mask_in_length.sum(-1, keepdim=True)
    position = torch.arange(attention_mask_in_length.shape[1], device=total.device)
    indices, _, _ = _packed(position < total)
    cu_seqlens = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, int(lens.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return packed tokens as (batch, seqlen, …), zeros where there is none."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


def _packed(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    lens = mask.sum(-1, dtype=torch.int32)
    cu_seqlens = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    return mask.flatten().nonzero().flatten(), cu_seqlens, int(lens.max())
