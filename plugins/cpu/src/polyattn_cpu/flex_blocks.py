"""The keys that each query of a packed batch sees: two intervals at most, as torch's `BlockMask`.

`create_block_mask` asks for every query and key: with 128k of each a tensor of 16 GiB. Counting where
intervals begin and end gives the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from polyattn.kernel import LayerSpec, key_ranges
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128

Interval = tuple[Tensor, Tensor]
"""int64 (rows,) each: a row's first key, and the first after its last; empty unless they ascend."""


def intervals(
    spec: LayerSpec, position: Tensor, length: Tensor, start: Tensor
) -> tuple[Interval, ...]:
    """Return which of the packed keys each row sees; where there are two, they don't touch.

    `position`, `length`, `start` int64 (rows,): the row's place in its sequence, how many keys that
    has and where they start; a row of padding has length 0.
    """
    first, kept, near, end = key_ranges(
        spec, position, position, length, torch.minimum, torch.maximum
    )
    if not spec.sink_tokens:
        return ((start + near, start + end),)
    touch = kept == near
    near, kept = torch.where(touch, first, near), torch.where(touch, first, kept)
    return (start + near, start + end), (start + first, start + kept)


def block_mask(seen: tuple[Interval, ...], keys: int, device: torch.device) -> BlockMask:
    """Return the mask, on `device`, of rows that see these intervals, on the host, of `keys` keys.

    Rows and keys are multiples of `BLOCK`.
    """
    rows = len(seen[0][0])
    row = torch.arange(rows, device="cpu") // BLOCK
    met = torch.zeros(rows // BLOCK, keys // BLOCK + 1, dtype=torch.int32, device="cpu")
    covered = torch.zeros_like(met)
    for first, end in seen:
        _count(met, row, first // BLOCK, torch.where(first < end, -(-end // BLOCK), 0))
        _count(covered, row, -(-first // BLOCK), end // BLOCK)
    whole = covered.cumsum(1)[:, :-1] == BLOCK
    partial = (met.cumsum(1)[:, :-1] > 0) & ~whole
    there = tuple((first.to(device), end.to(device)) for first, end in seen)
    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_within(there),
    )


def _within(seen: tuple[Interval, ...]) -> Callable[..., Tensor]:
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        (first, end), *others = seen
        mask = (k >= first[q]) & (k < end[q])
        for first, end in others:
            mask = mask | ((k >= first[q]) & (k < end[q]))
        return mask

    return visible


def _count(into: Tensor, row: Tensor, first: Tensor, end: Tensor) -> None:
    """Count the columns from `first` to `end` of each row: +1 where they begin, -1 behind them."""
    real = (first < end).int()
    into.index_put_((row, first.clamp(max=into.shape[1] - 1)), real, accumulate=True)
    into.index_put_((row, end.clamp(min=0)), -real, accumulate=True)


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, and all blocks' numbers, the row's own first."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    count = blocks.sum(1, dtype=torch.int32)
    return count[None, None].to(device), order[None, None].to(device)
