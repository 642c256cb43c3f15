"""A fake of flash-attn's interface: binds the recorded signatures, computes with the reference."""

from __future__ import annotations

from typing import Any

from polyattn_fakes import attend_packed, attend_paged, bind, lengths
from torch import Tensor


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
    """Varlen over pages of 256, or over packed keys; LSE (heads, tokens), natural."""
    a = bind("flash_attn", "flash_attn_varlen_func", args, kwargs)
    assert a["return_attn_probs"] is True
    starts, queries = lengths(a["cu_seqlens_q"])
    key_starts, lens = lengths(a["cu_seqlens_k"])
    assert a["max_seqlen_q"] >= max(queries) and a["max_seqlen_k"] == max(lens)
    folds = a["max_seqlen_q"] == 1 and a["window_size"] == (-1, -1) and not a["causal"]
    assert not folds, "it would take one token of each sequence for granted"
    options = {
        "scale": a["softmax_scale"], "window": _window(a), "soft_cap": a["softcap"],
        "slopes": a["alibi_slopes"],
    }  # fmt: skip
    if a["block_table"] is None:
        out, lse = attend_packed(a["q"], a["k"], a["v"], starts, key_starts, **options)
    else:
        assert a["k"].shape[1] % 256 == 0
        out, lse = attend_paged(a["q"], a["k"], a["v"], starts, lens, a["block_table"], **options)
    return out, lse, None


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """As many query tokens of each sequence, over pages; LSE (batch, heads, tokens)."""
    a = bind("flash_attn", "flash_attn_with_kvcache", args, kwargs)
    query = a["q"]
    count, width = query.shape[:2]
    assert a["return_softmax_lse"] is True and a["k_cache"].shape[1] % 256 == 0
    left, right = a["window_size"]
    assert width > 1 or left >= 0 or right == -1, (
        "with a bound it reads K and V once for each head of a group"
    )
    window = _window(a) if width > 1 or a["causal"] else (left, right)
    out, lse = attend_paged(
        query.flatten(0, 1), a["k_cache"], a["v_cache"],
        list(range(0, count * width + 1, width)), a["cache_seqlens"].tolist(), a["block_table"],
        scale=a["softmax_scale"], window=window, soft_cap=a["softcap"], slopes=a["alibi_slopes"],
    )  # fmt: skip
    return out.unflatten(0, (count, width)), lse.unflatten(1, (count, width)).transpose(0, 1)


def _window(a: dict[str, Any]) -> tuple[int, int]:
    left, right = a["window_size"]
    return (left, 0) if a["causal"] else (left, right)
