"""What this plugin declares. Imports neither torch nor the library."""

from __future__ import annotations

from polyattn.plugin import (
    BackendInfo,
    Capabilities,
    Device,
    Platform,
    Priority,
    Proof,
    Role,
    declare,
    multiples,
    names,
    one_of,
)

PROFILES = (  # bandwidths in GB/s of Intel's datasheets
    ("xpu-b580", Device("xpu", "xe2", "Arc B580", fp8="ocp", bandwidth=456)),
    ("xpu-b60", Device("xpu", "xe2", "Arc Pro B60", fp8="ocp", bandwidth=456)),
    ("xpu-max-1550", Device("xpu", "pvc", "Data Center GPU Max 1550", bandwidth=3276)),
)

XPU_FLASH_ATTN = BackendInfo(
    name="XPU_FLASH_ATTN",
    aliases=("INTEL_XPU",),
    summary="FlashAttention over pages and given keys, through vllm-xpu-kernels",
    path="polyattn_xpu.attention:VarlenAttention",
    requires=("vllm-xpu-kernels>=0.1.16",),
    install="pip install vllm-xpu-kernels, beside torch's XPU build",
    capabilities=Capabilities(
        platforms={"xpu": ("pvc", "xe2", "xe3")},
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        kv_cache_dtypes=names("auto fp8_e4m3"),
        head_sizes=one_of(64, 96, 128, 192, 256),
        block_sizes=multiples(64),
        preferred_block_size=64,
        features=names("causal non_causal gqa sliding_window learned_sinks lse"),
        excludes=(
            (names("pvc fp8_e4m3"), "its matrix engines have no 8-bit floats"),
            (
                names("learned_sinks lse"),
                "its sinks are rounded as queries are, too coarse for an LSE",
            ),
        ),
    ),
    priorities=(Priority(score=80, why="Xe2's matrix engines, by CUTLASS for SYCL"),),
    proof={"xpu": Proof.SIGNATURE},
)

PLATFORM = Platform(
    name="xpu",
    profiles=PROFILES,
    detect="polyattn_xpu.platform:detect",
    rank=20,
    current="polyattn_xpu.platform:current",
)

declare(__name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[XPU_FLASH_ATTN])
