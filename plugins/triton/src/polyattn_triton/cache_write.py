"""Stores a step's keys and values in one launch, for this plugin and the vendors'."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from polyattn import KVCache, LayerParams
from torch import Tensor

from polyattn_triton.launch import Launcher


@triton.jit
def write_kernel(
    KEY, VALUE, K, V, SLOTS, k_inv, v_inv, limit,
    key_t, key_h, value_t, value_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values at its slot. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        offs = tl.arange(0, BLOCK)
        head = offs // D
        at = offs % D
        x = tl.load(KEY + token * key_t + head * key_h + at, mask=head < HEADS)
        if QUANTIZED:
            x = tl.minimum(tl.maximum(x.to(tl.float32) * k_inv, -limit), limit)
            if INTEGER:
                x = tl.floor(x + 0.5)
        to = K + block * k_b + offset * k_t + head * k_h + at
        tl.store(to, x.to(K.dtype.element_ty), mask=head < HEADS)
        head = offs // DV
        at = offs % DV
        y = tl.load(VALUE + token * value_t + head * value_h + at, mask=head < HEADS)
        if QUANTIZED:
            y = tl.minimum(tl.maximum(y.to(tl.float32) * v_inv, -limit), limit)
            if INTEGER:
                y = tl.floor(y + 0.5)
        to = V + block * v_b + offset * v_t + head * v_h + at
        tl.store(to, y.to(V.dtype.element_ty), mask=head < HEADS)


_write = Launcher(write_kernel)


def write_kv(
    key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor, params: LayerParams
) -> None:
    """`KVCache.write` in one kernel: same arguments, same result, slot -1 skips."""
    tokens, heads, size = key.shape
    if tokens == 0:
        return
    dtype = cache.key.dtype
    quantized = dtype.itemsize == 1
    integer = dtype == torch.int8
    limit = 127.0 if integer else torch.finfo(dtype).max if quantized else 0.0
    width = heads * max(size, value.shape[2])
    k, v = cache.key.stride(), cache.value.stride()
    _write(
        (tokens, 1, 1),
        (key, value, cache.key, cache.value, slot_mapping),
        (1.0 / params.k_scale, 1.0 / params.v_scale, limit),
        (
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            k[0], k[1], k[2], v[0], v[1], v[2],
        ),
        (),
        (
            heads, size, value.shape[2], triton.next_power_of_2(width), cache.block_size, quantized,
            integer,
        ),
        {"num_warps": 4 if width >= 512 else 1},
    )  # fmt: skip
