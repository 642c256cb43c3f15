"""Random steps of an attention layer."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.runtime.cache.scales import input_dtype
from polyattn.spec.layer import LayerSpec


def attention_inputs(
    spec: LayerSpec, tokens: int, generator: torch.Generator, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normal (query, key, value) of `tokens` tokens, in what they come in."""
    query, key, value = (
        torch.randn(tokens, heads, size, generator=generator).to(input_dtype(spec)).to(device)
        for heads, size in (
            (spec.num_heads, spec.head_size),
            (spec.num_kv_heads, spec.head_size),
            (spec.num_kv_heads, spec.v_head_size),
        )
    )
    return query, key, value
