"""What the functions of both versions come down to: packed queries, keys where they lie, a plan."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from polyattn import Batch, KVCache, PolyattnError
from polyattn.families.attention.dense import group_for, keys_as_tokens, plan_for, run
from torch import Tensor

from polyattn_flash_attn.gradients import Recomputed

Window = tuple[int, int]
UNBOUNDED = 1 << 30
"""Keys after a query that no window hides."""


class Asked(NamedTuple):
    """What a call asks for beside its tensors, in flash-attn's words."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    attention_chunk: int = 0


class Keys(NamedTuple):
    """Where keys and values lie: given whole, or in pages."""

    key: Tensor
    value: Tensor
    lens: list[int]
    starts: tuple[int, ...] | None = None
    block_table: Tensor | None = None


def refuse(**given: object) -> None:
    """Refuse arguments that change the result and have no counterpart. Raises `PolyattnError`."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            raise PolyattnError(
                f"{name} is given, which polyattn_flash_attn doesn't serve; leave it out"
            )


def lens_of(cumulative: Tensor) -> list[int]:
    """Return the lengths between `cu_seqlens`, copied to the host once for each of its values."""
    return [b - a for a, b in pairwise(host(cumulative))]


def host(tensor: Tensor) -> list[int]:
    """Return a tensor's values, remembered by the tensor until it changes."""
    version = None if tensor.is_inference() else tensor._version
    known = getattr(tensor, "_polyattn_host", None)
    if known is None or known[0] != version or version is None:
        known = (version, tensor.tolist())
        tensor._polyattn_host = known  # type: ignore[attr-defined]
    return known[1]


def dense(query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Attend for (batch, seqlen, heads, size). Returns the output and the LSE (batch, heads, seqlen)."""
    rows, count = query.shape[:2]
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        key, value = key.contiguous(), value.contiguous()  # views that don't overlap
    keys, values, apart = keys_as_tokens(key, value)
    starts = tuple(row * apart for row in range(rows))
    where = Keys(keys, values, [key.shape[1]] * rows, starts)
    out, lse = attend(query.reshape(rows * count, *query.shape[2:]), [count] * rows, where, asked)
    return out.view(rows, count, *out.shape[1:]), lse.view(-1, rows, count).transpose(0, 1)


def attend(query: Tensor, query_lens: list[int], keys: Keys, asked: Asked) -> tuple[Tensor, Tensor]:
    """Attend for packed queries. Returns the output and the LSE (heads, tokens), float32."""
    if asked.alibi_slopes is not None and asked.alibi_slopes.dim() == 2:
        return _by_sequence(query, query_lens, keys, asked)
    left, right = map(int, asked.window_size)
    causal = asked.causal or right == 0
    if asked.alibi_slopes is not None and not causal:
        raise PolyattnError(
            "alibi_slopes without causal=True: flash-attn's bias falls off to both sides there, "
            "polyattn's doesn't; nothing serves that yet"
        )
    after: int | None = None
    if not causal and (left >= 0 or right >= 0):
        after = right if right >= 0 else UNBOUNDED
    fields: dict[str, Any] = {
        "num_heads": query.shape[1], "num_kv_heads": keys.key.shape[-2], "head_size": query.shape[2],
        "v_head_size": keys.value.shape[-1], "scale": float(asked.softmax_scale or 0.0),
        "dtype": query.dtype, "causal": causal, "sliding_window": left + 1 if left >= 0 else None,
        "window_right": after, "logit_soft_cap": asked.softcap if asked.softcap > 0 else None,
        "alibi": asked.alibi_slopes is not None, "needs_lse": True,
        "chunk_size": asked.attention_chunk or None,
    }  # fmt: skip
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, *keys[:2]))
    fewer = causal and any(k < q for q, k in zip(query_lens, keys.lens, strict=True))
    if keys.block_table is None or fewer or training:
        keys = _gathered(keys)
        group = group_for(query.device, **fields, cached=False)
        step = plan_for(group, tuple(query_lens), tuple(keys.lens), keys.starts)
        if training:
            slopes = asked.alibi_slopes
            out, lse = Recomputed.apply(  # type: ignore[no-untyped-call]
                query, *keys[:2], slopes, group.spec, _sequences(query_lens, keys),
                lambda *given: run(step, *given, alibi_slopes=slopes),
            )  # fmt: skip
            return out, lse.T
        given: Any = keys.key, keys.value, None
    else:
        cache = KVCache(keys.key, keys.value)
        group = group_for(query.device, **fields, block_size=cache.block_size)
        group.check_format(cache.format)
        batch = Batch([0, *accumulate(query_lens)], keys.lens, keys.block_table)
        step = group.plan(batch)  # type: ignore[assignment]
        given = None, None, cache
    out, lse = run(step, query, *given, alibi_slopes=asked.alibi_slopes)
    assert lse is not None
    return out, lse.T


def _sequences(query_lens: list[int], keys: Keys) -> list[tuple[int, int, int, int]]:
    firsts = list(accumulate(query_lens, initial=0))
    starts = keys.starts
    if starts is None:
        starts = tuple(accumulate(keys.lens, initial=0))
    return list(zip(firsts, query_lens, starts, keys.lens, strict=False))


def _gathered(keys: Keys) -> Keys:
    """Return keys out of their pages: what differentiates, or has fewer keys than queries, needs it."""
    if keys.block_table is None:
        return keys
    pages = keys.block_table.clamp(0, keys.key.shape[0] - 1).long()
    key, value = (t[pages].flatten(1, 2) for t in (keys.key, keys.value))
    starts = tuple(range(0, key.shape[0] * key.shape[1], key.shape[1])) or ()
    return Keys(key.flatten(0, 1), value.flatten(0, 1), keys.lens, starts)


def _by_sequence(
    query: Tensor, query_lens: list[int], keys: Keys, asked: Asked
) -> tuple[Tensor, Tensor]:
    """ALiBi slopes of each sequence's own, (num_seqs, heads): a call for each."""
    assert asked.alibi_slopes is not None
    starts = keys.starts
    if starts is None and keys.block_table is None:
        starts = tuple(accumulate(keys.lens, initial=0))
    found, at = [], 0
    for index, count in enumerate(query_lens):
        table = None if keys.block_table is None else keys.block_table[index : index + 1]
        own = Keys(
            keys.key, keys.value, [keys.lens[index]],
            None if starts is None else (starts[index],), table,
        )  # fmt: skip
        mine = asked._replace(alibi_slopes=asked.alibi_slopes[index])
        found.append(attend(query[at : at + count], [count], own, mine))
        at += count
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], dim=1)
