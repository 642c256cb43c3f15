"""What does the kit change queries, keys, values and outputs by? Exact in every dtype: signs, halves."""

from __future__ import annotations

import torch
from torch import Tensor


def of_query(query: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, d: Tensor) -> Tensor:
    """Halve every other token's, which ones by the sequence; turn odd heads round."""
    halved = torch.where((q_idx + b) % 2 == 0, query, query * 0.5)
    return torch.where(h % 2 == 0, halved, -halved)


def of_key(key: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor, d: Tensor) -> Tensor:
    """Turn every third element round, and of every other key those of every second."""
    turned = torch.where(d % 3 == 0, -key, key)
    return torch.where((kv_idx % 2 == 0) & (d % 2 == 0), -turned, turned)


def of_value(value: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor, d: Tensor) -> Tensor:
    """Halve every third key's; turn a KV head's round."""
    halved = torch.where(kv_idx % 3 == 0, value * 0.5, value)
    return torch.where(h % 2 == 0, halved, -halved)


def of_output(
    output: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, d: Tensor, *, turned: Tensor
) -> Tensor:
    """Turn the heads round that an input names, and halve every other token's first elements."""
    halved = torch.where((q_idx % 2 == 0) & (d < 8), output * 0.5, output)
    return torch.where(turned[h] == 1, -halved, halved)
