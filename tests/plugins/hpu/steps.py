"""Random steps over a paged cache, and Unified Attention over them beside the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from polyattn import Batch, KVCache, LayerSpec
from polyattn.families.attention import reference
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.runtime.store import scatter
from polyattn_hpu import unified
from polyattn_hpu.buckets import EXACT, Rounding
from polyattn_hpu.metadata import Metadata, build
from torch import Tensor


@dataclass
class Step:
    """Inputs of one layer; the new tokens are in the cache already, unused cache is NaN."""

    spec: LayerSpec
    batch: Batch
    query: Tensor
    key: Tensor
    value: Tensor
    cache: KVCache

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    def metadata(self, fresh: bool = True, rounding: Rounding = EXACT) -> Metadata:
        assert self.batch.block_table is not None
        return build(
            self.spec, self.batch.query_lens, self.batch.lens, self.batch.block_table.numpy(),
            self.block_size, fresh=fresh, rounding=rounding,
        )  # fmt: skip

    def scoring(self) -> unified.Scoring:
        slopes = alibi_slopes(self.spec.num_heads) if self.spec.alibi else None
        return unified.Scoring(self.spec.scale, self.spec.logit_soft_cap, slopes, torch.float64)

    def unified(self, fresh: bool = True, rounding: Rounding = EXACT) -> tuple[Tensor, Tensor]:
        meta = self.metadata(fresh, rounding)
        rows = meta.bucket.query
        query = pad(self.query, rows)
        key, value = (pad(t, meta.bucket.own_rows) for t in (self.key, self.value))
        found = unified.attend(
            meta, query, key if fresh else None, value if fresh else None,
            (self.cache.key, self.cache.value), self.scoring(),
        )  # fmt: skip
        output, lse = unified.normalize(found)
        return output[: self.batch.num_tokens], lse[: self.batch.num_tokens]

    def reference(self) -> tuple[Tensor, Tensor]:
        return reference.forward(
            self.spec, self.query, self.key, self.value, self.cache, self.batch
        )


def pad(tensor: Tensor, rows: int) -> Tensor:
    more = tensor.new_zeros(max(0, rows - len(tensor)), *tensor.shape[1:])
    return torch.cat([tensor[:rows], more])


def step(
    query_lens: list[int],
    contexts: list[int],
    table: list[list[int]],
    block_size: int = 4,
    num_blocks: int | None = None,
    seed: int = 0,
    **spec: Any,
) -> Step:
    """Return a step in float64; equal blocks in the table are a shared prefix, written once."""
    made = LayerSpec(
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float64"} | spec
    )
    lens = [c + q for c, q in zip(contexts, query_lens, strict=True)]
    width = max([len(row) for row in table] + [1])
    blocks = torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32)
    batch = Batch.from_lens(query_lens, lens, blocks, block_size)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = num_blocks or int(blocks.max()) + 1
    size = (count, block_size, made.num_kv_heads)
    cache = KVCache(
        torch.full((*size, made.head_size), torch.nan, dtype=torch.float64),
        torch.full((*size, made.v_head_size), torch.nan, dtype=torch.float64),
    )
    for row, context in zip(table, contexts, strict=True):
        for index, block in enumerate(row):
            used = min(block_size, max(0, context - index * block_size))
            for stored in (cache.key, cache.value):
                new = random(used, *stored.shape[2:])
                where = torch.isnan(stored[block, :used])
                stored[block, :used] = torch.where(where, new, stored[block, :used])
    tokens = batch.num_tokens
    query = random(tokens, made.num_heads, made.head_size)
    key = random(tokens, made.num_kv_heads, made.head_size)
    value = random(tokens, made.num_kv_heads, made.v_head_size)
    assert batch.slot_mapping is not None
    scatter(cache.key, key, batch.slot_mapping)
    scatter(cache.value, value, batch.slot_mapping)
    return Step(made, batch, query, key, value, cache)
