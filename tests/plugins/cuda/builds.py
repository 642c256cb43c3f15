"""Other builds of FlashAttention, as functions on top of the fakes; and the layers that all are asked."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from polyattn import Device, LayerSpec

SMALL = LayerSpec(num_heads=6, num_kv_heads=2, head_size=64, dtype="float16", needs_lse=True)
CPU = Device("cuda", "sm_90", torch_device="cpu")
HALF = 3e-3
"""What float16 rounds away."""

MASKS = {
    "causal": {},
    "window": {"sliding_window": 7},
    "own token": {"sliding_window": 1},
    "non causal": {"causal": False},
    "window of two sides": {"causal": False, "sliding_window": 7},
    "soft cap": {"logit_soft_cap": 5.0},
    "one group": {"num_kv_heads": 6},
}


def vllm_varlen(
    q: Any, k: Any, v: Any, out: Any, cu_q: Any, cu_k: Any, used: Any, leftpad: Any, table: Any,
    slopes: Any, max_q: int, max_k: int, dropout: float, scale: float, zero: bool, causal: bool,
    left: int, right: int, cap: float, softmax: bool, splits: int, generator: Any,
) -> list[Any]:  # fmt: skip
    from flash_attn import flash_attn_interface as fa2
    from polyattn_fakes import attend_paged

    if table is None:
        assert used is None
        found, lse, _ = fa2.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal,
            window_size=(left, right), softcap=cap, alibi_slopes=slopes, return_attn_probs=True,
        )  # fmt: skip
    else:
        assert max_q >= max(cu_q.diff()) and max_k == max(used) and k.shape[1] % 16 == 0
        found, lse = attend_paged(
            q, k, v, cu_q.tolist(), used.tolist(), table, scale=scale, soft_cap=cap,
            window=(left, 0) if causal else (left, right), slopes=slopes,
        )  # fmt: skip
    out.copy_(found)
    return [out, lse]


def vllm_kvcache(
    q: Any, k: Any, v: Any, new_k: None, new_v: None, used: Any, cos: None, sin: None,
    index: None, leftpad: None, table: Any, slopes: Any, out: Any, scale: float, causal: bool,
    left: int, right: int, cap: float, interleaved: bool, splits: int,
) -> list[Any]:  # fmt: skip
    from polyattn_fakes import attend_paged

    count, width = q.shape[:2]
    found, lse = attend_paged(
        q.flatten(0, 1), k, v, list(range(0, count * width + 1, width)), used.tolist(), table,
        scale=scale, window=(left, 0) if causal else (left, right), soft_cap=cap, slopes=slopes,
    )  # fmt: skip
    out.copy_(found.unflatten(0, (count, width)))
    return [out, lse.unflatten(1, (count, width)).transpose(0, 1)]


def vllm_flash_3_schedule(
    rows: int, max_q: int, max_k: int, heads: int, kv_heads: int, size: int, v_size: int,
    dtype: torch.dtype, used_k: Any, cu_q: Any, cu_k: None, cu_new: None, used_q: None,
    leftpad: None, page: int, max_new: int, causal: bool, left: int, right: int, capped: bool,
    splits: int, pack: None, margin: int,
) -> tuple[Any, ...]:  # fmt: skip
    lens = used_k.tolist(), cu_q.tolist()
    shape = rows, max_q, max_k, heads, kv_heads, size, v_size, dtype, page
    return *lens, *shape, causal, left, right, capped, splits


def vllm_flash_3(
    q: Any, k: Any, v: Any, new_k: None, new_v: None, q_v: None, out: Any, cu_q: Any, cu_k: Any,
    cu_new: None, used_q: None, used_k: Any, max_q: int, max_k: int, table: Any, batch: None,
    leftpad: None, cos: None, sin: None, lengths: None, q_descale: Any, k_descale: Any,
    v_descale: Any, scale: float, causal: bool, left: int, right: int, cap: float,
    interleaved: bool, schedule: Any, splits: int, pack: None, margin: int, sinks: Any,
    world: int, rank: int, total: None,
) -> list[Any]:  # fmt: skip
    import flash_attn_interface as fa3

    options = {
        "max_seqlen_q": max_q, "softmax_scale": scale, "causal": causal, "softcap": cap,
        "window_size": (left, right),
    }  # fmt: skip
    assert (world, rank, sinks) == (1, 0, None)
    if schedule is not None:  # the operator trusts that it is this call's
        page = None if table is None else k.shape[1]
        assert schedule == vllm_flash_3_schedule(
            len(cu_q) - 1, max_q, max_k, q.shape[1], k.shape[-2], q.shape[2], v.shape[-1], q.dtype,
            used_k, cu_q, cu_k, None, None, None, page, 0, causal, left, right, cap > 0, splits, None, 0,
        )  # fmt: skip
    if table is None:
        assert used_k is None
        found, lse = fa3.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_seqlen_k=max_k, return_attn_probs=True, **options
        )
    else:
        assert cu_k is None
        found, lse, *_ = fa3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used_k, page_table=table, cu_seqlens_q=cu_q,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=splits,
            return_softmax_lse=True, **options,
        )  # fmt: skip
    out.copy_(found)
    return [out, lse]


def later_keys_seen(
    query: int, length: int, group: int, left: int, right: int, told: int, tile: tuple[int, int]
) -> int:
    """Return how many keys beyond its window a row sees at most, as vLLM's FlashAttention-3 masks them.

    A tile has `tile` rows (tokens by a group's heads) and blocks of so many keys. Its keys count from
    its window's first. Its last block is masked; of the others those that are from `causal` on or
    before `left_masked`, which follow from the length that it is `told`.
    """
    rows, keys = tile
    worst = 0
    for start in range(0, query * group, rows):
        first, last = start // group, (start + rows - 1) // group + 1
        own = length - max(0, first + length - query - left)
        blocks = min(-(-own // keys), -(-(last + own - query + right) // keys))
        causal = max(0, int((first + told - query + right) / keys))
        left_masked = max(0, -((query + left - last - told) // keys))
        for block in range(left_masked, min(causal, blocks - 1)):
            worst = max(worst, (block + 1) * keys - 1 - (first + own - query + right))
            worst = max(worst, min(last, query) - 1 + own - query - left - block * keys)
    return worst


def vllm_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's operators, as torch prints their schemas, on top of the other builds' fakes."""
    flash_2 = SimpleNamespace(varlen_fwd=vllm_varlen, fwd_kvcache=vllm_kvcache)
    flash_3 = SimpleNamespace(fwd=vllm_flash_3, get_scheduler_metadata=vllm_flash_3_schedule)
    monkeypatch.setattr(torch.ops, "_vllm_fa2_C", flash_2, raising=False)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", flash_3, raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)


def fake_varlen(monkeypatch: pytest.MonkeyPatch, module: str, package: str | None) -> None:
    """flash-attn 4's function, or torch's: both compute over packed keys."""
    import inspect

    import polyattn_fakes

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn)

    def fa4(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        a = polyattn_fakes.bind("flash_attn_4", "flash_attn_varlen_func", args, kwargs)
        left, right = (-1 if w is None else w for w in a["window_size"])
        assert not a["k"].isnan().any(), "it multiplies what it masks"
        out, lse = polyattn_fakes.attend_packed(
            a["q"], a["k"], a["v"], a["cu_seqlens_q"].tolist(), a["cu_seqlens_k"].tolist(),
            scale=a["softmax_scale"], window=(left, 0) if a["causal"] else (left, right),
            soft_cap=a["softcap"],
        )  # fmt: skip
        return out, lse if a["return_lse"] else None

    def torchs(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound = real.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        assert a["enable_gqa"] or a["query"].shape[1] == a["key"].shape[-2]
        starts = a["cu_seq_q"].tolist()
        options = {
            "scale": a["scale"], "window": a["window_size"], "soft_cap": 0.0, "slopes": None,
        }  # fmt: skip
        if a["block_table"] is None:
            return polyattn_fakes.attend_packed(
                a["query"], a["key"], a["value"], starts, a["cu_seq_k"].tolist(), **options
            )
        assert a["cu_seq_k"] is None
        return polyattn_fakes.attend_paged(
            a["query"], a["key"], a["value"], starts, a["seqused_k"].tolist(), a["block_table"],
            **options,
        )  # fmt: skip

    if module == "torch":
        monkeypatch.setattr(varlen, "varlen_attn", torchs)
        return
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = fa4  # type: ignore[attr-defined]
