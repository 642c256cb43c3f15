"""Compiles the kernel for a TPU that need not be here, with libtpu's own compiler."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from polyattn.plugin import LayerSpec

from polyattn_tpu.configs import pages_per_step, tile_tokens
from polyattn_tpu.kernel import Form, paged_attention

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
CACHES = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@cache
def sharding(arch: str) -> Any:
    """Return a sharding on one chip of `arch`. Needs libtpu; no TPU, and none is looked for."""
    import libtpu
    from jax.experimental import topologies

    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(TOPOLOGIES[arch], platform="tpu")
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    return NamedSharding(mesh, PartitionSpec())


def compile_phase(
    spec: LayerSpec, arch: str, phase: str, block_size: int, seqs: int = 8, tokens: int = 512
) -> Any:
    """Compile PALLAS_ATTN for prefill or decode of `spec`; returns JAX's compiled function.

    Raises what the compiler raises, where VMEM doesn't hold a step.
    """
    place = sharding(arch)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    dtype = jnp.dtype(spec.dtype)
    cached = CACHES.get(spec.kv_cache_dtype, dtype)
    decode = phase == "decode"
    per_tile = 1 if decode else tile_tokens(spec)
    count = seqs if decode else tokens
    tiles = count // per_tile + (0 if decode else seqs)
    form = Form(
        spec.scale, spec.causal, spec.sliding_window, spec.chunk_size, spec.logit_soft_cap, 0.5,
        0.5, per_tile, spec.gqa_ratio, pages_per_step(block_size), 1,
        spec.needs_lse or spec.learned_sinks,
    )  # fmt: skip
    pages = (64, spec.num_kv_heads, block_size)
    ints = jnp.int32
    lowered = paged_attention.lower(
        array(dtype, count, spec.num_heads, spec.head_size), array(cached, *pages, spec.head_size),
        array(cached, *pages, spec.v_head_size), array(ints, tiles * per_tile), array(ints, count),
        array(ints, tiles), array(ints, tiles), array(ints, seqs), array(ints, seqs),
        array(ints, seqs, 64), array(jnp.float32, spec.num_heads) if spec.learned_sinks else None,
        form=form, interpret=False,
    )  # fmt: skip
    return lowered.compile()
