"""Compiles for a TPU that need not be here, with libtpu's own compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from polyattn.plugin import AttentionKind, LayerSpec, absorbed
from polyattn.spec.decompose import paged
from polyattn_tpu.buckets import Buckets
from polyattn_tpu.configs import DENSE_PAGE
from polyattn_tpu.functions import (
    DTYPES,
    Cache,
    Scales,
    attend,
    attend_bounded,
    attend_given,
    functions_of,
    store,
)
from polyattn_tpu.latent import attend_pages, attend_rows
from polyattn_tpu.planning import (
    AttentionPlan,
    by_of,
    plan_bounded,
    plan_chunks,
    plan_dense,
    plan_paged,
)
from polyattn_tpu.recurrence import recur
from polyattn_tpu.step import Step

CHIPS = {
    "v5e": {1: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4"},
    "v5p": {1: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v6e": {1: "v6e:2x2", 4: "v6e:2x2", 8: "v6e:2x4"},
    "v7x": {1: "tpu7x:2x2x1", 8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
}
"""The topology that a mesh of so many devices is taken from. TPU7x has two devices a chip: 8 and 16
of them are 4 and 8 chips."""
AXIS = "heads"
LEAST_EFFORT = 9
"""XLA's level O0. Mosaic, VMEM and semaphores refuse the same at every level."""


@cache
def mesh(arch: str, devices: int = 1) -> Mesh:
    """Return a mesh of devices of `arch`. Needs libtpu; no TPU, and none is looked for."""
    import libtpu
    from jax.experimental import topologies

    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(CHIPS[arch][devices], platform="tpu")
    return Mesh(np.array(topology.devices[:devices]), (AXIS,))


def shapes(tree: Any, place: Any) -> Any:
    """Return the shapes of a tree's arrays on `place`, a sharding or a tree of them."""
    if isinstance(place, NamedSharding):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, place
    )


def compile_for(
    arch: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    level: int | None = None,
) -> Any:
    """Compile a function for one chip at these arguments' shapes; raises what the compiler raises.

    `level`: XLA's optimization level, libtpu's default where it is None.
    """
    place = NamedSharding(mesh(arch), P())
    lowered = jax.jit(function, donate_argnums=donate).lower(
        *(shapes(argument, place) for argument in arguments)
    )
    return lowered.compile(None if level is None else {"optimization_level": level})


def step_of(phase: str, seqs: int, tokens: int, length: int, block_size: int) -> Step:
    """Return a step of a phase: `seqs` single tokens, or rows of `tokens` together."""
    queries = [1] * seqs if phase == "decode" else [tokens // seqs] * seqs
    width = -(-length // block_size)
    table = np.arange(seqs * width).reshape(seqs, width)
    return Step.of(queries, [length] * seqs, table, np.arange(sum(queries)))


def attention_case(
    spec: LayerSpec,
    phase: str,
    *,
    block_size: int = 64,
    seqs: int = 8,
    tokens: int = 512,
    length: int = 2048,
    num_blocks: int = 512,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of (plan, query, cache or keys, parameters) and arguments for one layer."""
    page = block_size if spec.cached else DENSE_PAGE
    buckets = Buckets(tokens=tokens, seqs=seqs, pages=seqs * -(-length // page))
    step = step_of(phase, seqs, tokens, length, block_size)
    dtype = DTYPES[spec.dtype]
    group = spec.gqa_ratio
    params: list[Any] = [
        jnp.zeros(spec.num_heads) if asked else None for asked in (spec.learned_sinks, spec.alibi)
    ]
    functions, by = functions_of(spec), by_of(spec)
    params.append(None if functions is None else functions.blank(spec, seqs, length))
    plan: AttentionPlan
    if spec.cached:
        plan = plan_paged(step, group, block_size, buckets, by)
        kept = jax.eval_shape(lambda: Cache.zeros(spec, num_blocks, block_size))
    else:
        plan = plan_dense(step, group, buckets, by)
        keys = (seqs * length, spec.num_kv_heads)
        kept = tuple(
            jax.ShapeDtypeStruct((*keys, size), dtype)
            for size in (spec.head_size, spec.v_head_size)
        )
    query = jax.ShapeDtypeStruct((plan.num_tokens, spec.num_heads, spec.head_size), dtype)

    def run(plan: Any, query: Any, kept: Any, params: Any) -> Any:
        options = {"sinks": params[0], "alibi_slopes": params[1], "lse": spec.needs_lse}
        options |= {"functions": functions, "inputs": params[2]}
        if spec.cached:
            return attend(plan, spec, query, kept, interpret=False, **options)
        return attend_given(plan, spec, query, *kept, interpret=False, **options)

    return run, (plan, query, kept, params)


def compile_attention(
    spec: LayerSpec, arch: str, phase: str, *, level: int | None = None, **sizes: int
) -> Any:
    """Compile a layer's prefill or decode for one chip; returns JAX's compiled function."""
    run, arguments = attention_case(spec, phase, **sizes)
    return compile_for(arch, run, *arguments, level=level)


def latent_case(
    spec: LayerSpec,
    *,
    block_size: int = 64,
    seqs: int = 8,
    length: int = 2048,
    num_blocks: int = 512,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the absorbed decode of an MLA layer, or the attention to chosen rows of a sparse one."""
    assert spec.latent is not None
    dtype = DTYPES[spec.dtype]
    query = jax.ShapeDtypeStruct((seqs, spec.num_heads, spec.latent.size), dtype)
    cache = jax.eval_shape(lambda: Cache.zeros(spec, num_blocks, block_size))
    if spec.kind is AttentionKind.SPARSE_MLA:
        rank, chosen = spec.latent.rank, jax.ShapeDtypeStruct((seqs, spec.sparse.most), jnp.int32)
        return lambda q, s, c: attend_rows(q, s, c, spec.scale, rank), (query, chosen, cache)
    inner = absorbed(spec)
    buckets = Buckets(tokens=seqs, seqs=seqs, pages=seqs * length // block_size)
    plan = plan_paged(
        step_of("decode", seqs, seqs, length, block_size), spec.num_heads, block_size, buckets
    )
    return lambda p, q, c: attend(p, inner, q, c, interpret=False), (plan, query, cache)


def chosen_case(
    spec: LayerSpec, *, tokens: int, block_size: int, num_blocks: int = 512
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the attention of a sparse layer's tokens to chosen pages, as torch's door calls it."""
    assert spec.sparse is not None
    inner, dtype = paged(spec, True, False), DTYPES[spec.dtype]
    page, heads = inner.block_size, spec.num_kv_heads
    assert page is not None
    rows, width = tokens * heads, spec.sparse.budget * spec.sparse.granularity // page
    cache = jax.eval_shape(lambda: Cache.zeros(spec, num_blocks, block_size))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), (rows,), (rows, width))]
    query = jax.ShapeDtypeStruct((rows, inner.num_heads, spec.head_size), dtype)

    def pages(cache: Cache) -> Cache:
        assert cache.value is not None
        return Cache(*(a.reshape(-1, 1, page, a.shape[3]) for a in cache))

    if page % 8:

        def gathered(query: Any, row: Any, lens: Any, table: Any, cache: Cache) -> Any:
            after = jnp.zeros_like(row)
            return attend_pages(query, row, after, lens, table, pages(cache), inner, Scales())

        return gathered, (query, *ints, cache)
    step = Step.of([1] * rows, [width * page] * rows)
    plan = plan_bounded(step, inner.gqa_ratio, page, Buckets())

    def run(plan: Any, query: Any, lens: Any, table: Any, cache: Cache) -> Any:
        return attend_bounded(plan, inner, query, pages(cache), lens, table, interpret=False)

    return run, (plan, query, *ints[1:], cache)


def recurrent_case(
    spec: LayerSpec, phase: str, forms: Any, *, seqs: int = 8, tokens: int = 512, slots: int = 64
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a recurrence and its arguments; `forms(spec)` says shapes: (inputs, params, state)."""
    step = step_of(phase, seqs, tokens, 2048, 64)
    step = Step.of(step.query_lens, step.seq_lens, state_slots=np.arange(seqs))
    plan = plan_chunks(step, Buckets(tokens=tokens, seqs=seqs, pages=1))
    inputs, params, state = forms(spec, plan.num_tokens)
    dtype = DTYPES[spec.dtype]
    kept = dtype if spec.kind is AttentionKind.SHORT_CONV else jnp.float32
    given = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in inputs.items()}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    states = jax.ShapeDtypeStruct((slots, *state), kept)
    return lambda p, i, w, s: recur(p, spec, i, w, s), (plan, given, weights, states)


def store_case(
    spec: LayerSpec, *, block_size: int = 64, tokens: int = 512, num_blocks: int = 512
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the storing of a prefill's keys and values and its arguments; donate the fourth."""
    step = step_of("prefill", 8, tokens, 2048, block_size)
    plan = plan_paged(step, spec.gqa_ratio, block_size, Buckets(tokens=tokens, seqs=8, pages=512))
    rows = [
        jax.ShapeDtypeStruct((tokens, spec.num_kv_heads, size), DTYPES[spec.dtype])
        for size in (spec.head_size, spec.v_head_size)
    ]
    cache = jax.eval_shape(lambda: Cache.zeros(spec, num_blocks, block_size))
    return store, (plan, *rows, cache)


def compile_sharded(spec: LayerSpec, arch: str, phase: str, devices: int) -> Any:
    """Compile a cached layer with its heads spread over devices: no traffic between them."""
    chips = mesh(arch, devices)
    part = spec.replace(
        num_heads=spec.num_heads // devices, num_kv_heads=spec.num_kv_heads // devices
    )
    _, arguments = attention_case(spec, phase)
    _, query, cache, params = arguments
    run, (plan, *_rest) = attention_case(part, phase)
    heads, none = P(None, AXIS), P()
    spread = (
        jax.tree.map(lambda _: none, plan),
        heads,
        jax.tree.map(lambda _: heads, cache),
        [None if p is None else P(AXIS) for p in params],
    )
    function = jax.shard_map(run, mesh=chips, in_specs=spread, out_specs=heads, check_vma=False)
    places = jax.tree.map(
        lambda s: NamedSharding(chips, s), spread, is_leaf=lambda s: isinstance(s, P)
    )
    given = (plan, query, cache, params)
    return (
        jax.jit(function)
        .lower(*(shapes(g, p) for g, p in zip(given, places, strict=True)))
        .compile()
    )
