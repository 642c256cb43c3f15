"""TORCH_STORE: keys and values go to their slots by torch's indexing, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from polyattn.registry.capabilities import rotates
from polyattn.runtime.backend import StoreBackend
from polyattn.runtime.cache.kv_cache import KVCache, quantize, raw
from polyattn.runtime.program import LayerParams, StorePlan
from polyattn.runtime.rotation import NewTokens, Rotation, prepared

if TYPE_CHECKING:
    from polyattn.runtime.backend import Prepared
    from polyattn.runtime.group import LayerGroup

RunRotated = Callable[..., "Prepared"]
"""`StoreBackend.run_rotated` of one store, its own or core's."""


class TorchStore(StoreBackend):
    """Never synchronises with the device; a latent cache's value is its key's first part."""

    name: ClassVar[str] = "TORCH_STORE"

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        stored = cache.key.dtype
        of_key, of_value = cache.format.rows or (None, None)
        scatter(cache.key, quantize(key, stored, params.k_scale, of_key), plan.slots)
        if not cache.value_in_key:
            scatter(cache.value, quantize(value, stored, params.v_scale, of_value), plan.slots)

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = new.query.dtype
        query, key, value = prepared(new, rotation)
        assert key is not None and value is not None
        if cache.key.dtype == dtype:
            key, value = key.to(dtype), value.to(dtype)
        # A quantised cache takes what was rotated as it is: rounded once.
        self.run(plan, key, value, cache, params)
        return query.to(dtype), key.to(dtype) if keep else None, value.to(dtype) if keep else None


def claimed_rotation(group: LayerGroup, store: StoreBackend) -> RunRotated:
    """Return what rotates and stores: the store itself where it claims so, else core's operators."""
    info, rope = group.selection.backend("store"), group.spec.rope
    assert info is not None
    if rotates(info.capabilities, rope):
        return store.run_rotated
    return functools.partial(StoreBackend.run_rotated, store)


def scatter(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write rows (num_tokens, heads, size) to their slots of (blocks, block_size, heads, size)."""
    cache, new = raw(cache), raw(new.detach())
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if slots.device.type == "cpu":
        keep = slots >= 0
        if not bool(keep.all()):
            blocks, offsets, new = blocks[keep], offsets[keep], new[keep]
    elif slots.numel():
        # Without asking the device how many slots are skipped: a skipped token repeats a kept
        # one's write, or, where all are skipped, writes back what is there.
        keep = slots >= 0
        stand_in = keep.to(torch.uint8).argmax()
        kept = torch.where(keep, slots, slots[stand_in]).clamp(min=0)
        blocks, offsets = kept // cache.shape[1], kept % cache.shape[1]
        spare = torch.where(keep[stand_in], new[stand_in], cache[blocks[0], offsets[0]])
        new = torch.where(keep[:, None, None], new, spare)
    cache.index_put_((blocks, offsets), new)
