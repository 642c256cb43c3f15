"""What this plugin declares. Imports neither torch nor Intel's bridge."""

from __future__ import annotations

from polyattn.plugin import (
    BackendInfo,
    Capabilities,
    Platform,
    Priority,
    Proof,
    Role,
    hookimpl,
)

HPU_ATTN = BackendInfo(
    name="HPU_ATTN",
    summary="Unified Attention: causal, shared and unique parts of static shapes, in torch",
    path="polyattn_hpu.attention:UnifiedAttention",
    capabilities=Capabilities(
        platforms={"hpu": ("gaudi2", "gaudi3"), "cpu": ()},
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        dtypes=frozenset({"bfloat16", "float16", "float32", "float64"}),
        kv_cache_dtypes=frozenset({"auto", "fp8_e4m3", "fp8_e5m2", "int8"}),
        preferred_block_size=128,
        layouts=("NHD", "HND"),
        phases=frozenset({"prefill", "decode", "mixed"}),
        features=frozenset(
            {
                "causal",
                "non_causal",
                "gqa",
                "sliding_window",
                "chunked",
                "sink_tokens",
                "v_head_size",
                "logit_soft_cap",
                "alibi",
                "learned_sinks",
                "lse",
                "deterministic",
            }
        ),
        excludes=(
            (frozenset({"gaudi2", "fp8_e4m3"}), "Gaudi 2's e4m3 ends at 240, OCP's at 448"),
            (frozenset({"gaudi2", "float64"}), "Gaudi has no float64"),
            (frozenset({"gaudi3", "float64"}), "Gaudi has no float64"),
        ),
    ),
    priorities=(
        Priority(score=15, platform="cpu", why="works on padded copies; here for its proof"),
        Priority(score=60, why="each cached block read once, work by block, few compiled graphs"),
    ),
    proof={"cpu": Proof.INTERPRETED},
)


@hookimpl
def polyattn_api_versions() -> tuple[int, int]:
    return (1, 1)


@hookimpl
def polyattn_platforms() -> list[Platform]:
    return [
        Platform(
            name="hpu",
            detect="polyattn_hpu.platform:detect",
            rank=20,
            current="polyattn_hpu.platform:current",
        )
    ]


@hookimpl
def polyattn_backends() -> list[BackendInfo]:
    return [HPU_ATTN]
