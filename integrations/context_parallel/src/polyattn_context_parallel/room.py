"""Where do keys lie while a layer's call lasts? In one cache for a group's layers, in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from polyattn import KVCache, LayerGroup, select
from torch import Tensor


class Room:
    """The cache that keys are collected in: one for a group's layers, grown when a step needs more."""

    def __init__(self, group: LayerGroup):
        self.group = group
        self._cache: KVCache | None = None

    def take(self, num_blocks: int) -> KVCache:
        """Return a cache of at least this many blocks, whose content is anything."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # the old one goes before the new one comes
            self._cache = self.group.allocate_cache(max(num_blocks, 1))
        return self._cache


def side_by_side(lens: Sequence[int], size: int, device: torch.device) -> tuple[Tensor, int]:
    """Return a block table int32 of sequences one after another in blocks of `size`, and their blocks."""
    blocks = [-(-n // size) for n in lens]
    table = torch.zeros(len(lens), max(blocks, default=0), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(accumulate(blocks, initial=0), blocks, strict=False)):
        table[row, :count] = torch.arange(first, first + count)
    return table.to(device), sum(blocks)


def plain_group(group: LayerGroup, *, causal: bool = True, masked: bool = True) -> LayerGroup:
    """Return a group of the same backends over the same cache whose rows leave learned sinks out.

    Without `masked` every key counts that a row has: no window, chunk or kept first tokens. Raises
    `SelectionError` where one of the backends can't serve that.
    """
    spec = group.spec.replace(learned_sinks=False, causal=causal)
    if not masked:
        spec = spec.replace(sliding_window=None, window_right=None, chunk_size=None, sink_tokens=0)
    if spec == group.spec:
        return group
    names = ",".join(f"{phase}={info.name}" for phase, info in group.selection.backends)
    form = group.cache_format
    assert form is not None
    plain = spec.replace(block_size=form.block_size)
    return LayerGroup(select(plain, group.device, backend=names), cache_format=form)
