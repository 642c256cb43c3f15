"""What this plugin declares. Imports neither torch nor Triton."""

from __future__ import annotations

import os

from polyattn.plugin import (
    ANY_ROWS,
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

PLATFORMS = {"cuda": NVIDIA, "rocm": AMD} | ({"cpu": ()} if INTERPRETED else {})
# The interpreter computes bf16 wrongly, so there it isn't claimed.
DTYPES = frozenset({"float32", "float16"} | (set() if INTERPRETED else {"bfloat16"}))
PROOF = {
    "sm_90": Proof.MEASURED,
    "cuda": Proof.COMPILED,
    "rocm": Proof.COMPILED,
    "cpu": Proof.INTERPRETED,
}

NO_E4M3 = tuple(
    (frozenset({what, arch}), "Triton converts e4m3 from sm_89 on; fp8_e5m2 and int8 work")
    for arch in ("sm_80", "sm_86", "sm_87")
    for what in ("fp8_e4m3", "fp8_inputs", "fp8_output")
)
TRITON_ATTN = BackendInfo(
    name="TRITON_ATTN",
    aliases=("TRITON",),
    summary="paged prefill and split-KV decode in Triton; every feature, NVIDIA and AMD",
    path="polyattn_triton.attention:TritonAttention",
    variant_check="polyattn_triton.functions.pointwise:variant_problem",
    rows_check="polyattn_triton.functions.rows:rows_problem",
    probe="polyattn_triton.probes:ready",
    requires=("triton>=3.5,<3.9",),
    install='pip install "polyattn[triton]"',
    capabilities=Capabilities(
        platforms=PLATFORMS,
        cached=frozenset({True, False}),
        roles=frozenset(Role),
        dtypes=DTYPES,
        kv_cache_dtypes=frozenset({"auto", "int8", ANY_ROWS})
        | (frozenset() if INTERPRETED else frozenset({"fp8_e4m3", "fp8_e5m2"})),
        fp8_formats=frozenset({"ocp", "fnuz"}),
        head_sizes=multiples(8, high=256),
        # Below 32 values a head the kit drew a wrong step on an H200 (16, over an e4m3 cache).
        v_head_sizes=multiples(8, low=32, high=256),
        gqa_ratios=multiples(1, high=128),
        layouts=("NHD", "HND", "contiguous"),
        decode_query_lens=16,
        shared_prefix=True,
        padding_rows=True,
        features=frozenset(
            {
                "causal",
                "non_causal",
                "gqa",
                "v_head_size",
                "sliding_window",
                "chunked",
                "sink_tokens",
                "cache_positions",
                "logit_soft_cap",
                "alibi",
                "learned_sinks",
                "variant",
                "custom_mask",
                "block_sparse",
                "tensor_scales",
                "head_scales",
                "lse",
                "length_bounds",
                "deterministic",
            }
            # The interpreter is not held to 8-bit floats.
            | (set() if INTERPRETED else {"fp8_inputs", "fp8_output"})
        ),
        by_address=True,
        graph_capture=GraphCapture.ANY,
        excludes=(
            (
                frozenset({"cache_positions", ANY_ROWS}),
                "rows of bytes are read in groups, not in the pairs that turn",
            ),
            *NO_E4M3,
        ),
    ),
    priorities=(
        Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
        Priority(
            score=82,
            archs=("sm_90",),
            phase="decode",
            kind=AttentionKind.ATTENTION,
            why="on an H200 0.94 to 1.5 times as fast as FlashInfer, most with few sequences",
        ),
        Priority(
            score=75,
            phase="decode",
            kind=AttentionKind.ATTENTION,
            why="near the memory's bandwidth; split-KV fills the chip with few sequences too",
        ),
        Priority(score=60, why="a good general kernel wherever Triton runs"),
    ),
    proof=PROOF,
)


def _latent(
    name: str, path: str, kind: AttentionKind, phases: frozenset[str], summary: str
) -> BackendInfo:
    return BackendInfo(
        name=name,
        summary=summary,
        path=f"polyattn_triton.mla:{path}",
        probe="polyattn_triton.probes:ready",
        requires=("triton>=3.5,<3.9",),
        install='pip install "polyattn[triton]"',
        capabilities=Capabilities(
            platforms=PLATFORMS,
            kinds=frozenset({kind}),
            dtypes=DTYPES,
            kv_cache_dtypes=frozenset({"auto", "int8"})
            | (frozenset() if INTERPRETED else frozenset({"fp8_e4m3", "fp8_e5m2"})),
            fp8_formats=frozenset({"ocp", "fnuz"}),
            latent_ranks=multiples(16, high=512),
            block_sizes=multiples(1, high=1024),
            preferred_block_size=64,
            phases=phases,
            decode_query_lens=16 if kind is AttentionKind.MLA else 1,
            features=frozenset({"causal", "v_head_size", "lse", "deterministic"}),
            excludes=NO_E4M3,
            graph_capture=GraphCapture.NONE if INTERPRETED else GraphCapture.SINGLE_TOKEN_DECODE,
        ),
        priorities=(
            Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
            Priority(score=60, why="a good general kernel wherever Triton runs"),
        ),
        proof=PROOF,
    )


TRITON_MLA = _latent(
    "TRITON_MLA",
    "TritonMLA",
    AttentionKind.MLA,
    frozenset({"decode"}),
    "absorbed MLA decode in Triton, split-KV; a cached row is loaded once for scores and output",
)
TRITON_MLA_SPARSE = _latent(
    "TRITON_MLA_SPARSE",
    "TritonMLASparse",
    AttentionKind.SPARSE_MLA,
    frozenset({"prefill", "decode"}),
    "MLA over the chosen rows of the latent cache, in Triton",
)


def _scan(
    name: str, path: str, kinds: set[AttentionKind], summary: str, priority: Priority,
    proof: dict[str, Proof], extra: frozenset[str] = frozenset(),
) -> BackendInfo:  # fmt: skip
    return BackendInfo(
        name=name,
        summary=summary,
        path=f"polyattn_triton.{path}",
        probe="polyattn_triton.probes:ready",
        requires=("triton>=3.5,<3.9",),
        install='pip install "polyattn[triton]"',
        capabilities=Capabilities(
            platforms=PLATFORMS,
            kinds=frozenset(kinds),
            dtypes=DTYPES,
            head_sizes=multiples(1, high=256),
            v_head_sizes=multiples(1, high=256),
            features=frozenset(
                {
                    "causal",
                    "gqa",
                    "v_head_size",
                    "deterministic",
                    "batch_invariant",
                    "narrow_states",
                }
                | extra
            ),
            state_targets=True,
            graph_capture=GraphCapture.UNIFORM,
        ),
        priorities=(
            Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
            priority,
        ),
        proof=proof,
    )


TRITON_SCAN = _scan(
    "TRITON_SCAN",
    "scan:TritonScan",
    {
        AttentionKind.SHORT_CONV, AttentionKind.MAMBA1, AttentionKind.MAMBA2, AttentionKind.LINEAR,
        AttentionKind.GDN, AttentionKind.KDA, AttentionKind.RWKV7,
    },
    "Mamba, linear attention, delta rules, RWKV-7 and short convolutions, in Triton",
    Priority(score=70, why="a launch or two for a whole prefill; states stay in registers"),
    PROOF,
    frozenset({"gated", "grouped_channels", "bc_in_float32", "wide_conv_states"}),
)  # fmt: skip

TRITON_TOKEN_SCAN = _scan(
    "TRITON_TOKEN_SCAN",
    "token_scan:TritonTokenScan",
    {AttentionKind.RG_LRU, AttentionKind.PHI_LINEAR},
    "RG-LRU and linear attention with a normaliser, in Triton, by the token",
    Priority(score=60, why="one launch; states stay in registers; a token after another"),
    PROOF,
)  # fmt: skip
ATTENDING = frozenset(kind for kind in AttentionKind if not kind.is_recurrent)
TRITON_STORE = BackendInfo(
    name="TRITON_STORE",
    summary="keys and values rotated, quantised and written to their slots in one launch",
    path="polyattn_triton.store:TritonStore",
    probe="polyattn_triton.probes:ready",
    requires=("triton>=3.5,<3.9",),
    install='pip install "polyattn[triton]"',
    capabilities=Capabilities(
        platforms=PLATFORMS,
        kinds=ATTENDING,
        phases=frozenset({"store"}),
        dtypes=DTYPES,
        kv_cache_dtypes=frozenset({"auto", "int8", "nvfp4"})
        | (frozenset() if INTERPRETED else frozenset({"fp8_e4m3", "fp8_e5m2"})),
        fp8_formats=frozenset({"ocp", "fnuz"}),
        layouts=("NHD", "HND", "contiguous"),
        features=frozenset({"causal", "gqa", "tensor_scales", "head_scales"})
        | (frozenset() if INTERPRETED else frozenset({"fp8_inputs"})),
        excludes=NO_E4M3,
        rotates=frozenset({"neox", "gptj"}),
    ),
    priorities=(
        Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
        Priority(score=70, why="one launch, where torch takes a dozen"),
    ),
    proof=PROOF,
)
TRITON_MERGE = BackendInfo(
    name="TRITON_MERGE",
    summary="attention states merged in place, in one launch",
    path="polyattn_triton.state_merge:TritonMerge",
    probe="polyattn_triton.probes:ready",
    requires=("triton>=3.5,<3.9",),
    install='pip install "polyattn[triton]"',
    capabilities=Capabilities(
        platforms=PLATFORMS, kinds=ATTENDING, phases=frozenset({"merge"}), dtypes=DTYPES
    ),
    priorities=(
        Priority(score=1, platform="cpu", why="the interpreter: for tests only"),
        Priority(score=70, why="one launch, where torch takes five"),
    ),
    proof=PROOF,
)


@hookimpl
def polyattn_api_versions() -> tuple[int, int]:
    return (1, 1)


@hookimpl
def polyattn_backends() -> list[BackendInfo]:
    return [
        TRITON_ATTN, TRITON_MLA, TRITON_MLA_SPARSE, TRITON_SCAN, TRITON_TOKEN_SCAN, TRITON_STORE,
        TRITON_MERGE
    ]  # fmt: skip
