"""flash-attn's functions on the GPU: beside the formula in float64, in captured graphs, and host time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
    """Return the largest difference, infinite numbers alike counting none."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return float((found - wanted).abs().masked_fill(same, 0.0).max())


@torch.no_grad()
def forward_cases(dtype: torch.dtype, seeds: int) -> dict[str, Any]:
    """Dense, packed and cached calls of random options, as the CPU's tests draw them."""
    from polyattn_flash_attn import flash_attn_2 as fa
    from test_flash_attn import draw, expected, formula

    errors: dict[str, float] = {"dense": 0.0, "packed": 0.0, "cache": 0.0}

    def tensors(tokens: int, keys: int) -> tuple[Tensor, ...]:
        sizes = (tokens, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)
        return tuple(torch.randn(2, n, h, SIZE, device=DEVICE, dtype=dtype) for n, h in sizes)

    for seed in range(seeds):
        torch.manual_seed(seed)
        given = draw(seed)
        if "alibi_slopes" in given:
            given["alibi_slopes"] = torch.rand(HEADS) * 0.5
        host = formula(given)
        q, k, v = tensors(*torch.randint(1, 300, (2,)).tolist())
        device = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in given.items()}
        out = fa.flash_attn_func(q, k, v, **device)
        cu_q, cu_k = (
            torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE)
            for n in (q.shape[1], k.shape[1])
        )
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        packed = fa.flash_attn_varlen_func(
            *flat, cu_q, cu_k, q.shape[1], k.shape[1], **device
        ).view_as(out)
        for row in range(2):
            wanted = expected(q[row].cpu(), k[row].cpu(), v[row].cpu(), **host)[0].nan_to_num()
            errors["dense"] = max(errors["dense"], worst(out[row], wanted))
            errors["packed"] = max(errors["packed"], worst(packed[row], wanted))
        errors["cache"] = max(errors["cache"], _cached(fa, seed, dtype, device, host))
    limit = LIMIT[dtype]
    return errors | {"seeds": seeds, "right": all(e <= limit for e in errors.values())}


def _cached(fa: Any, seed: int, dtype: torch.dtype, device: Any, host: Any) -> float:
    """Return the error of a step over pages, new tokens appended."""
    from test_flash_attn import expected

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
        block_table=table.int().to(DEVICE), **device,
    )  # fmt: skip
    error = 0.0
    for row, length in enumerate(lens):
        kept = [c[table[row].to(DEVICE)].flatten(0, 1)[:length] for c in (k_cache, v_cache)]
        keys, values = kept[0].cpu(), kept[1].cpu()
        keys, values = torch.cat([keys, k[row].cpu()]), torch.cat([values, v[row].cpu()])
        wanted = expected(q[row].cpu(), keys, values, **host)[0].nan_to_num()
        error = max(error, worst(found[row], wanted))
    return error


@torch.no_grad()
def captured(rows: int, paged: bool) -> dict[str, Any]:
    """A captured step that appends and attends, replayed over lengths and tables that change."""
    from polyattn_flash_attn import flash_attn_2 as fa
    from test_flash_attn import expected

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
    q = torch.randn(rows, 1, HEADS, SIZE, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(rows, 1, KV_HEADS, SIZE, device=DEVICE, dtype=dtype) for _ in range(2))

    def step() -> Tensor:
        return fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True,
            block_table=table if paged else None,
        )  # fmt: skip

    step_ = Captured(step)
    error = 0.0
    for _ in range(6):
        chosen = torch.randint(0, width * page - 1, (rows,))
        order = torch.randperm(rows * width).view(rows, width)
        lens.copy_(chosen)
        table.copy_(order)
        for tensor in (q, k, v):
            tensor.normal_()
        out = step_.replay()
        for row in range(0, rows, max(1, rows // 4)):
            length = int(chosen[row]) + 1
            if paged:
                kept = [c[order[row].to(DEVICE)].flatten(0, 1)[:length] for c in (k_cache, v_cache)]
            else:
                kept = [c[row, :length] for c in (k_cache, v_cache)]
            wanted = expected(q[row].cpu(), kept[0].cpu(), kept[1].cpu(), causal=True)[0]
            error = max(error, worst(out[row], wanted))
    return {"error": error, "right": error <= LIMIT[dtype]}


def host_us(call: Callable[[], object], calls: int = 100, rounds: int = 20) -> float:
    """Return the least host time of a call in microseconds: nothing waits for the device."""
    best = float("inf")
    for _ in range(rounds):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


@torch.no_grad()
def host_times() -> list[dict[str, Any]]:
    """Tiny tensors: what a call costs the host, beside torch's own and FlashAttention-3's operator."""
    import polyattn
    from polyattn_flash_attn import flash_attn_2 as fa
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    dtype, rows = torch.bfloat16, 8
    q, k, v = (torch.randn(rows, 16, 8, 128, device=DEVICE, dtype=dtype) for _ in range(3))
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    cu = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * 16
    cache = [torch.randn(64, 256, 8, 128, device=DEVICE, dtype=dtype) for _ in range(2)]
    table = torch.arange(64, dtype=torch.int32, device=DEVICE).view(rows, 8)
    lens = torch.full((rows,), 300, dtype=torch.int32, device=DEVICE)
    one = q[:, :1].contiguous()
    ways: dict[str, Callable[[], object]] = {
        "torch sdpa": lambda: sdpa(*heads_first, is_causal=True),
        "polyattn.attention": lambda: polyattn.attention(q, k, v, causal=True),
        "flash_attn_func": lambda: fa.flash_attn_func(q, k, v, causal=True),
        "flash_attn_varlen_func": lambda: fa.flash_attn_varlen_func(
            *flat, cu, cu, 16, 16, causal=True
        ),
        "flash_attn_with_kvcache": lambda: fa.flash_attn_with_kvcache(
            one, *cache, cache_seqlens=lens, block_table=table, causal=True
        ),
    }  # fmt: skip
    try:
        from engines import fa3

        fa3.load()
        ways["FlashAttention-3 varlen"] = lambda: fa3.flash_attn_varlen_func(
            *flat, 16, cu, 16, cu, causal=True
        )
        ways["FlashAttention-3 with_kvcache"] = lambda: fa3.flash_attn_with_kvcache(
            one, *cache, lens, table, causal=True
        )
    except Exception as error:
        print(f"no FlashAttention-3 here: {error}", flush=True)
    found: list[dict[str, Any]] = []
    for name, call in ways.items():
        call()
        found.append({"what": name, "host us": host_us(call)})
        found[-1]["over sdpa"] = found[-1]["host us"] / found[0]["host us"]
    return found
