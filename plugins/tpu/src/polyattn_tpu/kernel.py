"""The Pallas kernel: paged attention of one tile of queries with one KV head.

Online softmax after FlashAttention (Dao et al., 2022); pages come from HBM by DMA, double-buffered.
A tile's rows are (query token, head of its group), so that a group shares each page. Written without
ref reshapes, so that Pallas' TPU interpreter runs it; the ragged kernel that JAX ships is not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""A masked logit: finite, so that a row that has seen nothing yet stays free of NaN."""


@dataclass(frozen=True)
class Form:
    """What a compiled kernel is for: everything but shapes."""

    scale: float
    causal: bool
    window: int | None
    chunk: int | None
    soft_cap: float | None
    k_scale: float
    v_scale: float
    tokens: int
    group: int
    pages_per_step: int
    page_stride: int
    lse: bool


def attention_kernel(
    # Scalars, in SMEM before the kernel starts
    tile_seq: Any,  # i32[tiles]
    tile_start: Any,  # i32[tiles]: the tile's first query token within its sequence
    query_lens: Any,  # i32[seqs]
    seq_lens: Any,  # i32[seqs]
    table: Any,  # i32[seqs * pages_per_seq]
    # Tiles in VMEM, pages in HBM
    q: Any,  # [1, 1, rows, head size]
    k_pages: Any,  # [pages, KV heads, page, head size]
    v_pages: Any,  # [pages, KV heads, page, V head size]
    out: Any,  # [1, 1, rows, V head size]
    lse: Any,  # [1, 1, rows, LANES]
    # Scratch
    k_buf: Any,  # [2, keys a step, head size]
    v_buf: Any,
    sems: Any,  # DMA semaphores [2, 2]
    acc: Any,  # f32[rows, V head size]
    m: Any,  # f32[rows, LANES]
    l: Any,
    *,
    form: Form,
    pages_per_seq: int,
) -> None:
    """Grid: (tiles, KV heads)."""
    tile, head = pl.program_id(0), pl.program_id(1)
    seq, start = tile_seq[tile], tile_start[tile]
    length, queries = seq_lens[seq], query_lens[seq]
    context = length - queries
    rows, page = q.shape[2], k_pages.shape[2]
    keys = form.pages_per_step * page
    first, last = context + start, context + jnp.minimum(start + form.tokens, queries) - 1
    high = length
    if form.causal:
        high = jnp.minimum(high, last + 1)
    elif form.window is not None:
        high = jnp.minimum(high, last + form.window)
    low = jnp.int32(0)
    if form.window is not None:
        low = jnp.maximum(low, first - form.window + 1)
    if form.chunk is not None:
        whole = jnp.int32(form.chunk)
        low = jnp.maximum(low, lax.div(first, whole) * whole)
        high = jnp.minimum(high, (lax.div(last, whole) + 1) * whole)
    # Not `//`, which rounds to minus infinity and asks the machine for its kind to do so.
    begin, end = lax.div(low, jnp.int32(keys)), lax.div(high + (keys - 1), jnp.int32(keys))

    def copies(step: Any, slot: Any) -> list[Any]:
        made = []
        for index in range(form.pages_per_step):
            # A page past the end is not asked for: the first of the step stands in, and is masked.
            at = step * form.pages_per_step + index
            at = jnp.where(at * page < length, at, step * form.pages_per_step)
            number = table[seq * pages_per_seq + at] * form.page_stride
            part = pl.ds(index * page, page)
            made += [
                pltpu.make_async_copy(
                    pages.at[number, head], buffer.at[slot, part], sems.at[which, slot]
                )
                for which, (pages, buffer) in enumerate(((k_pages, k_buf), (v_pages, v_buf)))
            ]
        return made

    m[...] = jnp.full_like(m, NOTHING)
    l[...] = jnp.zeros_like(l)
    acc[...] = jnp.zeros_like(acc)

    @pl.when(begin < end)
    def _() -> None:
        for copy in copies(begin, lax.rem(begin, jnp.int32(2))):
            copy.start()

    query = q[0, 0]
    row = lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
    position = first + lax.div(row, jnp.int32(form.group))

    def body(step: Any, _: Any) -> None:
        slot = lax.rem(step, jnp.int32(2))

        @pl.when(step + 1 < end)
        def _() -> None:
            for copy in copies(step + 1, 1 - slot):
                copy.start()

        for copy in copies(step, slot):
            copy.wait()
        k, v = k_buf[slot], v_buf[slot]
        if k.dtype != query.dtype:
            k, v = k.astype(jnp.float32).astype(query.dtype), v.astype(jnp.float32)
        scores = lax.dot_general(
            query, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32,
            precision=precision(query.dtype),
        )  # fmt: skip
        scores = scores * (form.scale * form.k_scale)
        if form.soft_cap is not None:
            scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
        key = step * keys + lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        seen = key < length
        if form.causal:
            seen &= key <= position
        if form.window is not None:
            seen &= key > position - form.window
            if not form.causal:
                seen &= key < position + form.window
        if form.chunk is not None:
            whole = jnp.int32(form.chunk)
            seen &= lax.div(key, whole) == lax.div(position, whole)
        scores = jnp.where(seen, scores, NOTHING)
        before = m[:, :1]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
        decay = jnp.exp(before - now)
        # A slot past the length may hold NaN, and 0 times NaN is NaN.
        inside = step * keys + lax.broadcasted_iota(jnp.int32, v.shape, 0) < length
        v = jnp.where(inside, v.astype(jnp.float32), 0.0).astype(query.dtype)
        acc[...] = acc[...] * decay + lax.dot_general(
            weights.astype(query.dtype), v, (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32, precision=precision(query.dtype),
        )  # fmt: skip
        l[...] = jnp.broadcast_to(l[:, :1] * decay + jnp.sum(weights, 1, keepdims=True), l.shape)
        m[...] = jnp.broadcast_to(now, m.shape)

    lax.fori_loop(begin, end, body, None)
    total = l[:, :1]
    safe = jnp.where(total == 0.0, 1.0, total)
    out[0, 0] = (acc[...] * (form.v_scale / safe)).astype(out.dtype)
    if form.lse:
        lse[0, 0] = jnp.where(l[...] == 0.0, -jnp.inf, m[...] + jnp.log(safe))


def precision(dtype: Any) -> Any:
    """Multiply float32 as such, not in one bf16 pass."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def interpreted() -> bool:
    """Whether there is no TPU: then Pallas' TPU interpreter runs the kernel on the CPU."""
    return jax.default_backend() != "tpu"


@functools.partial(jax.jit, static_argnames=("form", "interpret"))
def paged_attention(
    query: Any,  # [tokens, heads, head size]
    k_pages: Any,  # [pages, KV heads, page, head size]
    v_pages: Any,
    take: Any,  # i32[tiles * tokens a tile]: which token each place of a tile holds
    put: Any,  # i32[tokens]: which place each token is at
    tile_seq: Any,
    tile_start: Any,
    query_lens: Any,
    seq_lens: Any,
    table: Any,  # i32[seqs, pages a sequence]
    sinks: Any,  # f32[heads], or None
    form: Form,
    interpret: bool = False,
) -> tuple[Any, Any]:
    """Attend; returns (tokens, heads, V head size) and the LSE (tokens, heads), natural."""
    _tokens, heads, size = query.shape
    kv_heads, page, v_size = k_pages.shape[1], k_pages.shape[2], v_pages.shape[3]
    tiles = tile_seq.shape[0]
    used = form.tokens * form.group
    rows = row_count(form.tokens, form.group, query.dtype)
    packed = query[take].reshape(tiles, form.tokens, kv_heads, form.group, size)
    packed = packed.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, used, size)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, rows - used), (0, 0)))
    keys = form.pages_per_step * page

    def tile_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, rows, width), lambda tile, head, *_: (tile, head, 0, 0))

    out, lse = pl.pallas_call(
        functools.partial(attention_kernel, form=form, pages_per_seq=table.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(tiles, kv_heads),
            in_specs=[
                tile_block(size),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[tile_block(v_size), tile_block(LANES)],
            scratch_shapes=[
                pltpu.VMEM((2, keys, size), k_pages.dtype),
                pltpu.VMEM((2, keys, v_size), v_pages.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((rows, v_size), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tiles, kv_heads, rows, v_size), query.dtype),
            jax.ShapeDtypeStruct((tiles, kv_heads, rows, LANES), jnp.float32),
        ],
        interpret=pltpu.InterpretParams() if interpret else False,
    )(tile_seq, tile_start, query_lens, seq_lens, table.reshape(-1), packed, k_pages, v_pages)

    def unpack(found: Any) -> Any:
        width = found.shape[3]
        found = found[:, :, :used].reshape(tiles, kv_heads, form.tokens, form.group, width)
        found = found.transpose(0, 2, 1, 3, 4).reshape(tiles * form.tokens, heads, width)
        return found[put]

    result, total = unpack(out), unpack(lse[..., :1])[..., 0]
    if sinks is not None:  # a sink joins the denominator after the fact
        result = (result * jax.nn.sigmoid(total - sinks)[..., None]).astype(query.dtype)
        total = jnp.logaddexp(total, sinks)
    return result, total


def row_count(tokens: int, group: int, dtype: Any) -> int:
    """Return a tile's rows: a multiple of the sublanes that a register of `dtype` has."""
    sublanes = 8 * 4 // jnp.dtype(dtype).itemsize
    return -(-tokens * group // sublanes) * sublanes
