"""What this plugin declares. Imports neither torch nor Triton."""

from __future__ import annotations

import os

from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    GraphCapture,
    Priority,
    Proof,
    Role,
    hookimpl,
    multiples,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Under Triton's interpreter the kernels run on CPU tensors: that is how CI checks them."""

NVIDIA = ("sm_80+",)
AMD = ("gfx90a", "gfx942", "gfx950")

TRITON_ATTN = BackendInfo(
    name="TRITON_ATTN",
    summary="paged prefill and split-KV decode in Triton; every feature, NVIDIA and AMD",
    path="polyattn_triton.attention:TritonAttention",
    probe="polyattn_triton.probes:ready",
    requires=("triton>=3.4",),
    install='pip install "polyattn[triton]"',
    capabilities=Capabilities(
        platforms={"cuda": NVIDIA, "rocm": AMD} | ({"cpu": ()} if INTERPRETED else {}),
        roles=frozenset(Role),
        # The interpreter computes bf16 wrongly, so there it isn't claimed.
        dtypes=frozenset({"float32", "float16"} | (set() if INTERPRETED else {"bfloat16"})),
        kv_cache_dtypes=frozenset({"auto", "int8"})
        | (frozenset() if INTERPRETED else frozenset({"fp8_e4m3", "fp8_e5m2"})),
        fp8_formats=frozenset({"ocp", "fnuz"}),
        head_sizes=multiples(8, high=256),
        v_head_sizes=multiples(8, high=256),
        gqa_ratios=multiples(1, high=128),
        layouts=("NHD", "HND"),
        features=frozenset(
            {
                "causal",
                "non_causal",
                "gqa",
                "v_head_size",
                "sliding_window",
                "chunked",
                "sink_tokens",
                "logit_soft_cap",
                "alibi",
                "learned_sinks",
                "lse",
                "deterministic",
            }
        ),
        graph_capture=GraphCapture.NONE if INTERPRETED else GraphCapture.SINGLE_TOKEN_DECODE,
    ),
    priorities=(
        Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
        Priority(
            score=75,
            phase="decode",
            kind=AttentionKind.ATTENTION,
            why="split-KV fills the chip with few sequences too; one launch, no host plan",
        ),
        Priority(score=60, why="a good general kernel wherever Triton runs"),
    ),
    proof={
        "sm_90": Proof.MEASURED,
        "cuda": Proof.COMPILED,
        "rocm": Proof.COMPILED,
        "cpu": Proof.INTERPRETED,
    },
)


@hookimpl
def polyattn_api_versions() -> tuple[int, int]:
    return (1, 1)


@hookimpl
def polyattn_backends() -> list[BackendInfo]:
    return [TRITON_ATTN]
