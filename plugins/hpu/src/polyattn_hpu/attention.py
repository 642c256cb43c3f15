"""HPU_ATTN, HPU_MLA: Unified Attention behind polyattn's interface, on Gaudi and CPU alike."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    Reads,
    Role,
    absorbed,
    quantize,
)
from torch import Tensor

from polyattn_hpu import unified
from polyattn_hpu.buckets import Rounding
from polyattn_hpu.metadata import Metadata, build
from polyattn_hpu.reading import reads_of

ROUNDING = Rounding()


class UnifiedPlan(Plan):
    """A step's metadata, with or without the step's own keys.

    A layer's call decides which of the two it needs (with key None, all keys are in the cache). The
    unexpected one is made at the first such call, once for all layers.
    """

    __slots__ = ("_block_size", "_made", "_spec", "_table")

    def __init__(self, batch: Batch, spec: LayerSpec, block_size: int):
        super().__init__(batch)
        self._spec, self._block_size = spec, block_size
        self._table: NDArray[np.int32] | None = None
        if batch.block_table is not None and spec.cached:
            self._table = batch.block_table.cpu().numpy().copy()
        self._made: dict[bool, Metadata] = {}
        self.metadata(fresh=spec.role is Role.DECODER)

    @property
    def detail(self) -> str:
        """Which parts the step's graph has: "csu" is causal, shared and unique, "-" an absent one."""
        return "phase " + ", ".join(made.bucket.phase for made in self._made.values())

    def metadata(self, fresh: bool) -> Metadata:
        """Return the metadata for a call with own keys (`fresh`) or without."""
        batch = self.batch
        fresh &= batch.max_query_len > 1  # one token's own key is read from the cache
        if fresh not in self._made:
            self._made[fresh] = build(
                self._spec, batch.query_lens, batch.lens, self._table, self._block_size,
                fresh=fresh, key_starts=batch.key_starts, rounding=ROUNDING, device=batch.device,
            )  # fmt: skip
        return self._made[fresh]


class UnifiedAttention(AttentionBackend):
    """Pads a step to its bucket, runs the three parts, divides once."""

    name: ClassVar[str] = "HPU_ATTN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> UnifiedPlan:
        size = 1 if self.cache is None else self.cache.block_size
        return UnifiedPlan(batch, self.spec_of(batch), size)

    def reads(self, plan: Plan, batch: Batch) -> Reads:
        assert isinstance(plan, UnifiedPlan)
        spec = self.spec_of(batch)
        meta = plan.metadata(fresh=spec.role is Role.DECODER)
        table = None
        if batch.block_table is not None and spec.cached:
            table = batch.block_table.cpu().numpy()
        return reads_of(spec, meta, batch, table)

    def run(self, plan: UnifiedPlan, frame: Frame) -> None:
        query, key, value = frame.query, frame.key, frame.value
        cache, params = frame.cache, frame.params
        spec = self.spec
        meta = plan.metadata(fresh=key is not None)
        tokens, bucket = query.shape[0], meta.bucket
        if key is not None and value is not None:
            key, value = _rows(key, bucket.own_rows), _rows(value, bucket.own_rows)
            key, value = _as_stored(key, value, cache, params)
        quantised = cache is not None and cache.key.dtype != query.dtype
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        scoring = unified.Scoring(
            spec.scale * (params.k_scale if quantised else 1.0),
            spec.logit_soft_cap,
            params.alibi_slopes,
            dtype,
        )
        stored: unified.Cache | None = None
        if cache is not None:
            latent = cache.value_in_key
            stored = (cache.key, cache.value.shape[3] if latent else cache.value)
        partial = unified.attend(meta, _rows(query, bucket.query), key, value, stored, scoring)
        if partial.value is None:
            like = frame.out.new_empty(0, dtype=dtype)
            partial = unified.nothing(bucket.query, spec.num_heads, spec.v_head_size, like)
        if params.sinks is not None:
            partial = unified.combine(partial, _sinks(params.sinks.to(dtype), partial))
        output, logsum = unified.normalize(partial)
        frame.out.copy_(output[:tokens] * params.v_scale if quantised else output[:tokens])
        if frame.lse is not None:
            frame.lse.copy_(logsum[:tokens])


class UnifiedMLA(UnifiedAttention):
    """Absorbed MLA decode: MQA whose one key is a latent, and whose value is the key's first part."""

    name: ClassVar[str] = "HPU_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)


def _as_stored(
    key: Tensor, value: Tensor, cache: KVCache | None, params: LayerParams
) -> tuple[Tensor, Tensor]:
    """Return the step's own keys and values as the cache holds them, rounded where it is 8-bit."""
    if cache is None:
        return key, value
    return (
        quantize(key, cache.key.dtype, params.k_scale),
        quantize(value, cache.value.dtype, params.v_scale),
    )


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Cut or pad to `count` rows, zeros behind."""
    if tensor.shape[0] >= count:
        return tensor[:count]
    return torch.cat([tensor, tensor.new_zeros(count - tensor.shape[0], *tensor.shape[1:])])


def _sinks(sinks: Tensor, part: unified.Partial) -> unified.Partial:
    """Return the partial of the learned sinks: a score each, and no value; nothing beside nothing."""
    assert part.value is not None and part.total is not None
    empty = part.total == 0
    return unified.Partial(
        torch.zeros_like(part.value),
        sinks.expand_as(part.total).masked_fill(empty, -torch.inf),
        torch.ones_like(part.total).masked_fill(empty, 0.0),
    )
