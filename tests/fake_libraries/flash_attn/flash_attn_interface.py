"""A fake of flash-attn's interface: binds the recorded signatures, computes with the reference."""

from __future__ import annotations

from typing import Any

from polyattn_fakes import attend_paged, bind, lengths
from torch import Tensor


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
    """Varlen over pages of 256; LSE (heads, tokens), natural."""
    a = bind("flash_attn", "flash_attn_varlen_func", args, kwargs)
    assert a["return_attn_probs"] is True and a["k"].shape[1] % 256 == 0
    starts, queries = lengths(a["cu_seqlens_q"])
    _, lens = lengths(a["cu_seqlens_k"])
    assert a["max_seqlen_q"] == max(queries) and a["max_seqlen_k"] == max(lens)
    out, lse = attend_paged(
        a["q"], a["k"], a["v"], starts, lens, a["block_table"], scale=a["softmax_scale"],
        window=_window(a), soft_cap=a["softcap"], slopes=a["alibi_slopes"],
    )  # fmt: skip
    return out, lse, None


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """One query token a sequence; LSE (batch, heads, tokens)."""
    a = bind("flash_attn", "flash_attn_with_kvcache", args, kwargs)
    query, count = a["q"], len(a["q"])
    assert a["return_softmax_lse"] is True and query.shape[1] == 1
    left, right = a["window_size"]
    assert left >= 0 or right == -1, "with a bound it reads K and V once for each head of a group"
    out, lse = attend_paged(
        query[:, 0], a["k_cache"], a["v_cache"], list(range(count + 1)),
        a["cache_seqlens"].tolist(), a["block_table"], scale=a["softmax_scale"],
        window=_window(a), soft_cap=a["softcap"], slopes=a["alibi_slopes"],
    )  # fmt: skip
    return out[:, None], lse.T[:, :, None]


def _window(a: dict[str, Any]) -> tuple[int, int]:
    left, right = a["window_size"]
    return (left, 0) if a["causal"] else (left, right)
