"""The functions for JAX: attend, store and merge. They are pure, over plans; the caller donates caches.

Trace all of them: call them inside `jax.jit`, with the cache among `donate_argnums`. Nothing is
transposed or padded outside the compiled program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from polyattn.plugin import BatchError, LayerSpec

from polyattn_tpu.configs import pages_per_step
from polyattn_tpu.kernel import LANES, Form, paged_attention
from polyattn_tpu.planning import AttentionPlan, pad, with_pages

Array = Any
DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "int8": jnp.int8,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
}


class Cache(NamedTuple):
    """One layer's pages in the chip's layout: a page of one head is contiguous, in whole lanes.

    `key` (pages, KV heads, page, head size), `value` (…, V head size); for MLA `key` holds the latents
    and rope keys, (pages, 1, page, rank + rope size), and `value` is None: it is a part of `key`. Head
    sizes are padded to a multiple of 128 with zeros. With another size XLA would put the pages
    innermost, and copy the whole cache at each call of a kernel that takes pages.
    """

    key: Array
    value: Array | None = None

    @classmethod
    def zeros(cls, spec: LayerSpec, num_blocks: int, block_size: int) -> Cache:
        """Return an empty cache of a layer."""
        dtype = DTYPES[spec.stored_dtype]
        if spec.latent is not None:
            return cls(jnp.zeros((num_blocks, 1, block_size, whole_lanes(spec.latent.size)), dtype))
        shape = (num_blocks, spec.num_kv_heads, block_size)
        sizes = (whole_lanes(spec.head_size), whole_lanes(spec.v_head_size))
        return cls(*(jnp.zeros((*shape, size), dtype) for size in sizes))


def whole_lanes(size: int) -> int:
    """Return a size rounded up to whole registers of 128 lanes."""
    return -(-size // LANES) * LANES


def widened(array: Array, size: int) -> Array:
    """Return an array with zeros behind its last axis, up to `size`."""
    missing = size - array.shape[-1]
    return jnp.pad(array, (*((0, 0),) * (array.ndim - 1), (0, missing))) if missing else array


class Scales(NamedTuple):
    """A quantised cache holds `value / scale`; numbers or f32 arrays (), not compiled in."""

    key: Any = 1.0
    value: Any = 1.0


def interpreted() -> bool:
    """Whether there is no TPU: then Pallas' TPU interpreter runs the kernel on the CPU."""
    return jax.default_backend() != "tpu"


def form_of(
    spec: LayerSpec,
    lse: bool,
    value_in_key: bool = False,
    interpret: bool | None = None,
    rows: Any = None,
) -> Form:
    """Return what the kernel is compiled for."""
    return Form(
        spec=spec,
        lse=lse or spec.learned_sinks,
        v_size=whole_lanes(spec.v_head_size),
        value_in_key=value_in_key,
        interpret=interpreted() if interpret is None else interpret,
        rows=rows,
    )


def attend(
    plan: AttentionPlan,
    spec: LayerSpec,
    query: Array,
    cache: Cache,
    *,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    scales: Scales | None = None,
    inputs: Any = None,
    functions: Any = None,
    lse: bool = False,
    interpret: bool | None = None,
    rows: Any = None,
) -> tuple[Array, Array | None]:
    """Attend over a paged cache that holds the step's keys already: prefill, decode or mixed.

    `query` (plan.num_tokens, heads, head size), see `pad`; padding rows return arbitrary
    numbers. `spec`, `functions`, `lse` and `rows`, a cache's formats of bytes, are static. For MLA pass
    the absorbed query, and `absorbed(spec)`. A layer with functions of scores has `functions_of(spec)`
    and inputs by `functions.given({name: array})`. Returns
    (plan.num_tokens, heads, V head size) and the LSE, float32 (plan.num_tokens, heads), natural
    logarithm, where asked. Raises `BatchError`.
    """
    _check(plan, spec, query, sinks, alibi_slopes)
    _check_cache(plan, spec, cache, rows is not None)
    _check_functions(plan, spec, functions, inputs)
    if plan.cached != (plan.pack is None):
        raise BatchError("the plan is for keys that are passed whole; use attend_given")
    scales = scales or Scales()
    quantised = cache.key.dtype != query.dtype
    if not quantised and any(isinstance(s, float) and s != 1.0 for s in scales):
        raise BatchError(
            f"{scales}: they are a quantised cache's, and this one isn't; leave them out"
        )
    both = (scales.key, scales.value if cache.value is not None else scales.key)
    pair = jnp.asarray(both if quantised else (1.0, 1.0), jnp.float32)
    form = form_of(spec, lse, cache.value is None, interpret, rows)
    wide = widened(query, cache.key.shape[3] if rows is None else whole_lanes(spec.head_size))
    changes = _changes(plan, spec, cache, functions, inputs)
    result, total = paged_attention(
        wide, cache.key, cache.value, plan.tiles, plan.pages, pair, alibi_slopes, form, changes
    )
    result = result[..., : spec.v_head_size]
    if sinks is not None:
        # A sink joins the denominator after the fact, but never beside no key at all.
        nothing = jnp.isneginf(total)
        share = jnp.where(nothing, 1.0, jax.nn.sigmoid(total - sinks))
        result = (result * share[..., None]).astype(query.dtype)
        total = jnp.where(nothing, total, jnp.logaddexp(total, sinks))
    return result, total if lse else None


def attend_bounded(
    plan: AttentionPlan,
    spec: LayerSpec,
    query: Array,
    cache: Cache,
    seq_lens: Array,
    table: Array,
    **options: Any,
) -> tuple[Array, Array | None]:
    """Attend as `attend` does, by a plan of bounds: lengths and tables come with the call.

    `seq_lens` i32 (seqs,), `table` i32 (seqs, pages of the longest bound, or more). More single tokens
    than `plan` has places for go through it in turns, because SMEM has little room for their pages.
    """
    count, places = query.shape[0], len(plan.pages.query_lens) - 1
    if len(seq_lens) <= places:
        made = with_pages(plan, seq_lens, table)
        return attend(made, spec, pad(plan, query), cache, **options)
    turns = -(-count // places)

    def cut(array: Array) -> Array:
        missing = turns * places - count
        whole = jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
        return whole.reshape(turns, places, *array.shape[1:])

    def one(part: tuple[Array, Array, Array]) -> Any:
        return attend(with_pages(plan, *part[1:]), spec, pad(plan, part[0]), cache, **options)

    made = lax.map(one, (cut(query), cut(seq_lens), cut(table)))
    whole: tuple[Array, Array | None] = jax.tree.map(
        lambda a: a[:, :places].reshape(-1, *a.shape[2:])[:count], made
    )
    return whole


def attend_given(
    plan: AttentionPlan, spec: LayerSpec, query: Array, key: Array, value: Array, **options: Any
) -> tuple[Array, Array | None]:
    """Attend to keys (keys, KV heads, size) that are passed whole; `plan` is of an uncached spec.

    One gather cuts them into pages for the same kernel. Otherwise it is `attend`.
    """
    if plan.pack is None:
        raise BatchError("the plan is over a paged cache; use attend")
    # JAX gathers nothing from an array without rows.
    rows = (a if a.shape[0] else jnp.zeros((1, *a.shape[1:]), a.dtype) for a in (key, value))
    cut = (
        widened(array[plan.pack].transpose(0, 2, 1, 3), whole_lanes(array.shape[2]))
        for array in rows
    )
    whole = AttentionPlan(plan.tiles, plan.pages, None, None, True, plan.num_tokens, plan.places)
    return attend(whole, spec, query, Cache(*cut), **options)


def store(
    plan: AttentionPlan,
    key: Array,
    value: Array | None,
    cache: Cache,
    scales: Scales | None = None,
    rows: Any = None,
) -> Cache:
    """Return the cache with the step's keys and values (plan.num_tokens, KV heads, size) in it.

    Donate the cache: then it is written in place. For MLA `key` is (…, 1, rank + rope), `value` None.
    `rows`, a cache's formats of bytes, is static.
    """
    if plan.slots is None:
        raise BatchError(
            "the plan has no slots: its step has no slot_mapping; pass one to store keys"
        )
    for name, new, pages in (("key", key, cache.key), ("value", value, cache.value)):
        leading = None if pages is None else (len(plan.slots), pages.shape[1])
        shape = None if new is None else new.shape
        if (shape and shape[:2]) != leading:
            raise BatchError(f"{name} is {shape}; the plan and the cache take {leading}: see pad()")
    return write(cache, key, value, plan.slots, scales or Scales(), rows)


def write(
    cache: Cache, key: Array, value: Array | None, slots: Array, scales: Scales, rows: Any = None
) -> Cache:
    """Return the cache with keys and values (tokens, heads, size) at `slots`, -1 for none."""
    of_key, of_value = rows or (None, None)
    made = scatter(cache.key, key, slots, scales.key, of_key)
    if cache.value is None:
        return Cache(made)
    assert value is not None
    return Cache(made, scatter(cache.value, value, slots, scales.value, of_value))


def scatter(pages: Array, rows: Array, slots: Array, scale: Any, format: Any = None) -> Array:
    """Write rows (tokens, heads, size) to their slots of pages (blocks, heads, page, size).

    `format`: where pages hold rows of bytes, their `rows.Rows`.
    """
    blocks, page = pages.shape[0], pages.shape[2]
    # A slot of -1 becomes a block past the end, whose write is dropped.
    block = jnp.where(slots < 0, blocks, slots // page)
    made = (
        quantised(rows, pages.dtype, scale) if format is None else format.written(over(rows, scale))
    )
    new = widened(made, pages.shape[3])
    return pages.at[block, :, slots % page].set(new, mode="drop", unique_indices=False)


def quantised(rows: Array, dtype: Any, scale: Any) -> Array:
    """Return `rows / scale` in `dtype`, rounded and saturated where that is an 8-bit one."""
    if rows.dtype == dtype:
        return rows
    if jnp.dtype(dtype).itemsize > 1:
        raise BatchError(f"rows are {rows.dtype}, the cache {dtype}; cast one")
    quotient = over(rows, scale)
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(quotient), -127, 127).astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(quotient, -most, most).astype(dtype)


def over(rows: Array, scale: Any) -> Array:
    """Return `rows / scale`, float32.

    XLA turns division by a constant into a product with its reciprocal, which rounds halves differently.
    """
    divisor = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), rows.shape)
    return rows.astype(jnp.float32) / lax.optimization_barrier(divisor)


def merge(total: Array, total_lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Merge attention over more keys into a total: outputs (tokens, heads, size), LSEs float32."""
    # If neither saw a key, -inf - -inf is NaN, and there is nothing to weigh.
    weight = jnp.nan_to_num(jax.nn.sigmoid(part_lse - total_lse), nan=0.0)[..., None]
    merged = total * (1.0 - weight) + part.astype(total.dtype) * weight
    return merged.astype(total.dtype), jnp.logaddexp(total_lse, part_lse)


def functions_of(spec: LayerSpec) -> Any:
    """Return a layer's functions of scores for `attend`, None where it has none. Imports torch.

    Raises `UntraceableError` where they can't be generated.
    """
    if not spec.has_functions:
        return None
    from polyattn_tpu.pointwise import Functions

    return Functions.of(spec)


def _changes(
    plan: AttentionPlan, spec: LayerSpec, cache: Cache, functions: Any, inputs: Any
) -> Any:
    """Return what the kernel takes of a layer's functions, None where it has none."""
    if functions is None:
        return None
    from polyattn_tpu.pointwise import Changes

    assert plan.places is not None
    page = cache.key.shape[2]
    keys, heads = pages_per_step(page) * page, (spec.num_heads, spec.num_kv_heads)
    return Changes.of(functions, inputs or {}, plan.places, heads, keys)


def _check(
    plan: AttentionPlan, spec: LayerSpec, query: Array, sinks: Array | None, slopes: Array | None
) -> None:
    wanted = (plan.num_tokens, spec.num_heads, spec.head_size)
    if query.shape != wanted:
        raise BatchError(f"query has shape {query.shape}; the plan takes {wanted}: see pad()")
    for name, value, asked in (
        ("sinks", sinks, spec.learned_sinks),
        ("alibi_slopes", slopes, spec.alibi),
    ):
        if (value is not None) != asked:
            raise BatchError(
                f"{name} {'is missing' if asked else 'was given'}: the spec "
                f"{'asks for it' if asked else 'does not ask for it'} ({spec})"
            )
        if value is not None and value.shape != (spec.num_heads,):
            raise BatchError(f"{name} has shape {value.shape}; it must be ({spec.num_heads},)")


def _check_cache(plan: AttentionPlan, spec: LayerSpec, cache: Cache, in_rows: bool) -> None:
    """Check a cache's pages: their tokens, their heads and, where they aren't bytes, the heads' sizes."""
    if plan.page and cache.key.shape[2] != plan.page:
        raise BatchError(
            f"the cache has pages of {cache.key.shape[2]} tokens, and the plan is of {plan.page}: pass "
            "the cache's block_size to plan()"
        )
    sizes = (spec.head_size, spec.v_head_size)
    for name, pages, size in zip(Cache._fields, cache, sizes, strict=True):
        if pages is None:
            continue
        wide = pages.shape[3] if in_rows else whole_lanes(size)
        if pages.shape[1::2] != (spec.num_kv_heads, wide):
            raise BatchError(
                f"the cache's {name} has {pages.shape[1]} heads of {pages.shape[3]}, and the layer "
                f"{spec.num_kv_heads} of {wide}; pass its own: Cache.zeros(spec, …)"
            )


def _check_functions(plan: AttentionPlan, spec: LayerSpec, functions: Any, inputs: Any) -> None:
    asked = spec.has_functions
    if asked != (functions is not None):
        raise BatchError(
            f"functions {'are missing' if asked else 'were given'}: the spec has variant="
            f"{spec.variant!r} and mask={spec.mask!r}; pass functions_of(spec)"
        )
    if inputs and not asked:
        raise BatchError(f"inputs {sorted(inputs)} were given to a layer without functions")
    if asked and plan.places is None:
        raise BatchError("the plan is of a layer without functions; plan this layer's own spec")
