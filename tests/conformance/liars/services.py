"""Lies of stores and merges."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn.kernel import KVCache, LayerParams, StorePlan
from polyattn.runtime.merge import TorchMerge
from polyattn.runtime.store import TorchStore
from torch import Tensor


class Store(TorchStore):
    by: ClassVar[tuple[str, ...]] = ("store",)


class HonestStore(Store):
    by = ()


class StoresTheSkipped(Store):
    """-1 is the last slot, as an index would have it."""

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        last = cache.num_blocks * cache.block_size - 1
        slots = torch.where(plan.slots < 0, last, plan.slots)
        super().run(StorePlan(slots), key, value, cache, params)


class SkipsTheFirst(Store):
    """Slot 0 is taken for none."""

    by = ("store", "store_plans")

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        kept = plan.slots.masked_fill(plan.slots < cache.block_size, -1)
        super().run(StorePlan(kept), key, value, cache, params)


class StoresAThousand(Store):
    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        super().run(StorePlan(plan.slots[:1024]), key[:1024], value[:1024], cache, params)


class StoresWithKeysScale(Store):
    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        same = LayerParams(k_scale=params.k_scale, v_scale=params.k_scale)
        super().run(plan, key, value, cache, same)


class MultipliesByTheScale(Store):
    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        other = LayerParams(k_scale=1 / params.k_scale, v_scale=1 / params.v_scale)
        super().run(plan, key, value, cache, other)


class WrapsAround(Store):
    """int8 overflows instead of saturating."""

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        if cache.key.dtype != torch.int8:
            return super().run(plan, key, value, cache, params)
        wrapped = [
            (t.float() / s).round().long().to(torch.int8)
            for t, s in ((key, params.k_scale), (value, params.v_scale))
        ]
        return super().run(plan, *wrapped, cache, params)


class RoundsToZero(Store):
    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        if cache.key.dtype != torch.int8:
            return super().run(plan, key, value, cache, params)
        cut = [
            (t.float() / s).clamp(-127, 127).trunc().to(torch.int8)
            for t, s in ((key, params.k_scale), (value, params.v_scale))
        ]
        return super().run(plan, *cut, cache, params)


class RoundsHalvesUp(Store):
    by = ("store_ties",)

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        if cache.key.dtype != torch.int8:
            return super().run(plan, key, value, cache, params)
        up = [
            (t.float() / s + 0.5).floor().clamp(-127, 127).to(torch.int8)
            for t, s in ((key, params.k_scale), (value, params.v_scale))
        ]
        return super().run(plan, *up, cache, params)


class DenseRows(Store):
    """Keys are read as if they were contiguous."""

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        if len(key) > 1 and not key.is_contiguous():
            dense = torch.empty(key.shape, dtype=key.dtype)
            key = key.as_strided(dense.shape, dense.stride())
        super().run(plan, key, value, cache, params)


class ClearsTheBlock(Store):
    """The rest of a block that is begun is cleared."""

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        kept = plan.slots[plan.slots >= 0]
        if not cache.value_in_key and cache.key.dtype.itemsize > 1:
            cache.value[kept // cache.block_size] = 0.0
        super().run(plan, key, value, cache, params)


class LatestStorePlan(Store):
    by = ("store_plans",)

    def plan(self, slots: Tensor) -> StorePlan:
        self.last = super().plan(slots)
        return self.last

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        same = len(key) == len(self.last.slots)
        super().run(self.last if same else plan, key, value, cache, params)


class FirstStoreScale(Store):
    by = ("store_plans",)

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        first = self.__dict__.setdefault("first", params)
        super().run(plan, key, value, cache, first)


class TakesTheKeyAway(Store):
    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        super().run(plan, key, value, cache, params)
        key.zero_()


class Merge(TorchMerge):
    by: ClassVar[tuple[str, ...]] = ("merge", "merge_many")


class HonestMerge(Merge):
    by = ()


class LargestLse(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        largest = torch.maximum(total_lse, part_lse)
        super().run(total, total_lse, part, part_lse)
        total_lse.copy_(largest)


class MergesInBits(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        weight = torch.sigmoid((part_lse - total_lse) * 0.6931).nan_to_num(0.0)
        total.lerp_(part.to(total.dtype), weight[..., None])
        torch.logaddexp(total_lse, part_lse, out=total_lse)


class NothingAndNothingIsNan(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        weight = torch.sigmoid(part_lse - total_lse)
        total.lerp_(part.to(total.dtype), weight[..., None])
        torch.logaddexp(total_lse, part_lse, out=total_lse)


class PlainExponentials(Merge):
    """exp of LSEs as they are."""

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        one, two = total_lse.exp(), part_lse.exp()
        weight = (two / (one + two)).nan_to_num(0.0)
        total.lerp_(part.to(total.dtype), weight[..., None])
        total_lse.copy_((one + two).log())


class RoundsTheTotal(Merge):
    """The total is rounded to bfloat16 after each part."""

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        super().run(total, total_lse, part, part_lse)
        total.copy_(total.bfloat16())


class EqualWeights(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        total.lerp_(part.to(total.dtype), 0.5)
        torch.logaddexp(total_lse, part_lse, out=total_lse)


class SpoilsThePart(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        super().run(total, total_lse, part, part_lse)
        part.zero_()


class FirstHeadsLse(Merge):
    """One LSE a token, the first head's."""

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        one = part_lse[:, :1].expand_as(part_lse)
        weight = torch.sigmoid(one - total_lse).nan_to_num(0.0)
        total.lerp_(part.to(total.dtype), weight[..., None])
        torch.logaddexp(total_lse, part_lse, out=total_lse)
