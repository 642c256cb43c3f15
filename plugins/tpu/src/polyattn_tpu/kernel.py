"""The Pallas kernel: paged attention of one tile of queries with one KV head.

Online softmax after FlashAttention (Dao et al., 2022); pages come from HBM by DMA, double-buffered.
A tile's rows are (query token, head of its group), so that a group shares each page. Rows come in
blocks, and blocks without visible keys are skipped. A tile is read from its first token on, and only
its real tokens are written back: nothing is gathered outside. The kernel has no ref reshapes, so that
Pallas' interpreter runs it; the ragged kernel that JAX ships has some.
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
from polyattn.plugin import LayerSpec, key_ranges, window_sizes

from polyattn_tpu.configs import VMEM_BYTES, WRITTEN, block_tokens, pages_per_step
from polyattn_tpu.planning import Pages, Tiles

LANES = 128
ON_THEIR_WAY = (2, 2)
"""Semaphores of the pages: K's and V's, of a step and of the next."""
NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""A masked logit: finite, so that a row without visible keys so far has no NaN."""


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: everything but shapes."""

    spec: LayerSpec
    lse: bool
    v_size: int
    value_in_key: bool
    interpret: bool
    rows: Any = None  # of a cache of rows of bytes, the keys' and the values' `rows.Rows`


@dataclass(frozen=True)
class Refs:
    """The kernel's operands by name; None where the form has none.

    Scalars in SMEM: `tile_seq`, `tile_start`, `tile_token` i32[tiles]; `query_lens`, `seq_lens`,
    `first` i32[seqs]; `table` i32[pages]; `scales` f32[2], of K and V; `first_step` i32[seqs]. VMEM: `q`
    [1, tokens, group, head size], `slopes` [1, rows, LANES], of a block; `row_values` [1, tokens, group,
    LANES]. HBM: `key_values`, `pair_values` (`Changes`); `k_pages` [pages, KV heads, page, head size],
    `v_pages`; `out` [KV heads, tokens of the step, group, V head size], `lse` (…, LANES). Scratch:
    `k_buf` [2, keys a step, head size], `v_buf`, DMA semaphores [2, 2]; `out_buf` [tokens, group, V
    head size], `lse_buf`, semaphores [2], and `written` i32[1] in SMEM, the tokens that are on their
    way from them; `q_buf` [blocks, rows, head size], `acc` f32[blocks, rows, V head size], `m` and `l`
    f32[blocks, rows, LANES]; `row_buf` i32[blocks, rows, LANES], `key_buf` [2, values, keys], `pair_buf`
    [2, values, tokens, group, keys], semaphores [2, 2].
    """

    tile_seq: Any
    tile_start: Any
    tile_token: Any
    query_lens: Any
    seq_lens: Any
    first: Any
    table: Any
    scales: Any
    first_step: Any
    q: Any
    slopes: Any
    row_values: Any
    key_values: Any
    pair_values: Any
    k_pages: Any
    v_pages: Any
    out: Any
    lse: Any
    k_buf: Any
    v_buf: Any
    sems: Any
    out_buf: Any
    lse_buf: Any
    out_sems: Any
    written: Any
    q_buf: Any
    acc: Any
    m: Any
    l: Any
    row_buf: Any
    key_buf: Any
    pair_buf: Any
    value_sems: Any


def attention_kernel(
    *operands: Any, form: Form, tokens: int, group: int, changes: Any = None
) -> None:
    """Grid: (tiles, KV heads). `changes`: what a layer's functions leave to it, or None."""
    spec, rest = form.spec, list(operands)

    def take(present: bool = True) -> Any:
        return rest.pop(0) if present else None

    apart, own = not form.value_in_key, changes is not None
    has = [own and part is not None for part in (changes.parts if own else (None,) * 3)]
    r = Refs(*[
        *(take() for _ in range(8)), take(own), take(), take(spec.alibi), *map(take, has),
        take(), take(apart), take(), take(form.lse), take(), take(apart), take(), take(),
        take(form.lse), *(take() for _ in range(6)), *map(take, has), take(own),
    ])  # fmt: skip
    tile, head = pl.program_id(0), pl.program_id(1)
    seq, start = r.tile_seq[tile], r.tile_start[tile]
    length, queries = r.seq_lens[seq], r.query_lens[seq]
    context = length - queries
    (blocks, rows, _), page = r.q_buf.shape, r.k_pages.shape[2]
    each = tokens // blocks  # tokens of a block
    steps_pages = r.k_buf.shape[1] // page
    keys = r.k_buf.shape[1]
    first, last = context + start, context + jnp.minimum(start + tokens, queries) - 1
    ranges = key_ranges(spec, first, last, length, jnp.minimum, jnp.maximum, floor_divide)
    kept_start, kept_stop, near_start, near_stop = ranges
    size = jnp.int32(keys)
    begin, end = lax.div(near_start, size), lax.div(near_stop + (keys - 1), size)
    # The sink tokens' keys are steps of their own before the window's.
    kept = kept_begin = jnp.int32(0)
    if spec.sink_tokens:
        kept_begin, kept_end = lax.div(kept_start, size), lax.div(kept_stop + (keys - 1), size)
        kept, begin = kept_end - kept_begin, jnp.maximum(begin, kept_end)
    steps = kept + jnp.maximum(end - begin, 0)

    def pages_of(index: Any, act: Any) -> None:
        """Start the DMAs of a step's pages, or wait for them."""
        step, slot = step_of(index), lax.rem(index, jnp.int32(2))

        def one(place: Any, _: Any) -> None:
            # A page past the end isn't fetched: the step's first page stands in, and is masked.
            at = step * steps_pages + place
            at = jnp.where(at * page < length, at, step * steps_pages)
            number = r.table[r.first[seq] + at]
            part = pl.ds(pl.multiple_of(place * page, page), page)
            for which, (pages, buffer) in enumerate(((r.k_pages, r.k_buf), (r.v_pages, r.v_buf))):
                if pages is not None:
                    source, target = pages.at[number, head], buffer.at[slot, part]
                    act(pltpu.make_async_copy(source, target, r.sems.at[which, slot]))

        if changes is not None:
            for copy in changes.copies(r, step, slot, r.first_step[seq], r.tile_token[tile], head):
                act(copy)
        # A loop if interpreted. Compiled, straight code that the scalar core runs ahead of the products.
        lax.fori_loop(0, steps_pages, one, None, unroll=not form.interpret)

    def step_of(index: Any) -> Any:
        if not spec.sink_tokens:
            return begin + index
        return jnp.where(index < kept, kept_begin + index, begin + index - kept)

    r.m[...] = jnp.full_like(r.m, NOTHING)
    r.l[...] = jnp.zeros_like(r.l)
    r.acc[...] = jnp.zeros_like(r.acc)

    @pl.when(steps > 0)
    def _first() -> None:
        pages_of(jnp.int32(0), lambda copy: copy.start())

    r.q_buf[...] = reshaped(r.q[0], r.q_buf)
    if r.row_values is not None:
        r.row_buf[...] = r.row_values[0].reshape(r.row_buf.shape)
    # Rows before a sequence's first belong to another sequence.
    skip = jnp.maximum(-start, 0)
    real = jnp.maximum(jnp.minimum(start + tokens, queries) - (start + skip), 0)
    row = lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
    place = lax.div(row, jnp.int32(group))

    def body(index: Any, _: Any) -> None:
        slot, low = lax.rem(index, jnp.int32(2)), step_of(index) * keys

        @pl.when(index + 1 < steps)
        def _next() -> None:
            pages_of(index + 1, lambda copy: copy.start())

        pages_of(index, lambda copy: copy.wait())
        k = r.k_buf[slot]
        if form.rows is not None:
            k = form.rows[0].read(k, r.q_buf.shape[2])
        v = k[:, : form.v_size] if r.v_buf is None else r.v_buf[slot]
        if form.rows is not None and r.v_buf is not None:
            v = form.rows[1].read(v, form.v_size)
        if k.dtype != r.q_buf.dtype:
            k = k.astype(jnp.float32).astype(r.q_buf.dtype)
        # A slot past the length may hold NaN, and 0 times NaN is NaN.
        inside = low + lax.broadcasted_iota(jnp.int32, v.shape, 0) < length
        v = jnp.where(inside, v.astype(jnp.float32), 0.0).astype(r.q_buf.dtype)
        key = low + lax.broadcasted_iota(jnp.int32, (rows, keys), 1)

        def one(block: Any, _: Any) -> None:
            position = first + block * each + place
            scores = product(r.q_buf[block], k, 1) * (spec.scale * r.scales[0])
            if spec.logit_soft_cap is not None:
                scores = spec.logit_soft_cap * jnp.tanh(scores / spec.logit_soft_cap)
            if r.slopes is not None:
                scores = scores + r.slopes[0][:, :1] * (key - position).astype(jnp.float32)
            seen = visible(spec, key, position, length)
            if changes is not None:
                position = jnp.broadcast_to(position, scores.shape)
                scores, shown = changes.changed(
                    scores, position, key, *changes.values(r, block, each, slot, scores.shape)
                )
                seen = seen if shown is None else seen & shown
                if not changes.softmax:
                    weights = jnp.where(seen, scores, 0.0).astype(v.dtype)
                    r.acc[block] = r.acc[block] + product(weights, v, 0)
                    return
            scores = jnp.where(seen, scores, NOTHING)
            most = r.m[block][:, :1]
            now = jnp.maximum(most, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
            decay = jnp.exp(most - now)
            r.acc[block] = r.acc[block] * decay + product(weights.astype(v.dtype), v, 0)
            total = r.l[block][:, :1] * decay + jnp.sum(weights, 1, keepdims=True)
            r.l[block] = jnp.broadcast_to(total, (rows, LANES))
            r.m[block] = jnp.broadcast_to(now, (rows, LANES))

        if blocks == 1:
            one(0, None)
            return
        # Skip blocks without a real token, and blocks that end before these keys.
        begins = skip if not spec.causal else jnp.maximum(skip, low - first)
        ends = lax.div(skip + real + (each - 1), jnp.int32(each))
        lax.fori_loop(lax.div(begins, jnp.int32(each)), ends, one, None)

    lax.fori_loop(jnp.int32(0), steps, body, None)
    total = r.l[...]
    safe = jnp.where(total == 0.0, 1.0, total)
    before = pl.program_id(0) * pl.num_programs(1) + head

    @pl.when(before > 0)
    def _written_before() -> None:
        each_written(r, head, 0, 0, lambda copy: copy.wait())

    if changes is not None and not changes.softmax:
        safe = jnp.ones_like(safe)
    r.out_buf[...] = reshaped(r.acc[...] * (r.scales[1] / safe[..., :1]), r.out_buf)
    if r.lse is not None:
        logs = jnp.where(total == 0.0, -jnp.inf, r.m[...] + jnp.log(safe))
        r.lse_buf[...] = reshaped(logs, r.lse_buf)
    r.written[0] = real
    each_written(r, head, skip, r.tile_token[tile] + skip, lambda copy: copy.start())

    @pl.when(before == pl.num_programs(0) * pl.num_programs(1) - 1)
    def _last() -> None:
        each_written(r, head, 0, 0, lambda copy: copy.wait())


def each_written(r: Refs, head: Any, start: Any, token: Any, act: Any) -> None:
    """Start the DMAs that write the first `written` tokens to their places, or wait for them.

    Many tokens at a time, then one at a time: a DMA's size is a constant of the program.
    """
    many = min(WRITTEN, r.out_buf.shape[0])

    def copy(at: Any, size: int) -> None:
        for which, (buffer, target) in enumerate(((r.out_buf, r.out), (r.lse_buf, r.lse))):
            if target is not None:
                source = buffer.at[pl.ds(start + at, size)]
                place = target.at[head, pl.ds(token + at, size)]
                act(pltpu.make_async_copy(source, place, r.out_sems.at[which]))

    real = r.written[0]
    whole = lax.div(real, jnp.int32(many))
    lax.fori_loop(0, whole, lambda index, _: copy(index * many, many), None)
    if many > 1:
        lax.fori_loop(whole * many, real, lambda index, _: copy(index, 1), None)


def reshaped(values: Any, like: Any) -> Any:
    """Return values in the shape and dtype of a buffer; through float32, whose rows aren't packed."""
    return values.astype(jnp.float32).reshape(like.shape).astype(like.dtype)


def visible(spec: LayerSpec, key: Any, position: Any, length: Any) -> Any:
    """Return which keys are seen, by the keys' and the queries' positions."""
    seen = key < length
    if spec.causal:
        seen &= key <= position
    left, right = window_sizes(spec)
    near = None
    if left >= 0:
        near = key >= position - left
    if right >= 0 and not spec.causal:
        before = key <= position + right
        near = before if near is None else near & before
    if near is not None:
        seen &= (near | (key < spec.sink_tokens)) if spec.sink_tokens else near
    if spec.chunk_size is not None:
        chunk = jnp.int32(spec.chunk_size)
        seen &= lax.div(key, chunk) == floor_divide(position, spec.chunk_size)
    return seen


def floor_divide(value: Any, by: int) -> Any:
    """Return int32 `value // by`, `by` positive.

    JAX asks the machine for its kind to lower its own `//`, so that it doesn't compile without a TPU.
    """
    return lax.div(jnp.where(value < 0, value - (by - 1), value), jnp.int32(by))


def product(a: Any, b: Any, axis: int) -> Any:
    """Multiply in float32, `a`'s last axis with `b`'s; float32 as such, not in one bf16 pass."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32, precision=exact
    )


def paged_attention(
    query: Any, k_pages: Any, v_pages: Any, tiles: Tiles, pages: Pages, scales: Any, slopes: Any,
    form: Form, changes: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attend; returns (tokens, heads, V head size) and the LSE (tokens, heads), natural, or None.

    `query` (tokens, heads, head size), `k_pages` (pages, KV heads, page, head size), `v_pages`, None
    where the value is the key's first part, `scales` f32 (2,), `slopes` f32 (heads,) or None, `changes`:
    a layer's functions of scores (`pointwise.Changes`), or None.
    """
    tokens, heads, size = query.shape
    kv_heads, page = k_pages.shape[1], k_pages.shape[2]
    group, count = heads // kv_heads, tiles.seq.shape[0]
    each = min(block_tokens(group), tiles.step)
    rows, keys = each * group, pages_per_step(page) * page
    blocks = tiles.step // each
    spread = query.reshape(tokens, kv_heads, group, size).transpose(1, 0, 2, 3)

    def tile_block(tile: Any, head: Any, *scalars: Any) -> tuple[Any, ...]:
        return head, scalars[2][tile], 0, 0

    arrays = [spread]
    block = tuple(pl.Element(length) for length in (1, tiles.step, group, size))
    specs = [pl.BlockSpec(block, tile_block)]
    if slopes is not None:
        wide = jnp.tile(slopes.reshape(kv_heads, group), (1, each))[..., None]
        arrays.append(jnp.broadcast_to(wide, (kv_heads, rows, LANES)))
        specs.append(pl.BlockSpec((1, rows, LANES), lambda tile, head, *_: (head, 0, 0)))
    stored = kept = [k_pages] if form.value_in_key else [k_pages, v_pages]
    numbers, buffers = [], []
    if changes is not None:
        numbers = [changes.first]
        if changes.rows is not None:
            arrays.append(changes.rows)
            block = tuple(pl.Element(length) for length in (1, tiles.step, group, LANES))
            specs.append(pl.BlockSpec(block, tile_block))
        stored = [part for part in changes.parts[1:] if part is not None] + stored
        buffers = changes.buffers(blocks, rows, tiles.step)
    shapes = [(form.v_size, query.dtype), (LANES, jnp.float32)][: 1 + form.lse]
    results = pl.pallas_call(
        functools.partial(
            attention_kernel, form=form, tokens=tiles.step, group=group, changes=changes
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8 + len(numbers),
            grid=(count, kv_heads),
            in_specs=[*specs, *(pl.BlockSpec(memory_space=pl.ANY) for _ in stored)],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in shapes],
            scratch_shapes=[
                *(pltpu.VMEM((2, keys, each.shape[3]), each.dtype) for each in kept),
                pltpu.SemaphoreType.DMA(ON_THEIR_WAY),
                *(pltpu.VMEM((tiles.step, group, width), dtype) for width, dtype in shapes),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((blocks, rows, size), query.dtype),
                pltpu.VMEM((blocks, rows, form.v_size), jnp.float32),
                pltpu.VMEM((blocks, rows, LANES), jnp.float32),
                pltpu.VMEM((blocks, rows, LANES), jnp.float32),
                *buffers,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((kv_heads, tokens, group, width), dtype)
            for width, dtype in shapes
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=form.interpret,
    )(
        tiles.seq, tiles.start, tiles.token, pages.query_lens, pages.seq_lens, pages.first,
        pages.table, scales, *numbers, *arrays, *stored,
    )  # fmt: skip

    def gathered(array: Any) -> Any:
        return array.transpose(1, 0, 2, 3).reshape(tokens, heads, array.shape[3])

    return gathered(results[0]), gathered(results[1][..., :1])[..., 0] if form.lse else None
