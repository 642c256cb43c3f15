"""What this plugin declares. Imports neither torch nor JAX."""

from __future__ import annotations

import os

from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    Platform,
    Priority,
    Proof,
    Role,
    Sizes,
    hookimpl,
)

from polyattn_tpu.profiles import PROFILES

INTERPRETED = os.environ.get("PALLAS_INTERPRET") == "1"
"""Then the kernel also serves CPU tensors, in Pallas' TPU interpreter: that is how CI checks it."""

PALLAS_ATTN = BackendInfo(
    name="PALLAS_ATTN",
    summary="ragged paged attention in Pallas: prefill, decode and mixed batches in one kernel",
    path="polyattn_tpu.attention:PallasAttention",
    probe="polyattn_tpu.probes:ready",
    requires=("jax>=0.10",),
    install='pip install "polyattn[tpu]" libtpu',
    capabilities=Capabilities(
        platforms={"tpu": ()} | ({"cpu": ()} if INTERPRETED else {}),
        roles=frozenset({Role.DECODER, Role.CROSS}),
        dtypes=frozenset({"bfloat16", "float32"}),
        kv_cache_dtypes=frozenset({"auto", "int8", "fp8_e4m3", "fp8_e5m2"}),
        head_sizes=Sizes(
            low=32, high=320, multiple=8, why="compiled for these; lanes come in groups of 8"
        ),
        block_sizes=Sizes(
            low=8,
            high=2048,
            multiple=8,
            why="a tile has 8 sublanes, and two steps of K and V must fit the core's VMEM",
        ),
        preferred_block_size=64,
        layouts=("HND",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        features=frozenset(
            {
                "causal",
                "non_causal",
                "gqa",
                "sliding_window",
                "chunked",
                "learned_sinks",
                "logit_soft_cap",
                "lse",
                "deterministic",
            }
        ),
        excludes=(
            (
                frozenset({"float32", "int8"}),
                "8-bit values are widened to bf16's mantissa on the way to the matrix unit",
            ),
        ),
    ),
    priorities=(
        Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
        Priority(
            score=80, kind=AttentionKind.ATTENTION, why="pages by DMA, one ragged kernel a step"
        ),
    ),
    proof={"tpu": Proof.COMPILED, "cpu": Proof.INTERPRETED},
)


@hookimpl
def polyattn_api_versions() -> tuple[int, int]:
    return (1, 1)


@hookimpl
def polyattn_platforms() -> list[Platform]:
    return [Platform(name="tpu", detect="polyattn_tpu.platform:detect", rank=30, profiles=PROFILES)]


@hookimpl
def polyattn_backends() -> list[BackendInfo]:
    return [PALLAS_ATTN]
