"""Which functions does the kit apply to queries, keys, values, scores and outputs? Signs and halves,
exact in every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_query(query: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, d: Tensor) -> Tensor:
    """Halve every other token, depending on the sequence; negate odd heads."""
    halved = torch.where((q_idx + b) % 2 == 0, query, query * 0.5)
    return torch.where(h % 2 == 0, halved, -halved)


def of_key(key: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor, d: Tensor) -> Tensor:
    """Negate every third element; of even keys also every second."""
    turned = torch.where(d % 3 == 0, -key, key)
    return torch.where((kv_idx % 2 == 0) & (d % 2 == 0), -turned, turned)


def of_value(value: Tensor, b: Tensor, h: Tensor, kv_idx: Tensor, d: Tensor) -> Tensor:
    """Halve every third key; negate one KV head."""
    halved = torch.where(kv_idx % 3 == 0, value * 0.5, value)
    return torch.where(h % 2 == 0, halved, -halved)


def of_output(
    output: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, d: Tensor, *, turned: Tensor
) -> Tensor:
    """Negate the heads that an input names, and halve the first elements of every other token."""
    halved = torch.where((q_idx % 2 == 0) & (d < 8), output * 0.5, output)
    return torch.where(turned[h] == 1, -halved, halved)


def of_score(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, sharpness: Tensor
) -> Tensor:
    """Multiply a sequence's scores, each head's by its own."""
    return score * sharpness[b, h]


def of_pair(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, document: Tensor) -> Tensor:
    """Show keys of the query's own document; an input has the document of each eight tokens."""
    last = document.shape[1] - 1
    own = document[b, torch.clamp(q_idx // 8, max=last)]
    return own == document[b, torch.clamp(kv_idx // 8, max=last)]


def of_features(x: Tensor) -> Tensor:
    """Two branches, neither of core's maps, and not 0 of 0."""
    return torch.where(x > 0.5, x * x, torch.exp(0.5 * x))
