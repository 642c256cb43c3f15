"""A pytest plugin that lets the CUDA adapters run on CPU tensors: their store, the chip's size."""

from __future__ import annotations

from types import SimpleNamespace

import polyattn_cuda.base
import polyattn_fakes
import torch
from polyattn import KVCache, LayerParams
from torch import Tensor


def write_kv(
    key: Tensor, value: Tensor, cache: KVCache, slots: Tensor, params: LayerParams
) -> None:
    """What the store's kernel does, in torch."""
    cache.write(key, value, slots, params.k_scale, params.v_scale)


polyattn_cuda.base.write_kv = write_kv
polyattn_fakes.EMPTY_ROW = 0.0  # flash-attn's CUDA kernels write zeros there, and say so
torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
