"""Lies that hold for the sizes that somebody tried, and for no others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from liars.masks import Numeric
from liars.plain import Plain
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan
from torch import Tensor


class TwoKvHeads(Numeric):
    """Only the first two KV heads are read."""

    def grouped(self, tensor: Tensor) -> Tensor:
        heads = torch.arange(tensor.shape[1]) % 2
        return super().grouped(tensor[:, heads])


class HeadsInTurn(Numeric):
    """Query head h reads KV head h modulo their number."""

    def grouped(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(1, self.spec.gqa_ratio, 1)


class EightSequences(Numeric):
    """Those behind the eighth repeat its keys."""

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        return super().blocks(batch, min(index, 7), count)


class ThirtyTwoSequences(Numeric):
    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        return (keys, values) if index < 32 else (keys, values.roll(1, 0))


class ThousandKeys(Numeric):
    """Of a long sequence only the last 1,024 keys are read."""

    def visible(self, queries: int, keys: int) -> Tensor:
        return super().visible(queries, keys) & (torch.arange(keys) >= keys - 1024 - queries)


class SixtyFourQueries(Numeric):
    """A second tile of queries has the first one's positions."""

    def visible(self, queries: int, keys: int) -> Tensor:
        mask = super().visible(queries, keys)
        mask[64:128] = mask[: max(0, min(64, queries - 64))]
        return mask


class LastBlockWhole(Numeric):
    """Lengths are rounded up to whole blocks; what lies behind weighs nothing, but NaN does."""

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        length = len(keys)
        if length % cache.block_size:
            last = self.blocks(plan.batch, index, -(-length // cache.block_size))[-1]
            values = values + 0 * cache.value[last, -1].double().sum()
        return keys, values


class SixteenTokenBlocks(Numeric):
    """Pages are of 16 tokens, whatever the cache's are."""

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        return (keys, values) if cache.block_size == 16 else (keys.roll(1, 0), values)


class MultiplesOfSixteen(Numeric):
    """Elements of a head past the last whole 16 are dropped."""

    def logits(self, query: Tensor, keys: Tensor, params: LayerParams) -> Tensor:
        whole = query.shape[2] // 16 * 16
        return super().logits(query[..., :whole], keys[..., :whole], params)


class HalfPrecision(Numeric):
    """float32 inputs are computed in bfloat16."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        return super().attend(query.bfloat16(), keys.bfloat16(), values.bfloat16(), params)


class IgnoresKeyScale(Numeric):
    def scales(self, params: LayerParams) -> tuple[float, float]:
        return 1.0, params.v_scale


class IgnoresValueScale(Numeric):
    def scales(self, params: LayerParams) -> tuple[float, float]:
        return params.k_scale, 1.0


class OneScale(Numeric):
    """Keys' scale serves the values too."""

    def scales(self, params: LayerParams) -> tuple[float, float]:
        return params.k_scale, params.k_scale


class FirstHeadsScale(Numeric):
    """One KV head's scale serves all."""

    def scales(self, params: LayerParams) -> tuple[Any, Any]:
        found = super().scales(params)
        return tuple(s[:1] if isinstance(s, Tensor) else s for s in found)  # type: ignore[return-value]


class ScalesOfTheFirstStep(Plain):
    """What a scale's tensor held when it was seen first is what it holds."""

    by = ("rescaled",)
    seen: ClassVar[dict[int, Tensor]] = {}

    def scales(self, params: LayerParams) -> tuple[Any, Any]:
        found = super().scales(params)
        if not isinstance(found[0], Tensor):
            return found
        first, second = (self.seen.setdefault(s.data_ptr(), s.clone()) for s in found)
        return first, second


class UnscaledOutput(Numeric):
    def out_scale(self, params: LayerParams) -> float:
        return 1.0


class SwappedInCompany(Plain):
    """Right for each feature and each size; wrong for 3 KV heads over more than 300 keys."""

    by = ("search",)

    def grouped(self, tensor: Tensor) -> Tensor:
        wrong = self.spec.num_kv_heads == 3 and len(tensor) > 300
        return super().grouped(tensor.flip(1) if wrong else tensor)


class OddBlocks(Plain):
    """Wrong for blocks of 3 tokens, which no list of sizes holds."""

    by = ("search",)

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        return (keys, values) if cache.block_size != 3 else (keys, values.flip(0))


class PackedKeys(Numeric):
    """Keys that are given whole lie one after another, whatever `key_starts` says."""

    def given(self, batch: Batch, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        first = sum(batch.lens[:index])
        own = slice(first, first + batch.lens[index])
        return key[own], value[own]


class AsManyKeysAsQueries(Numeric):
    def given(self, batch: Batch, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        first = batch.key_starts[index]
        own = slice(first, first + min(batch.lens[index], batch.query_lens[index]))
        return key[own], value[own]


class DecodesFirst(Numeric):
    """A batch's one-token rows are all before the first longer one."""

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        queries, out = plan.batch.query_lens, frame.out
        late = [i for i, n in enumerate(queries) if n == 1 and max(queries[:i], default=0) > 1]
        for index in late:
            out[plan.batch.starts[index]].zero_()


class LastOfShortRows(Plain):
    """Claims to take rows of 8 tokens as decodes, and masks them as if they were one."""

    by = ("numeric",)

    def visible(self, queries: int, keys: int) -> Tensor:
        if queries <= 8:
            return torch.ones(queries, keys, dtype=torch.bool)
        return super().visible(queries, keys)
