"""flash-attn's functions on FlashAttention-3 itself: the other side that ours are held to.

The kernels are vLLM's build of FlashAttention-3 (`_vllm_fa3_C`), called as its wrapper does; on Hopper
they are faster than flash-attn 2's, which nano-vllm was written for.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool,
    starts_q: Tensor | None = None, longest_q: int | None = None, longest_k: int | None = None,
    starts_k: Tensor | None = None, lens: Tensor | None = None, table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(q)
    torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, out, starts_q, starts_k, None, None, lens, longest_q, longest_k,
        table, None, None, None, None, None, None, None, None, scale or q.shape[-1] ** -0.5, causal,
        -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out


@lru_cache(maxsize=1024)
def _one_each(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count + 1, dtype=torch.int32, device=device)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Dense rows, (batch, seqlen, heads, size)."""
    return _fwd(q, k, v, scale=None, causal=causal)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
    cu_seqlens_k: Tensor, softmax_scale: float | None = None, causal: bool = False,
    block_table: Tensor | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """Packed queries over packed keys, or over pages."""
    given: dict[str, Any] = {"starts_k": cu_seqlens_k}
    if block_table is not None:
        given = {"lens": cu_seqlens_k.diff(), "table": block_table}
    return _fwd(
        q, k, v, scale=softmax_scale, causal=causal, starts_q=cu_seqlens_q, longest_q=max_seqlen_q,
        longest_k=max_seqlen_k, **given,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float | None = None, causal: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """One query token a row, over pages."""
    rows = q.shape[0]
    out = _fwd(
        q[:, 0], k_cache, v_cache, scale=softmax_scale, causal=causal,
        starts_q=_one_each(rows, q.device), longest_q=1,
        longest_k=block_table.shape[1] * k_cache.shape[1], lens=cache_seqlens, table=block_table,
    )  # fmt: skip
    return out[:, None]


def load() -> ModuleType:
    """Load the kernels; returns this module, which stands for flash_attn. Raises where there are none."""
    from polyattn_cuda.providers import vllm_library

    torch.ops.load_library(str(vllm_library("_vllm_fa3_C")))
    return sys.modules[__name__]
