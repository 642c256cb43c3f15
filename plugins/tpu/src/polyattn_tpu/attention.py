"""PALLAS_ATTN: plans tiles on the host in bucketed shapes, calls the Pallas kernel."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    BatchError,
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
)
from torch import Tensor

from polyattn_tpu.bridge import to_jax, to_torch
from polyattn_tpu.configs import pages_per_step, tile_tokens
from polyattn_tpu.kernel import Form, interpreted, paged_attention


def bucket(count: int, least: int = 8) -> int:
    """Return the next power of two: the shapes that are compiled for."""
    return max(least, 1 << (max(count, 1) - 1).bit_length())


def pages_of(cached: Tensor) -> tuple[Tensor, int]:
    """View a cache as (pages, KV heads, page, size), compact, and say how far its pages lie apart.

    In layout HND a page of one head lies in one piece, as the TPU's DMA and tiles want it. Where K
    and V share a storage, the pages between are the other's. Raises `BatchError`.
    """
    pages = cached.transpose(1, 2)
    count, heads, block, size = pages.shape
    whole = heads * block * size
    stride = pages.stride()
    if stride[1:] != (block * size, size, 1) or stride[0] % whole:
        raise BatchError(
            f"the cache's strides {tuple(cached.stride())} are not those of whole HND pages; allocate "
            "it with group.allocate_cache(n)"
        )
    apart = stride[0] // whole
    compact = (whole, block * size, size, 1)
    return pages.as_strided(((count - 1) * apart + 1, heads, block, size), compact), apart


class TilePlan(Plan):
    """The queries laid out in tiles; every array's shape is a power of two.

    Tiles of padding belong to a sequence of no tokens, which is put behind the real ones.
    """

    __slots__ = ("arrays", "padded", "tokens")

    def __init__(self, spec: LayerSpec, batch: Batch):
        super().__init__(batch)
        assert batch.block_table is not None
        decode = batch.all_decode
        self.tokens = step = 1 if decode else tile_tokens(spec)
        seqs = bucket(batch.num_seqs + 1)
        tiles = [
            (seq, first)
            for seq, count in enumerate(batch.query_lens)
            for first in range(0, count, step)
        ]
        count = bucket(len(tiles))
        tile = np.full((2, count), batch.num_seqs, dtype=np.int32)
        tile[1] = 0
        self.padded = bucket(batch.num_tokens)
        take = np.zeros((count, step), dtype=np.int32)
        put = np.zeros(self.padded, dtype=np.int32)
        for index, (seq, first) in enumerate(tiles):
            tile[:, index] = seq, first
            size = min(step, batch.query_lens[seq] - first)
            start = batch.starts[seq] + first
            take[index, :size] = np.arange(start, start + size)
            put[start : start + size] = index * step + np.arange(size)
        lens = np.zeros((2, seqs), dtype=np.int32)
        lens[0, : batch.num_seqs] = batch.query_lens
        lens[1, : batch.num_seqs] = batch.lens
        pages = batch.block_table.cpu().numpy()
        table = np.zeros((seqs, bucket(pages.shape[1])), dtype=np.int32)
        table[: batch.num_seqs, : pages.shape[1]] = pages
        self.arrays = (take.reshape(-1), put, tile[0], tile[1], lens[0], lens[1], table)


class PallasAttention(AttentionBackend):
    """One ragged kernel for prefill, decode and mixed batches."""

    name: ClassVar[str] = "PALLAS_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.interpret = interpreted()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> TilePlan:
        return TilePlan(self.spec, batch)

    def run(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert isinstance(plan, TilePlan) and cache is not None
        count = query.shape[0]
        if not count:
            return
        spec = self.spec
        quantized = cache.key.dtype.itemsize == 1
        (key_pages, stride), (value_pages, other) = pages_of(cache.key), pages_of(cache.value)
        if stride != other:
            raise BatchError(
                f"pages of K lie {stride} apart and those of V {other}; store both alike, or allocate "
                "the cache with group.allocate_cache(n)"
            )
        form = Form(
            spec.scale, spec.causal, spec.sliding_window, spec.chunk_size, spec.logit_soft_cap,
            params.k_scale if quantized else 1.0, params.v_scale if quantized else 1.0,
            plan.tokens, spec.gqa_ratio, pages_per_step(cache.block_size), stride,
            lse is not None or spec.learned_sinks,
        )  # fmt: skip
        padded = query.new_zeros(plan.padded, *query.shape[1:])
        padded[:count] = query
        result, found = paged_attention(
            to_jax(padded), to_jax(key_pages), to_jax(value_pages), *plan.arrays,
            None if params.sinks is None else to_jax(params.sinks), form=form,
            interpret=self.interpret,
        )  # fmt: skip
        out.copy_(to_torch(result)[:count])
        if lse is not None:
            lse.copy_(to_torch(found)[:count])
