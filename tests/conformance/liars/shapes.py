"""Lies that hold for the sizes that somebody tried, and for no others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from liars.masks import Numeric
from liars.plain import Plain
from liars.told import Reading, lies
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan
from torch import Tensor

GROUPED = {
    # Only the first two KV heads are read.
    "TwoKvHeads": lambda self, tensor: Plain.grouped(
        self, tensor[:, torch.arange(tensor.shape[1]) % 2]
    ),
    # Query head h reads KV head h modulo their number.
    "HeadsInTurn": lambda self, tensor: tensor.repeat(1, self.spec.gqa_ratio, 1),
}
# Right for each feature and each size; wrong for 3 KV heads over more than 300 keys.
IN_COMPANY = {
    "SwappedInCompany": lambda self, tensor: Plain.grouped(
        self, tensor.flip(1) if self.spec.num_kv_heads == 3 and len(tensor) > 300 else tensor
    )
}
BLOCKS = {
    # Those behind the eighth repeat its keys.
    "EightSequences": lambda self, batch, index, count: Plain.blocks(
        self, batch, min(index, 7), count
    )
}
SCALES = {
    "IgnoresKeyScale": lambda self, params: (1.0, params.v_scale),
    "IgnoresValueScale": lambda self, params: (params.k_scale, 1.0),
    # Keys' scale serves the values too.
    "OneScale": lambda self, params: (params.k_scale, params.k_scale),
    # One KV head's scale serves all.
    "FirstHeadsScale": lambda self, params: tuple(
        scale[:1] if isinstance(scale, Tensor) else scale for scale in Plain.scales(self, params)
    ),
}
UNSCALED = {"UnscaledOutput": lambda self, params: 1.0}


def whole_blocks(
    self: Any, keys: Tensor, values: Tensor, cache: KVCache, batch: Batch, index: int
) -> tuple[Tensor, Tensor]:
    """Lengths are rounded up to whole blocks; what lies behind weighs nothing, but NaN does."""
    length = len(keys)
    if length % cache.block_size:
        last = self.blocks(batch, index, -(-length // cache.block_size))[-1]
        values = values + 0 * cache.value[last, -1].double().sum()
    return keys, values


SPOILT = {
    "ThirtyTwoSequences": lambda self, keys, values, cache, batch, index: (
        (keys, values) if index < 32 else (keys, values.roll(1, 0))
    ),
    "LastBlockWhole": whole_blocks,
    # Pages are of 16 tokens, whatever the cache's are.
    "SixteenTokenBlocks": lambda self, keys, values, cache, batch, index: (
        (keys, values) if cache.block_size == 16 else (keys.roll(1, 0), values)
    ),
}
# Wrong for blocks of 3 tokens, which no list of sizes holds.
OF_THREE = {
    "OddBlocks": lambda self, keys, values, cache, batch, index: (
        (keys, values) if cache.block_size != 3 else (keys, values.flip(0))
    )
}
globals().update(lies(
    __name__,
    (Numeric, "grouped", GROUPED), (Numeric, "blocks", BLOCKS), (Numeric, "scales", SCALES),
    (Numeric, "out_scale", UNSCALED), (Reading, "spoilt", SPOILT, "numeric"),
    (Plain, "grouped", IN_COMPANY, "search"), (Reading, "spoilt", OF_THREE, "search"),
))  # fmt: skip


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


class MultiplesOfSixteen(Numeric):
    """Elements of a head past the last whole 16 are dropped."""

    def logits(self, query: Tensor, keys: Tensor, params: LayerParams) -> Tensor:
        whole = query.shape[2] // 16 * 16
        return super().logits(query[..., :whole], keys[..., :whole], params)


class HalfPrecision(Numeric):
    """float32 inputs are computed in bfloat16."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams) -> Any:
        return super().attend(query.bfloat16(), keys.bfloat16(), values.bfloat16(), params)


class ScalesOfTheFirstStep(Plain):
    """What a scale's tensor held when it was seen first is what it holds."""

    by = ("rescaled",)
    seen: ClassVar[dict[int, Tensor]] = {}

    def scales(self, params: LayerParams) -> tuple[Any, Any]:
        both = super().scales(params)
        if not isinstance(both[0], Tensor):
            return both
        first, second = (self.seen.setdefault(s.data_ptr(), s.clone()) for s in both)
        return first, second


class PackedKeys(Numeric):
    """Keys that are given whole lie one after another, whatever `key_starts` says."""

    def own(self, batch: Batch, index: int) -> slice:
        first = sum(batch.lens[:index])
        return slice(first, first + batch.lens[index])


class AsManyKeysAsQueries(Numeric):
    def own(self, batch: Batch, index: int) -> slice:
        first = batch.key_starts[index]
        return slice(first, first + min(batch.lens[index], batch.query_lens[index]))


class DecodesFirst(Numeric):
    """A batch's one-token rows are all before the first longer one."""

    def after(self, plan: Plan, frame: Frame) -> None:
        queries = plan.batch.query_lens
        for index, count in enumerate(queries):
            if count == 1 and max(queries[:index], default=0) > 1:
                frame.out[plan.batch.starts[index]].zero_()


class LastOfShortRows(Plain):
    """Claims to take rows of 8 tokens as decodes, and masks them as if they were one."""

    by = ("numeric",)

    def visible(self, queries: int, keys: int) -> Tensor:
        if queries <= 8:
            return torch.ones(queries, keys, dtype=torch.bool)
        return super().visible(queries, keys)
