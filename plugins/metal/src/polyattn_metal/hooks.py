"""What this plugin declares. Imports neither torch nor MLX."""

from __future__ import annotations

from typing import Any

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

COMMON: dict[str, Any] = {
    "probe": "polyattn_metal.platform:ready",
    "requires": ("mlx>=0.32",),
    "install": 'pip install "polyattn[metal]"; where there is no Mac, pip install "mlx[cpu]"',
    "priorities": (
        Priority(score=5, platform="cpu", why="copies the cache at each call; here for its proof"),
        Priority(score=60, why="pages gathered in unified memory, MLX's own attention"),
    ),
    "proof": {"cpu": Proof.MEASURED, "metal": Proof.UNPROVEN},
}
CLAIMS: dict[str, Any] = {
    "platforms": {"metal": (), "cpu": ()},
    "dtypes": names("bfloat16 float16 float32"),
    "kv_cache_dtypes": names("auto int8"),
    "remedies": {
        "float64": "Metal has no float64",
        "fp8_e4m3": "torch's MPS tensors have no 8-bit floats; use int8",
    },
}

MLX_ATTN = BackendInfo(
    name="MLX_ATTN",
    summary="pages gathered and attended to by MLX, prefill and decode in one call",
    path="polyattn_metal.attention:MlxAttention",
    capabilities=Capabilities(
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        layouts=("NHD", "HND"),
        phases=names("prefill decode mixed"),
        features=names(
            "causal non_causal gqa sliding_window window_right chunked sink_tokens "
            "v_head_size logit_soft_cap alibi learned_sinks lse deterministic"
        ),
        **CLAIMS,
    ),
    **COMMON,
)

MLX_MLA = BackendInfo(
    name="MLX_MLA",
    summary="absorbed MLA decode by MLX: each latent gathered once for all heads",
    path="polyattn_metal.attention:MlxMLA",
    capabilities=Capabilities(
        kinds=frozenset({AttentionKind.MLA}),
        phases=names("decode"),
        features=names("causal v_head_size lse deterministic"),
        **CLAIMS,
    ),
    **COMMON,
)

# Bandwidths in GB/s are of Apple's specifications.
PROFILES = tuple(
    (f"metal-{arch}", Device("metal", arch, f"Apple {name}", bandwidth=bandwidth))
    for arch, name, bandwidth in (
        ("m2-ultra", "M2 Ultra", 800),
        ("m3-max", "M3 Max", 400),
        ("m3-ultra", "M3 Ultra", 819),
        ("m4", "M4", 120),
        ("m4-max", "M4 Max", 546),
        ("m5", "M5", 153),
    )
)
PLATFORM = Platform(
    name="metal",
    profiles=PROFILES,
    detect="polyattn_metal.platform:detect",
    rank=20,
    device_types=("mps",),
)

declare(__name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[MLX_ATTN, MLX_MLA])
