"""MLA in JAX: queries absorbed into the latents' space, prefills expanded, chosen rows attended to.

Multi-head latent attention (DeepSeek-AI, 2024): `k = [W_UK c, k_rope]`, `v = W_UV c` of one latent a
token. The absorbed form is MQA over the latents, and its kernel is the attention's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from polyattn.plugin import BatchError, LayerSpec, absorbed, expanded

from polyattn_tpu.buckets import Buckets
from polyattn_tpu.functions import Cache, Scales, attend, attend_given
from polyattn_tpu.planning import AttentionPlan, plan_dense
from polyattn_tpu.step import Step

Array = Any
ROW_BYTES = 64 << 20
"""Latents that sparse attention gathers at a time, in float32."""


def attend_latent(
    plan: AttentionPlan,
    spec: LayerSpec,
    query: Array,
    cache: Cache,
    w_uk: Array,
    w_uv: Array,
    **options: Any,
) -> tuple[Array, Array | None]:
    """Attend over a latent cache in the absorbed form: decode, and prefills that are short.

    `query` (plan.num_tokens, heads, nope + rope), `w_uk` (heads, nope, rank), `w_uv` (heads, rank, V
    head size). Returns what `attend` returns, (…, V head size).
    """
    nope = w_uk.shape[1]
    inner = jnp.einsum("thn,hnr->thr", query[..., :nope], w_uk)
    taken = jnp.concatenate([inner.astype(query.dtype), query[..., nope:]], axis=-1)
    result, lse = attend(plan, absorbed(spec), taken, cache, **options)
    return jnp.einsum("thr,hrv->thv", result, w_uv).astype(query.dtype), lse


def plan_expanded(
    step: Step, spec: LayerSpec, block_size: int, buckets: Buckets | None = None
) -> tuple[AttentionPlan, Array]:
    """Plan a prefill in the expanded form: its dense plan, and i32 slots of all expanded keys.

    All contexts expand at once, so pass only as many sequences as memory allows.
    """
    if step.block_table is None:
        raise BatchError("the step has no block_table, and the layer attends over a cache")
    buckets = buckets or Buckets()
    packed = Step.of(step.query_lens, step.seq_lens)
    plan = plan_dense(packed, 1, buckets)
    assert plan.pack is not None
    slots = np.zeros(plan.pack.size, np.int32)
    at = 0
    for row, length in zip(step.block_table, step.seq_lens, strict=True):
        position = np.arange(length)
        slots[at : at + length] = row[position // block_size] * block_size + position % block_size
        at += length
    made: tuple[AttentionPlan, Array] = jax.device_put((plan, slots))
    return made


def attend_expanded(
    plan: AttentionPlan,
    slots: Array,
    spec: LayerSpec,
    query: Array,
    cache: Cache,
    w_uk: Array,
    w_uv: Array,
    *,
    scales: Scales | None = None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """Attend over a latent cache with all heads' keys and values made first: long prefills."""
    assert spec.latent is not None
    scale = (scales or Scales()).key
    rows = gathered(cache.key, slots, scale, query.dtype)
    rank = spec.latent.rank
    latent, rope = rows[:, :rank], rows[:, rank : spec.latent.size]
    key = jnp.einsum("tr,hnr->thn", latent, w_uk).astype(query.dtype)
    wide = jnp.broadcast_to(rope[:, None], (*key.shape[:2], rope.shape[1]))
    value = jnp.einsum("tr,hrv->thv", latent, w_uv).astype(query.dtype)
    full = jnp.concatenate([key, wide], axis=-1)
    return attend_given(plan, expanded(spec), query, full, value, **options)


def attend_rows(
    query: Array,
    slots: Array,
    cache: Cache,
    scale: float,
    rank: int,
    k_scale: Any = 1.0,
    alike: bool = False,
) -> tuple[Array, Array]:
    """Attend each token to chosen rows of a latent cache, in XLA: sparse MLA.

    `query` (tokens, heads, rank + rope), `slots` i32 (tokens, topk), -1 for none. Returns (tokens,
    heads, rank) and the LSE. A few tokens at a time, so that gathered rows stay few; `alike`: one token.
    """
    size = query.shape[2]

    def one(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        q, chosen = pair
        rows = gathered(cache.key, jnp.maximum(chosen, 0), k_scale, q.dtype)[:, :size]
        out, lse = attended(q[None], rows[None], None, chosen >= 0, scale, rank)
        return out[0], lse[0]

    each = 1 if alike else tokens_at_once(slots.shape, size)
    out, lse = lax.map(one, (query, slots), batch_size=each)
    return out, lse


def attend_pages(
    query: Array,
    row: Array,
    after: Array,
    seq_lens: Array,
    table: Array,
    cache: Cache,
    spec: LayerSpec,
    scales: Scales,
) -> tuple[Array, Array]:
    """Attend each token to its sequence's pages, of any size, in XLA: all keys but the `after` last ones.

    `query` (tokens, heads, size), `row`, `after` i32 (tokens,), `seq_lens` i32 (seqs,), `table` i32
    (seqs, pages). Returns (tokens, heads, V head size) and the LSE. As many tokens at a time as
    `attend_rows` takes.
    """
    heads, page = cache.key.shape[1:3]
    size, v_size = query.shape[2], spec.v_head_size
    places = jnp.arange(table.shape[1] * page)

    def one(token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, at, later = token

        def rows(stored: Array, scale: Any) -> Array:
            taken = jnp.swapaxes(stored[table[at]], 0, 1).reshape(heads, -1, stored.shape[3])
            return as_dtype(taken, scale, q.dtype)

        key = rows(cache.key, scales.key)[..., :size]
        value = None
        if cache.value is not None:
            value = rows(cache.value, scales.value)[..., :v_size]
        seen = places < seq_lens[at] - later
        out, lse = attended(q.reshape(heads, -1, size), key, value, seen, spec.scale, v_size)
        return out.reshape(-1, v_size), lse.reshape(-1)

    each = tokens_at_once((len(query), heads * len(places)), 2 * size)
    out, lse = lax.map(one, (query, row, after), batch_size=each)
    return out, lse


def tokens_at_once(rows: tuple[int, ...], size: int) -> int:
    """Return of how many tokens rows (tokens, rows a token) of `size` elements are gathered at a time."""
    return max(1, min(rows[0], ROW_BYTES // max(1, rows[1] * size * 4)))


def attended(
    query: Array, key: Array, value: Array | None, seen: Array, scale: float, v_size: int
) -> tuple[Array, Array]:
    """Attend to gathered keys and values (KV heads, keys, size); None: the value is the key's first part.

    `query` (KV heads, group, size), `seen` bool (keys,). Returns (…, V size) and the LSE.
    """
    # A hidden row may hold NaN, and 0 times NaN is NaN.
    key = jnp.where(seen[:, None], key, 0)
    value = key[..., :v_size] if value is None else jnp.where(seen[:, None], value, 0)
    exact = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    dot = {"precision": exact, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("ngd,nkd->ngk", query, key, **dot) * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=2)
    weights = jnp.exp(scores - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("ngk,nkr->ngr", weights.astype(query.dtype), value, **dot)
    return out.astype(query.dtype), lse


def gathered(cache: Array, slots: Array, scale: Any, dtype: Any) -> Array:
    """Return rows (…, size) of a latent cache (pages, 1, page, size) at slots, in `dtype`."""
    page = cache.shape[2]
    return as_dtype(cache[slots // page, 0, slots % page], scale, dtype)


def as_dtype(rows: Array, scale: Any, dtype: Any) -> Array:
    """Return stored rows in `dtype`, of a quantised cache times their scale."""
    if rows.dtype == dtype:
        return rows
    return (rows.astype(jnp.float32) * scale).astype(dtype)
