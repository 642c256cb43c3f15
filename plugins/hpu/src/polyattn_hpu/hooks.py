"""What this plugin declares. Imports neither torch nor Intel's bridge."""

from __future__ import annotations

from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    Device,
    Platform,
    Priority,
    Proof,
    Role,
    declare,
    names,
)

PLATFORMS: dict[str, tuple[str, ...]] = {"hpu": ("gaudi2", "gaudi3"), "cpu": ()}
DTYPES = names("bfloat16 float16 float32 float64")
CACHE_DTYPES = names("auto fp8_e4m3 fp8_e5m2 int8")
EXCLUDES = (
    (names("gaudi2 fp8_e4m3"), "Gaudi 2's e4m3 ends at 240, OCP's at 448"),
    (names("gaudi2 float64"), "Gaudi has no float64"),
    (names("gaudi3 float64"), "Gaudi has no float64"),
)
PRIORITIES = (
    Priority(score=15, platform="cpu", why="works on padded copies; it is here to be tested"),
    Priority(score=60, why="each cached block read once, work by block, few compiled graphs"),
)
PROOF = {"cpu": Proof.INTERPRETED}

HPU_ATTN = BackendInfo(
    name="HPU_ATTN",
    summary="Unified Attention: causal, shared and unique parts of static shapes, in torch",
    path="polyattn_hpu.attention:UnifiedAttention",
    capabilities=Capabilities(
        platforms=PLATFORMS,
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        dtypes=DTYPES,
        kv_cache_dtypes=CACHE_DTYPES,
        preferred_block_size=128,
        layouts=("NHD", "HND"),
        phases=names("prefill decode mixed"),
        features=names(
            "causal non_causal gqa sliding_window window_right chunked sink_tokens "
            "v_head_size logit_soft_cap alibi learned_sinks lse deterministic"
        ),
        excludes=EXCLUDES,
    ),
    priorities=PRIORITIES,
    proof=PROOF,
)

HPU_MLA = BackendInfo(
    name="HPU_MLA",
    summary="absorbed MLA decode by Unified Attention: each latent read once for all heads",
    path="polyattn_hpu.attention:UnifiedMLA",
    capabilities=Capabilities(
        platforms=PLATFORMS,
        kinds=frozenset({AttentionKind.MLA}),
        dtypes=DTYPES,
        kv_cache_dtypes=CACHE_DTYPES,
        preferred_block_size=128,
        phases=names("decode"),
        features=names("causal v_head_size lse deterministic"),
        excludes=EXCLUDES,
    ),
    priorities=PRIORITIES,
    proof=PROOF,
)

# Figures are from the vendors' datasheets.
PROFILES = (
    ("gaudi2", Device("hpu", "gaudi2", "Gaudi 2", bandwidth=2460, matmul=432)),
    ("gaudi3", Device("hpu", "gaudi3", "Gaudi 3", fp8="ocp", bandwidth=3700, matmul=1835)),
)
PLATFORM = Platform(
    name="hpu",
    profiles=PROFILES,
    detect="polyattn_hpu.platform:detect",
    rank=20,
    current="polyattn_hpu.platform:current",
)

declare(__name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[HPU_ATTN, HPU_MLA])
