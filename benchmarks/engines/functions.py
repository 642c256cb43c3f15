"""flash-attn's functions on the GPU: beside the formula in float64, and in captured graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines import DEVICE, Captured

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "integrations" / "flash_attn" / "tests"))

HEADS, KV_HEADS, SIZE = 8, 2, 64
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""The largest difference of an output of about 1."""


def worst(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference; NaN is infinitely wrong."""
    return float((found.double() - wanted).abs().nan_to_num(nan=torch.inf).max())


def wanted_of(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Return the formula's output in float64, 0 where a query sees nothing; computed where q lies."""
    from test_flash_attn import expected

    with torch.device(q.device):
        return expected(q, k, v, **given)[0].nan_to_num()


@torch.no_grad()
def forward_cases(dtype: torch.dtype, seeds: range) -> dict[str, Any]:
    """Dense, packed and cached calls of random options, as the CPU's tests draw them."""
    from polyattn_flash_attn import flash_attn_2 as fa
    from test_flash_attn import draw, formula

    errors: dict[str, float] = {"dense": 0.0, "packed": 0.0, "cache": 0.0}

    def tensors(tokens: int, keys: int) -> tuple[Tensor, ...]:
        sizes = (tokens, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)
        return tuple(torch.randn(2, n, h, SIZE, device=DEVICE, dtype=dtype) for n, h in sizes)

    for seed in seeds:
        torch.manual_seed(seed)
        given = draw(seed)
        wants = formula(given)
        q, k, v = tensors(*torch.randint(1, 300, (2,)).tolist())
        out = fa.flash_attn_func(q, k, v, **given)
        cu_q, cu_k = (
            torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE)
            for n in (q.shape[1], k.shape[1])
        )
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        packed = fa.flash_attn_varlen_func(
            *flat, cu_q, cu_k, q.shape[1], k.shape[1], **given
        ).view_as(out)
        for row in range(2):
            wanted = wanted_of(q[row], k[row], v[row], **wants)
            errors["dense"] = max(errors["dense"], worst(out[row], wanted))
            errors["packed"] = max(errors["packed"], worst(packed[row], wanted))
        errors["cache"] = max(errors["cache"], _cached(fa, seed, dtype, given, wants))
    limit = LIMIT[dtype]
    return errors | {"seeds": len(seeds), "right": all(e <= limit for e in errors.values())}


def _cached(fa: Any, seed: int, dtype: torch.dtype, given: Any, wants: Any) -> float:
    """Return the error of a step over pages, new tokens appended."""
    queries, page = (1, 1, 3)[seed % 3], 256
    lens = torch.randint(1, 700, (4,)).tolist()
    k_cache, v_cache = (
        torch.randn(16, page, KV_HEADS, SIZE, device=DEVICE, dtype=dtype) for _ in range(2)
    )
    table = torch.randperm(16).view(4, 4)
    q = torch.randn(4, queries, HEADS, SIZE, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(4, queries, KV_HEADS, SIZE, device=DEVICE, dtype=dtype) for _ in range(2))
    found = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        block_table=table.int().to(DEVICE), **given,
    )  # fmt: skip
    error = 0.0
    for row, length in enumerate(lens):
        kept = [c[table[row].to(DEVICE)].flatten(0, 1)[:length] for c in (k_cache, v_cache)]
        keys, values = torch.cat([kept[0], k[row]]), torch.cat([kept[1], v[row]])
        wanted = wanted_of(q[row], keys, values, **wants)
        error = max(error, worst(found[row], wanted))
    return error


@torch.no_grad()
def captured(rows: int, paged: bool, tokens: int = 1) -> dict[str, Any]:
    """A captured step that appends and attends, replayed over lengths and tables that change."""
    from polyattn_flash_attn import flash_attn_2 as fa

    page, width, dtype = 256, 8, torch.bfloat16
    if paged:
        k_cache, v_cache = (
            torch.randn(rows * width, page, KV_HEADS, SIZE, device=DEVICE, dtype=dtype)
            for _ in range(2)
        )
    else:
        k_cache, v_cache = (
            torch.randn(rows, width * page, KV_HEADS, SIZE, device=DEVICE, dtype=dtype)
            for _ in range(2)
        )
    lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(rows, width, dtype=torch.int32, device=DEVICE)
    q = torch.randn(rows, tokens, HEADS, SIZE, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(rows, tokens, KV_HEADS, SIZE, device=DEVICE, dtype=dtype) for _ in range(2))

    def step() -> Tensor:
        return fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True,
            block_table=table if paged else None,
        )  # fmt: skip

    step_ = Captured(step)
    error = 0.0
    for _ in range(6):
        chosen = torch.randint(0, width * page - tokens, (rows,))
        order = torch.randperm(rows * width).view(rows, width)
        lens.copy_(chosen)
        table.copy_(order)
        for tensor in (q, k, v):
            tensor.normal_()
        out = step_.replay()
        for row in range(0, rows, max(1, rows // 4)):
            length = int(chosen[row]) + tokens
            if paged:
                kept = [c[order[row].to(DEVICE)].flatten(0, 1)[:length] for c in (k_cache, v_cache)]
            else:
                kept = [c[row, :length] for c in (k_cache, v_cache)]
            wanted = wanted_of(q[row], *kept, causal=True)
            error = max(error, worst(out[row], wanted))
    return {"error": error, "right": error <= LIMIT[dtype]}
