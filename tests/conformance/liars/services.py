"""Lies of stores and merges."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from liars.told import lies
from polyattn.kernel import KVCache, LayerParams, StorePlan
from polyattn.runtime.merge import TorchMerge
from polyattn.runtime.store import TorchStore
from torch import Tensor


class Stored(NamedTuple):
    """What a store is called with."""

    plan: StorePlan
    key: Tensor
    value: Tensor
    cache: KVCache
    params: LayerParams


class Store(TorchStore):
    by: ClassVar[tuple[str, ...]] = ("store",)

    def instead(self, call: Stored) -> Stored:
        """Return what is stored instead."""
        return call

    def run(self, *call: Any) -> None:
        super().run(*self.instead(Stored(*call)))


class HonestStore(Store):
    by = ()


def without_the_first(self: Any, call: Stored) -> Stored:
    """Slot 0 is taken for none."""
    slots = call.plan.slots
    return call._replace(plan=StorePlan(slots.masked_fill(slots < call.cache.block_size, -1)))


def into_the_last(self: Any, call: Stored) -> Stored:
    """-1 is the last slot, as an index would have it."""
    last = call.cache.num_blocks * call.cache.block_size - 1
    return call._replace(plan=StorePlan(torch.where(call.plan.slots < 0, last, call.plan.slots)))


def dense_rows(self: Any, call: Stored) -> Stored:
    """Keys are read as if they were contiguous."""
    key = call.key
    if len(key) > 1 and not key.is_contiguous():
        key = key.as_strided(key.shape, torch.empty(key.shape, dtype=key.dtype).stride())
    return call._replace(key=key)


def cleared_block(self: Any, call: Stored) -> Stored:
    """The rest of a block that is begun is cleared."""
    slots, cache = call.plan.slots[call.plan.slots >= 0], call.cache
    if not cache.value_in_key and cache.key.dtype.itemsize > 1:
        cache.value[slots // cache.block_size] = 0.0
    return call


def scaled(call: Stored, key: Any, value: Any) -> Stored:
    return call._replace(params=LayerParams(k_scale=key, v_scale=value))


INSTEAD = {
    "StoresTheSkipped": into_the_last,
    "StoresAThousand": lambda self, call: call._replace(
        plan=StorePlan(call.plan.slots[:1024]), key=call.key[:1024], value=call.value[:1024]
    ),
    "StoresWithKeysScale": lambda self, call: scaled(
        call, call.params.k_scale, call.params.k_scale
    ),
    "MultipliesByTheScale": lambda self, call: scaled(
        call, 1 / call.params.k_scale, 1 / call.params.v_scale
    ),
    "DenseRows": dense_rows,
    "ClearsTheBlock": cleared_block,
}


class Rounding(Store):
    """Rounds what is stored in int8 another way."""

    def rounded(self, numbers: Tensor) -> Tensor:
        raise NotImplementedError

    def instead(self, call: Stored) -> Stored:
        if call.cache.key.dtype != torch.int8:
            return call
        key = self.rounded(call.key.float() / call.params.k_scale).to(torch.int8)
        value = self.rounded(call.value.float() / call.params.v_scale).to(torch.int8)
        return call._replace(key=key, value=value)


ROUNDED = {
    # int8 overflows instead of saturating.
    "WrapsAround": lambda self, numbers: numbers.round().long(),
    "RoundsToZero": lambda self, numbers: numbers.clamp(-127, 127).trunc(),
}
TIES = {"RoundsHalvesUp": lambda self, numbers: (numbers + 0.5).floor().clamp(-127, 127)}
globals().update(lies(
    __name__,
    (Store, "instead", INSTEAD),
    (Store, "instead", {"SkipsTheFirst": without_the_first}, "store", "store_plans"),
    (Rounding, "rounded", ROUNDED), (Rounding, "rounded", TIES, "store_ties"),
))  # fmt: skip


class LatestStorePlan(Store):
    by = ("store_plans",)

    def plan(self, slots: Tensor) -> StorePlan:
        self.last = super().plan(slots)
        return self.last

    def instead(self, call: Stored) -> Stored:
        same = len(call.key) == len(self.last.slots)
        return call._replace(plan=self.last) if same else call


class FirstStoreScale(Store):
    by = ("store_plans",)

    def instead(self, call: Stored) -> Stored:
        return call._replace(params=self.__dict__.setdefault("first", call.params))


class TakesTheKeyAway(Store):
    def run(self, *call: Any) -> None:
        super().run(*call)
        Stored(*call).key.zero_()


class Merge(TorchMerge):
    by: ClassVar[tuple[str, ...]] = ("merge", "merge_many")


class HonestMerge(Merge):
    by = ()


class Weighing(Merge):
    """Gives a part another weight."""

    def weight(self, total_lse: Tensor, part_lse: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        total.lerp_(part.to(total.dtype), self.weight(total_lse, part_lse)[..., None])
        torch.logaddexp(total_lse, part_lse, out=total_lse)


WEIGHTS = {
    "MergesInBits": lambda self, total, part: torch.sigmoid((part - total) * 0.6931).nan_to_num(
        0.0
    ),
    "NothingAndNothingIsNan": lambda self, total, part: torch.sigmoid(part - total),
    "EqualWeights": lambda self, total, part: torch.full_like(total, 0.5),
    # One LSE a token, the first head's.
    "FirstHeadsLse": lambda self, total, part: torch.sigmoid(part[:, :1] - total).nan_to_num(0.0),
}
globals().update(lies(__name__, (Weighing, "weight", WEIGHTS)))


class PlainExponentials(Merge):
    """exp of LSEs as they are."""

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        one, two = total_lse.exp(), part_lse.exp()
        weight = (two / (one + two)).nan_to_num(0.0)
        total.lerp_(part.to(total.dtype), weight[..., None])
        total_lse.copy_((one + two).log())


class LargestLse(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        largest = torch.maximum(total_lse, part_lse)
        super().run(total, total_lse, part, part_lse)
        total_lse.copy_(largest)


class RoundsTheTotal(Merge):
    """The total is rounded to bfloat16 after each part."""

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        super().run(total, total_lse, part, part_lse)
        total.copy_(total.bfloat16())


class SpoilsThePart(Merge):
    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        super().run(total, total_lse, part, part_lse)
        part.zero_()
