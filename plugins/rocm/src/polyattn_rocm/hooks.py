"""What this plugin declares. Imports neither torch nor any library."""

from __future__ import annotations

from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    Device,
    GraphCapture,
    Platform,
    Priority,
    Proof,
    Role,
    declare,
    multiples,
    names,
    one_of,
)

ATTENTION = AttentionKind.ATTENTION
PROOF = {"rocm": Proof.SIGNATURE}
SYMMETRIC_ALIBI = (names("alibi non_causal"), "its ALiBi is symmetric; ours is signed")
CK = Capabilities(
    platforms={"rocm": ("gfx90a", "gfx942", "gfx950")},
    roles=frozenset(Role),
    cached=frozenset({True, False}),
    features=names("causal non_causal gqa sliding_window alibi lse"),
)
"""What Composable Kernel computes, through any wrapper."""

ROCM_ATTN = BackendInfo(
    name="ROCM_ATTN",
    aliases=("AITER", "ROCM_AITER_FA"),
    summary="Composable Kernel attention through AITER: prefill of gathered pages, paged decode",
    path="polyattn_rocm.aiter:AiterAttention",
    probe="polyattn_rocm.providers:aiter_ready",
    requires=("amd-aiter>=0.1.8",),
    install="pip install amd-aiter",
    capabilities=CK.but(
        adds="fp8_e4m3 logit_soft_cap",
        platforms={"rocm": ("gfx942", "gfx950")},
        fp8_formats=names("fnuz ocp"),
        head_sizes=one_of(64, 128, 256),
        gqa_ratios=multiples(1, high=16),
        block_sizes=one_of(16, 32),
        graph_capture=GraphCapture.SINGLE_TOKEN_DECODE,
        excludes=(
            (names("lse decode"), "its paged decode returns no LSE"),
            SYMMETRIC_ALIBI,
            (names("fp8_e4m3 prefill"), "its prefill reads only keys of the query's dtype"),
            (names("alibi logit_soft_cap"), "its kernels cap scores after ALiBi's bias, or never"),
            (
                names("logit_soft_cap sliding_window decode"),
                "its decode caps the scores of hidden keys, too, so that they count",
            ),
        ),
    ),
    priorities=(
        Priority(score=90, kind=ATTENTION, phase="prefill", why="AMD's own kernels, in assembly"),
        Priority(score=80, kind=ATTENTION, phase="decode", why="AMD's own paged decode"),
    ),
    proof=PROOF,
)

ROCM_FLASH_ATTN = BackendInfo(
    name="ROCM_FLASH_ATTN",
    summary="Composable Kernel attention through the ROCm build of flash-attn",
    path="polyattn_rocm.flash_attn:CkFlashAttention",
    probe="polyattn_rocm.providers:flash_attn_ready",
    requires=("flash-attn>=2.6",),
    install="build github.com/ROCm/flash-attention for your ROCm release",
    capabilities=CK.but(
        decode_query_lens=16,
        head_sizes=multiples(8, low=32, high=256),
        block_sizes=multiples(256),
        preferred_block_size=256,
        excludes=(SYMMETRIC_ALIBI,),
        remedies={"logit_soft_cap": "this build of flash-attn takes softcap= and ignores it"},
    ),
    priorities=(
        Priority(score=75, phase="prefill", why="Composable Kernel, for machines without AITER"),
        Priority(score=55, phase="decode", why="pages of 256 tokens"),
    ),
    proof=PROOF,
)

# CUDA's detector recognises a ROCm build of torch and skips it.
# Figures are from the vendors' datasheets.
PROFILES = (
    ("mi250x", Device("rocm", "gfx90a", "Instinct MI250X", bandwidth=3277, matmul=383)),
    (
        "mi300x",
        Device("rocm", "gfx942", "Instinct MI300X", fp8="fnuz", bandwidth=5300, matmul=1307),
    ),
    ("mi355x", Device("rocm", "gfx950", "Instinct MI355X", fp8="ocp", bandwidth=8000, matmul=2500)),
)
PLATFORM = Platform(
    name="rocm",
    profiles=PROFILES,
    detect="polyattn_rocm.platform:detect",
    rank=20,
    device_types=("cuda", "hip"),
    current="polyattn_rocm.platform:current",
)

declare(__name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[ROCM_ATTN, ROCM_FLASH_ATTN])
