"""TRITON_STORE: a step's keys and values go to their slots in one launch, quantised as torch does it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from polyattn.kernel import (
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    NewTokens,
    Rotation,
    StoreBackend,
    StorePlan,
    prepared,
)
from torch import Tensor

from polyattn_triton.functions.row_writers import Writer, writer
from polyattn_triton.functions.rows import by_hand
from polyattn_triton.kernels.four_bit_store import store_four_bits
from polyattn_triton.kernels.rotated_store import rotate_and_store
from polyattn_triton.kernels.rounding import limit_of, rounded, scale_of
from polyattn_triton.kernels.row_store import store_rows
from polyattn_triton.kernels.tiles import in_elements
from polyattn_triton.launch import Launcher, Site, launches_early
from polyattn_triton.variants import SCALES


@triton.jit
def write_kernel(
    KEY, VALUE, K, V, SLOTS, K_SCALE, V_SCALE, k_scale, v_scale, limit,
    key_t, key_h, value_t, value_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr, INTEGER: tl.constexpr,
    LATENT: tl.constexpr, SCALES: tl.constexpr, EARLY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values at its slot; a latent's value is its key's. Grid: (tokens,)."""
    if EARLY:  # scheduled while the kernel that makes the keys ran
        tl.extra.cuda.gdc_wait()
    key_t, key_h, value_t, value_h = in_elements((key_t, key_h, value_t, value_h), UNIT)
    k_b, k_t, k_h, v_b, v_t, v_h = in_elements((k_b, k_t, k_h, v_b, v_t, v_h), UNIT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        offs = tl.arange(0, BLOCK)
        head = (offs // D).to(tl.int64)
        at = offs % D
        x = tl.load(KEY + token * key_t + head * key_h + at, mask=head < HEADS)
        if QUANTIZED:
            x = rounded(x, scale_of(k_scale, K_SCALE, head, HEADS, SCALES), limit, INTEGER)
        to = K + block * k_b + offset * k_t + head * k_h + at
        tl.store(to, x.to(K.dtype.element_ty), mask=head < HEADS)
        if not LATENT:
            head = (offs // DV).to(tl.int64)
            at = offs % DV
            y = tl.load(VALUE + token * value_t + head * value_h + at, mask=head < HEADS)
            if QUANTIZED:
                y = rounded(y, scale_of(v_scale, V_SCALE, head, HEADS, SCALES), limit, INTEGER)
            to = V + block * v_b + offset * v_t + head * v_h + at
            tl.store(to, y.to(V.dtype.element_ty), mask=head < HEADS)


_write = Launcher(write_kernel)


class TritonStore(StoreBackend):
    """One program a token; slot -1 skips."""

    name: ClassVar[str] = "TRITON_STORE"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.writers: tuple[Writer, Writer] | None = None
        self.tables: tuple[Tensor, Tensor] | None = None
        self.sites: dict[Any, tuple[Site, float]] = {}
        self.early = launches_early(device.arch)
        rows = None if cache is None else cache.rows
        if cache is not None and rows is not None and not all(map(by_hand, rows)):
            key = writer(rows[0], cache.head_size)
            value = key if cache.value_in_key else writer(rows[1], cache.v_head_size)
            self.writers = key, value

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the writers' inputs, copied to the device once."""
        if self.tables is None:
            assert self.writers is not None
            self.tables = self.writers[0].table(device), self.writers[1].table(device)
        return self.tables

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        tokens, of_key, of_value = key.shape[0], key.stride(), value.stride()
        if tokens == 0:
            return
        if of_key[2] != 1 or of_value[2] != 1:
            self.run(plan, key.contiguous(), value.contiguous(), cache, params)
            return
        k_scale, v_scale, slots = params.k_scale, params.v_scale, plan.slots
        by_tensors = isinstance(k_scale, Tensor)
        scales = (k_scale, v_scale) if by_tensors else (slots, slots)
        numbers = (1.0, 1.0) if by_tensors else (k_scale, v_scale)
        by = SCALES[self.spec.scales]
        if self.writers is not None:
            store_rows(
                plan, key, value, cache, scales, numbers, by, self.writers, self._tables(key.device)
            )
            return
        if cache.key.dtype == torch.uint8:
            store_four_bits(plan, key, value, cache, scales, numbers, by)
            return
        tensors = (key, value, cache.key, cache.value, slots, *scales)
        # All that decides the site, but for what the backend is of.
        lies = of_key, of_value, key.dtype, cache.strides, by_tensors
        launch = self.sites.get(lies)
        if launch is None:
            launch = self.sites[lies] = self._site(tensors, cache, by)
        site, limit = launch
        site((tokens, 1, 1), tensors, (*numbers, limit), ())

    def _site(self, tensors: tuple[Tensor, ...], cache: KVCache, by: int) -> tuple[Site, float]:
        """Return the kernel for tensors that lie like these, and the largest number that is stored."""
        key, value, keys, values = tensors[:4]
        (_, heads, size), dtype = key.shape, keys.dtype
        width = heads * (size if cache.value_in_key else max(size, value.shape[2]))
        ints = *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3]
        constants = (
            heads, size, value.shape[2], triton.next_power_of_2(width), cache.block_size,
            dtype != key.dtype, dtype == torch.int8, cache.value_in_key, by, self.early,
        )  # fmt: skip
        options = {"num_warps": 4 if width >= 512 else 1}
        options |= {"launch_pdl": True} if self.early else {}
        return _write.site(tensors, ints, constants, options), limit_of(dtype, key.dtype)

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if cache.key.dtype != torch.uint8:
            by = SCALES[self.spec.scales]
            return rotate_and_store(plan, rotation, new, cache, params, keep, by)
        # Pairs lie apart in blocks of four bits. Here torch rotates, and stored numbers round once.
        dtype = new.query.dtype
        query, key, value = prepared(new, rotation)
        assert key is not None and value is not None
        if cache.key.dtype == dtype:
            key, value = key.to(dtype), value.to(dtype)
        self.run(plan, key, value, cache, params)
        return query.to(dtype), key.to(dtype) if keep else None, value.to(dtype) if keep else None
