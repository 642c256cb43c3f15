"""What do core's attention variants compute? Plain torch functions, with FlexAttention's arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyattn.errors import flag, integer


def sigmoid(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, sigmoid_bias: Tensor
) -> Tensor:
    """Weights `sigmoid(score + bias)`; the paper's bias is minus the logarithm of the length."""
    return torch.sigmoid(score + sigmoid_bias)


def relative_bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *,
    bias: Tensor, bucket_of_distance: Tensor,
) -> Tensor:  # fmt: skip
    """Add `bias` (buckets, num_heads) of the bucket of key place minus query place.

    `bucket_of_distance` (2 * reach + 1,): the bucket of each distance from -reach to reach; what is
    further away has the last one's. T5's: `t5_buckets`.
    """
    reach = bucket_of_distance.shape[0] // 2
    distance = torch.clamp(kv_idx - q_idx, -reach, reach) + reach
    return score + bias[bucket_of_distance[distance], h]


def t5_buckets(num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool) -> Tensor:
    """Return T5's bucket of each distance from -max_distance to max_distance, int32.

    As in Raffel et al. (2020): half of the buckets are exact distances, the rest grow logarithmically up
    to `max_distance`.

    Args:
        num_buckets: buckets of the checkpoint's bias.
        max_distance: the distance, in tokens, from which on all share a bucket.
        bidirectional: an encoder's; half of its buckets are for keys after the query.

    Returns:
        int32 (2 * max_distance + 1,).

    Raises:
        SpecError: a number is too small.

    Examples:
        >>> t5_buckets(4, 4, bidirectional=False).tolist()
        [3, 3, 2, 1, 0, 0, 0, 0, 0]

    """
    flag("bidirectional", bidirectional)
    integer("num_buckets", num_buckets, 4 if bidirectional else 2)
    integer("max_distance", max_distance, num_buckets // (4 if bidirectional else 2) + 1)
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")
    buckets = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        buckets += (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = num_buckets // 2
    # In float32, as the models' own code takes the logarithm: it decides at a bucket's border.
    grown = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (grown * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return (buckets + torch.where(distance < exact, distance, far)).int()


def deberta_buckets(num_buckets: int = 256, max_distance: int = 512) -> Tensor:
    """Return DeBERTa's bucket of each distance from -max_distance to max_distance, int32.

    As in DeBERTa-v2 and v3 (He et al., 2021), counted from 0: 2 * num_buckets of them, those near 0 of
    one distance each, the rest growing logarithmically. `relative_bias` counts key minus query, DeBERTa
    query minus key, so the order is reversed.

    Args:
        num_buckets: buckets to each side.
        max_distance: the distance, in tokens, from which on all share a bucket.

    Returns:
        int32 (2 * max_distance + 1,).

    Raises:
        SpecError: a number is too small.

    Examples:
        >>> deberta_buckets(4, 8).shape
        torch.Size([17])

    """
    integer("num_buckets", num_buckets, 2)
    integer("max_distance", max_distance, num_buckets // 2 + 2)
    distance = -torch.arange(-max_distance, max_distance + 1, device="cpu")
    exact = num_buckets // 2
    far = distance.abs().clamp(min=exact)
    # In float32, as the models' own code takes the logarithm: it decides at a bucket's border.
    most = torch.tensor((max_distance - 1) / exact, dtype=torch.float32, device="cpu")
    grown = torch.log(far.float() / exact) / torch.log(most)
    bucket = (torch.ceil(grown * (exact - 1)) + exact) * torch.sign(distance)
    bucket = torch.where(distance.abs() <= exact, distance, bucket)
    return (bucket + num_buckets).clamp(0, 2 * num_buckets - 1).int()


def vision_local(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, grid_width: Tensor, radius: Tensor
) -> Tensor:
    """Return whether a patch is within `radius` rows and columns; patches are numbered row by row."""
    rows = torch.abs(q_idx // grid_width - kv_idx // grid_width)
    columns = torch.abs(q_idx % grid_width - kv_idx % grid_width)
    return (rows <= radius) & (columns <= radius)


def step_mask(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *,
    mask_bits: Tensor, mask_start: Tensor, mask_width: Tensor, mask_query: Tensor, mask_key: Tensor,
) -> Tensor:  # fmt: skip
    """Return whether a query sees a key by its sequence's mask; it sees all keys before `mask_key`."""
    row = mask_start[b] + (q_idx - mask_query[b]) * mask_width[b]
    column = kv_idx - mask_key[b]
    return (column < 0) | mask_bits[row + torch.clamp(column, min=0)]


def block_mask(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *,
    mask_bits: Tensor, mask_start: Tensor, mask_width: Tensor, mask_query: Tensor,
    mask_rows: Tensor, mask_columns: Tensor,
) -> Tensor:  # fmt: skip
    """Return whether a key's block is in the query's row of blocks."""
    row = mask_start[b] + (q_idx - mask_query[b]) // mask_rows * mask_width[b]
    return mask_bits[row + kv_idx // mask_columns]
