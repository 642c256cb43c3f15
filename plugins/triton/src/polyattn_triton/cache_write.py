"""Stores a step's keys and values in one launch, for this plugin and the vendors'."""

from __future__ import annotations

import torch
import triton
from polyattn import KVCache, LayerParams
from torch import Tensor

from polyattn_triton.kernels import write_kernel
from polyattn_triton.launch import Launcher

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
