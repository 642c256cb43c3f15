"""What do formats' papers, and engines that have them, make of rows? Their formulas, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ml_dtypes = pytest.importorskip("ml_dtypes")
SIZES = {"fp8_ds_mla": (576,), "fp8_ds_v4": (512,)}
"""Of rows, where a format has one; others have many."""


def e2m1_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = x.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return found


def by_nvfp4(x: Tensor) -> Tensor:
    """What NVFP4 makes of float32 (…, size), by ml_dtypes' roundings."""
    blocks = x.numpy().reshape(*x.shape[:-1], -1, 16)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(6)
    scale = np.minimum(scale, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scale == 0, np.float32(0), blocks / scale)
    return torch.from_numpy((e2m1_of(ratio) * scale).reshape(x.shape)).float()


def by_mxfp4(x: Tensor) -> Tensor:
    """OCP Microscaling Formats 1.0, section 6.3, in float64: shared exponent floor(log2(max)) - 2."""
    blocks = x.double().numpy().reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.clip(np.floor(np.log2(np.maximum(largest, 1e-300))) - 2, -127, 127))
    return torch.from_numpy((e2m1_of(blocks / scale) * scale).reshape(x.shape)).float()


def by_q4_0(x: Tensor) -> Tensor:
    """ggml's q4_0: a group's largest magnitude, with its sign, is -8 steps of float16."""
    groups = x.double().numpy().reshape(*x.shape[:-1], -1, 32)
    at = np.abs(groups).argmax(-1)[..., None]
    step = (np.take_along_axis(groups, at, -1) / -8).astype(np.float16).astype(np.float64)
    codes = np.trunc(groups / step + 8.5).clip(0, 15)
    return torch.from_numpy(((codes - 8) * step).reshape(x.shape)).float()


def by_kivi(bits: int, x: Tensor) -> Tensor:
    """KIVI's section 3.1: z = min, s = (max - min) / (2^B - 1), both kept in float16."""
    groups = x.double().numpy().reshape(*x.shape[:-1], -1, 32)
    least = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
    step = (groups.max(-1, keepdims=True) - least) / (2**bits - 1)
    step = step.astype(np.float16).astype(np.float64)
    codes = np.rint((groups - least) / step).clip(0, 2**bits - 1)
    return torch.from_numpy((codes * step + least).reshape(x.shape)).float()


def by_scale(largest: float, dtype: Any, x: Tensor) -> Tensor:
    """A row over its largest magnitude: vLLM's per-token-head scales."""
    rows = x.double().numpy()
    scale = (np.abs(rows).max(-1, keepdims=True) / largest).astype(np.float32).astype(np.float64)
    ratio = rows / scale
    codes = (
        np.rint(ratio).clip(-127, 127) if dtype is None else ratio.astype(np.float32).astype(dtype)
    )
    return torch.from_numpy(codes.astype(np.float64) * scale).float()


def by_turboquant(levels: Sequence[float], x: Tensor) -> Tensor:
    """TurboQuant's algorithm 1: each turned element's nearest level; the turn is a dense matrix here."""
    at = np.arange(x.shape[-1])
    ones = np.array([[(i & j).bit_count() for j in at.tolist()] for i in at.tolist()])
    turn = (-1.0) ** (ones + (at * 40503 >> 7)) * len(at) ** -0.5
    rows = x.double().numpy()
    norm = np.linalg.norm(rows, axis=-1, keepdims=True).astype(np.float16).astype(np.float64)
    norm = norm * len(at) ** -0.5
    codes = np.abs((rows @ turn.T / norm)[..., None] - np.array(levels)).argmin(-1)
    return torch.from_numpy(np.array(levels)[codes] @ turn * norm).float()


def by_latent(size: int, group: int, exact: bool, x: Tensor) -> Tensor:
    """DeepSeek's latents: e4m3 by groups, and 64 in bfloat16; a scale is float32, or a power of two.

    vLLM's `concat_and_cache_ds_mla` writes float32 scales, FlashMLA's `tests/quant.py` V4's.
    """
    groups = x[:, :size].double().numpy().reshape(len(x), -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / 448
    scale = scale.astype(np.float32) if exact else np.exp2(np.ceil(np.log2(scale)))
    codes = (groups / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    eight = torch.from_numpy((codes * scale).reshape(len(x), size)).float()
    return torch.cat([eight, x[:, size:].bfloat16().float()], -1)


PUBLISHED = {
    "fp8_ds_mla": lambda x: by_latent(512, 128, True, x),
    "fp8_ds_v4": lambda x: by_latent(448, 64, False, x),
    "nvfp4": by_nvfp4,
    "mxfp4": by_mxfp4,
    "int4": by_q4_0,
    "kivi4": lambda x: by_kivi(4, x),
    "kivi2": lambda x: by_kivi(2, x),
    "int8_rows": lambda x: by_scale(127, None, x),
    "e4m3_rows": lambda x: by_scale(448, ml_dtypes.float8_e4m3fn, x),
}
