"""The mask function: transformers' own, so that what a model composed can be read afterwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask, bool (batch, 1, queries, keys), or None where the layer's `is_causal` says all.

    A causal mask is left out only where the last query stands at the last key: kernels align there.
    """
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and aligned,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )
