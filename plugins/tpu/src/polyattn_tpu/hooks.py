"""What this plugin declares. Imports neither torch nor JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.plugin import (
    ANY_ROWS,
    ANY_SIZE,
    AttentionKind,
    BackendInfo,
    Capabilities,
    Device,
    Platform,
    Priority,
    Proof,
    Role,
    Sizes,
    Variant,
    declare,
    names,
)

PLATFORMS: dict[str, tuple[str, ...]] = {"tpu": ()}
DTYPES = names("bfloat16 float32")
REMEDIES = {
    "float16": "no TPU multiplies float16, nor does Mosaic load it; cast the model to bfloat16"
}
CACHE_DTYPES = names("auto int8 fp8_e4m3 fp8_e5m2")
REQUIRED: dict[str, Any] = {"requires": ("jax>=0.10",), "install": 'pip install "polyattn[tpu]"'}
COMMON: dict[str, Any] = REQUIRED | {"probe": "polyattn_tpu.probes:ready"}
PROVEN = {"tpu": Proof.COMPILED, "cpu": Proof.INTERPRETED}
"""Compiled by libtpu for v5e, v5p, v6e and TPU7x; the whole kit interpreted through both doors. Results
are in benchmarks/results/tpu."""
PAGES = Sizes(
    low=8,
    high=2048,
    multiple=8,
    why="a tile has 8 sublanes, and two steps of K and V must fit the core's VMEM",
)
EXCLUDES = (
    (
        names("float32 int8"),
        "8-bit values are widened to bf16's mantissa on the way to the matrix unit",
    ),
)
PAGED = Capabilities(
    platforms=PLATFORMS,
    dtypes=DTYPES,
    remedies=REMEDIES,
    kv_cache_dtypes=CACHE_DTYPES,
    block_sizes=PAGES,
    preferred_block_size=64,
    layouts=("HND",),
    excludes=EXCLUDES,
)
"""What every backend over pages claims."""
TESTS = Priority(score=1, platform="cpu", why="the interpreter: for tests only")


def declared(
    name: str, path: str, claims: Capabilities, priority: Priority, levels: str = "", **fields: Any
) -> BackendInfo:
    """Return a backend of two builds: what is compiled for a TPU, and what Pallas interprets in tests.

    `levels`: features that only the second claims, because a TPU's bits were not compared.
    """
    compiled = Variant(
        name="compiled",
        path=f"polyattn_tpu.backends:{path}",
        probe="polyattn_tpu.probes:ready",
        capabilities=claims,
        **REQUIRED,
    )
    interpreter = replace(
        compiled,
        name="interpreter",
        probe="polyattn_tpu.probes:interprets",
        # A format's bytes move along lanes in a way that wasn't tried on a TPU.
        capabilities=replace(
            claims.but(platforms={"cpu": ()}, features=claims.features | names(levels)),
            kv_cache_dtypes=claims.kv_cache_dtypes
            | ({ANY_ROWS} if "rows_check" in fields else set()),
        ),
    )
    return BackendInfo.of_variants(
        compiled, interpreter, name=name, priorities=(TESTS, priority), proof=PROVEN, **fields
    )


PALLAS_ATTN = declared(
    "PALLAS_ATTN",
    "PallasAttention",
    PAGED.but(
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        head_sizes=Sizes(low=8, high=320, why="two steps of K and V must fit the core's VMEM"),
        v_head_sizes=Sizes(low=8, high=320, why="two steps of K and V must fit the core's VMEM"),
        phases=names("prefill decode mixed"),
        features=names(
            "causal non_causal gqa v_head_size sliding_window window_right "
            "sink_tokens chunked alibi learned_sinks logit_soft_cap lse deterministic "
            "variant custom_mask block_sparse length_bounds"
        ),
    ),
    Priority(score=80, why="pages by DMA, one ragged kernel a step"),
    levels="batch_invariant step_invariant",
    aliases=("PALLAS",),
    summary="ragged paged attention in Pallas: prefill, decode and mixed batches in one kernel",
    variant_check="polyattn_tpu.variants:variant_problem",
    rows_check="polyattn_tpu.rows:rows_problem",
)

PALLAS_MLA = declared(
    "PALLAS_MLA",
    "PallasMLA",
    PAGED.but(
        kinds=frozenset({AttentionKind.MLA}),
        latent_ranks=Sizes(low=16, high=512, why="compiled up to this"),
        phases=names("decode"),
        decode_query_lens=4,
        features=names("causal v_head_size lse deterministic"),
    ),
    Priority(score=80, why="the latents by DMA, the value a part of the key"),
    summary="absorbed MLA decode in Pallas: each latent read once for all heads",
    rows_check="polyattn_tpu.rows:latent_problem",
)

XLA_MLA_SPARSE = declared(
    "XLA_MLA_SPARSE",
    "XlaSparse",
    PAGED.but(
        kinds=frozenset({AttentionKind.SPARSE_MLA}),
        features=names("causal v_head_size lse deterministic"),
    ),
    Priority(score=40, why="what is gathered goes through HBM once more"),
    levels="batch_invariant step_invariant",
    summary="attention to chosen latents, gathered and multiplied by XLA",
)

XLA_PAGES = declared(
    "XLA_PAGES",
    "XlaPages",
    PAGED.but(
        block_sizes=ANY_SIZE,
        phases=names("prefill decode mixed"),
        features=names("causal gqa v_head_size lse deterministic length_bounds"),
    ),
    Priority(score=30, why="each token gathers its keys, through HBM once more"),
    summary="attention over pages of any size, gathered by XLA: single tokens that are chosen",
)

XLA_SCAN = declared(
    "XLA_SCAN",
    "XlaScan",
    Capabilities(
        platforms=PLATFORMS,
        kinds=frozenset(map(AttentionKind, names("short_conv mamba1 mamba2 linear gdn"))),
        dtypes=DTYPES,
        remedies=REMEDIES,
        features=names("causal gqa v_head_size deterministic"),
    ),
    Priority(score=50, why="products of chunks; one chunk after another"),
    summary="recurrences by chunks in XLA: Mamba-1 and -2, delta rule, linear, short convolution",
)

ATTENDING = PALLAS_ATTN, PALLAS_MLA, XLA_MLA_SPARSE, XLA_PAGES, XLA_SCAN

SERVED: dict[str, Any] = {
    "platforms": {"tpu": ()},
    "dtypes": DTYPES,
    "remedies": REMEDIES,
    "kv_cache_dtypes": CACHE_DTYPES,
    "kinds": frozenset(kind for kind in AttentionKind if not kind.is_recurrent),
    "layouts": ("HND",),
}

JAX_STORE = BackendInfo(
    name="JAX_STORE",
    summary="keys and values scattered into donated pages",
    path="polyattn_tpu.backends:JaxStore",
    capabilities=Capabilities(
        phases=names("store"),
        block_sizes=PAGES,
        preferred_block_size=64,
        excludes=EXCLUDES,
        **SERVED,
    ),
    priorities=(Priority(score=50, why="in place: torch's indexing would copy the cache"),),
    proof={"tpu": Proof.INTERPRETED},
    **COMMON,
)

JAX_MERGE = BackendInfo(
    name="JAX_MERGE",
    summary="attention states merged in one program",
    path="polyattn_tpu.backends:JaxMerge",
    capabilities=Capabilities(phases=names("merge"), **SERVED),
    priorities=(Priority(score=50, why="one program instead of five"),),
    proof={"tpu": Proof.INTERPRETED},
    **COMMON,
)

_TPU7X = Device("tpu", "v7x", "TPU7x", fp8="ocp", bandwidth=7370, matmul=2307)

# Figures are from the vendors' datasheets.
PROFILES = (
    ("tpu-v5e", Device("tpu", "v5e", "TPU v5e", bandwidth=819, matmul=197)),
    ("tpu-v5p", Device("tpu", "v5p", "TPU v5p", bandwidth=2765, matmul=459)),
    ("tpu-v6e", Device("tpu", "v6e", "TPU v6e", bandwidth=1640, matmul=918)),
    ("tpu-v7x", _TPU7X),
    ("tpu7x", _TPU7X),
)
PLATFORM = Platform(
    name="tpu",
    detect="polyattn_tpu.platform:detect",
    rank=30,
    device_types=("jax",),
    profiles=PROFILES,
    interpret="polyattn_tpu.platform:interpret",
)

declare(
    __name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[*ATTENDING, JAX_STORE, JAX_MERGE]
)
