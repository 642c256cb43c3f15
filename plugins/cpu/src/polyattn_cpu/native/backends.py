"""NATIVE_ATTN, NATIVE_MLA, NATIVE_STORE: the native kernels as backends, one call for a whole batch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    Addressed,
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Lie,
    NewTokens,
    Plan,
    Reads,
    Rotation,
    StoreBackend,
    StorePlan,
    absorbed,
)
from torch import Tensor

from polyattn_cpu.native.attention import StepPlan, addressed, bound, layer_bytes
from polyattn_cpu.native.library import isa
from polyattn_cpu.native.reading import reads
from polyattn_cpu.native.store import Part, plain, store


class NativePlan(Plan):
    """The step's work items, balanced over torch's threads; the same for every layer."""

    __slots__ = ("attend", "step")

    def __init__(self, batch: Batch, step: StepPlan, paged: bool):
        super().__init__(batch)
        self.step = step
        self.attend = bound(step, batch.block_table if paged else None)


class NativeAttention(AttentionBackend):
    """Decodes, short rows and prefills together. The same bits for any threads, in any batch."""

    name: ClassVar[str] = "NATIVE_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.stored = spec.dtype if cache is None else cache.dtype
        self.layer = layer_bytes(spec, self.stored)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> NativePlan:
        layer = self.layer
        if not batch.causal:
            layer = layer_bytes(self.spec_of(batch), self.stored)
        if self.cache is None:
            step = StepPlan(layer, batch.starts, batch.lens, key_starts=batch.key_starts)
        else:
            step = StepPlan(layer, batch.starts, batch.lens, self.cache.block_size)
        return NativePlan(batch, step, self.cache is not None)

    def reads(self, plan: Plan, batch: Batch) -> Reads:
        assert isinstance(plan, NativePlan)
        size = 0 if self.cache is None else self.cache.block_size
        return reads(self.spec, plan.step, size)

    def addressed(self, plan: Plan, lie: Lie) -> Addressed:
        assert isinstance(plan, NativePlan) and self.cache is None
        return addressed(plan.step, self.spec, lie)

    def run(self, plan: NativePlan, frame: Frame) -> None:
        plan.attend(frame)


class NativeMLA(NativeAttention):
    """MQA whose one key is latent and rope key, and whose value is the key's first part."""

    name: ClassVar[str] = "NATIVE_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)


class NativeStore(StoreBackend):
    """Turns, quantises and scatters queries, keys and values in one call."""

    name: ClassVar[str] = "NATIVE_STORE"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.by = isa()
        self.scatter = plain(self.by)

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        self.scatter(key, value, cache, params.k_scale, params.v_scale, plan.slots)

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        query, key, value = new.query, new.key, new.value
        assert key is not None and value is not None
        biases = new.biases() or (None, None, None)
        out = torch.empty(query.shape, dtype=query.dtype)
        key_out = torch.empty(key.shape, dtype=key.dtype) if keep else None
        value_out = (
            torch.empty(value.shape, dtype=value.dtype) if keep and biases[2] is not None else None
        )
        of_query, of_key = _turn(rotation, query), _turn(rotation, key)
        factors = None if rotation is None else rotation.query_scale
        parts = [
            Part(query, out=out, bias=biases[0], factors=factors, **of_query),
            Part(key, cache.key, params.k_scale, out=key_out, bias=biases[1], **of_key),
        ]
        if not cache.value_in_key:
            parts.append(Part(value, cache.value, params.v_scale, out=value_out, bias=biases[2]))
        store(parts, plan.slots, by=self.by)
        return out, key_out, value if keep and value_out is None else value_out


def _turn(rotation: Rotation | None, x: Tensor) -> dict[str, Any]:
    """Return the fields of a `Part` that turn its heads."""
    if rotation is None or not rotation.size:
        return {}
    return {
        "turns": rotation.turns,
        "first": rotation.offset(x.shape[2]),
        "neighbours": rotation.pairing == "gptj",
    }
