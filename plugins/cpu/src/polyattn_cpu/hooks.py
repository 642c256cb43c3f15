"""What this plugin declares. Imports neither torch nor anything heavy."""

from __future__ import annotations

from typing import Any

from polyattn.plugin import (
    ANY_ROWS,
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
    one_of,
)

ALL_DTYPES = names("float64 float32 bfloat16 float16")
ALL_ROLES = frozenset(Role)
QUANTISED = names("auto fp8_e4m3 fp8_e5m2 int8")
MASKS = names("causal non_causal gqa sliding_window chunked sink_tokens")

EVERYWHERE: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": (), "rocm": ()}
MEASURED = {"cpu": Proof.MEASURED, "sm_90": Proof.MEASURED}
LAST_RESORT = Priority(score=5, why="correct everywhere; on accelerators only a last resort")

BY_REQUEST = tuple(
    Priority(
        score=3,
        platform="cuda",
        needs=feature,
        why="one sequence at a time, since torch's kernels lack this: 4 to 27 times as long on an H100",
    )
    for feature in sorted(
        names(
            "variant custom_mask block_sparse logit_soft_cap alibi chunked sink_tokens cache_positions "
            "tensor_scales head_scales batch_invariant"
        )
    )
)
TORCH_SDPA = BackendInfo(
    name="TORCH_SDPA",
    aliases=("SDPA", "TORCH_NATIVE"),
    summary="torch's fused attention; serves everything",
    path="polyattn_cpu.sdpa:TorchSDPA",
    capabilities=Capabilities(
        platforms=EVERYWHERE,
        roles=ALL_ROLES,
        cached=frozenset({True, False}),
        dtypes=ALL_DTYPES,
        kv_cache_dtypes=QUANTISED | {ANY_ROWS},
        fp8_formats=names("ocp fnuz"),
        layouts=("NHD", "HND", "contiguous"),
        padding_rows=True,
        features=MASKS
        | names(
            "variant custom_mask block_sparse window_right cache_positions "
            "cache_positions_by_length v_head_size logit_soft_cap alibi learned_sinks "
            "tensor_scales head_scales fp8_inputs fp8_output lse deterministic "
            "batch_invariant"
        ),
    ),
    priorities=(
        Priority(score=50, platform="cpu", why="reads each cached key once; no compiler needed"),
        *BY_REQUEST,
        Priority(
            score=5, platform="cuda", needs="sliding_window", why="it masks what a window hides"
        ),
        Priority(
            score=61,
            platform="cuda",
            archs=("sm_90",),
            phase="prefill",
            needs="non_causal",
            cached=False,
            why="encoders, heads of 40 to 160 but 64 and 128: 0.3 to 1.03 of TRITON_ATTN's time (H100)",
        ),
        Priority(score=5, platform="cuda", why="torch's own kernels; copies cached pages first"),
        LAST_RESORT,
    ),
    proof=MEASURED,
)

NOT_COMPARED = tuple(
    (frozenset({"batch_invariant", platform}), "a GPU's products were not compared")
    for platform in ("cuda", "rocm")
)
# Every instruction set of x86 has run its kits and tests on a processor that has it, those of Arm in an
# emulator.
PROOF = {"x86_64": Proof.MEASURED, "aarch64": Proof.EMULATED}
PROOF_OF_RUNS = {
    **dict.fromkeys(("amx", "avx512_bf16", "avx512", "avx2", "generic"), Proof.MEASURED),
    **dict.fromkeys(("sve256_bf16", "sve256", "neon_bf16", "neon"), Proof.EMULATED),
}

NATIVE_LIBRARY: dict[str, Any] = {
    "probe": "polyattn_cpu.native.library:why_not",
    "runs": "polyattn_cpu.native.library:runs",
    "proof": PROOF,
    "proof_of_runs": PROOF_OF_RUNS,
}
NATIVE = Capabilities(platforms={"cpu": ()}, dtypes=names("float32 bfloat16 float16"))

NATIVE_ATTN = BackendInfo(
    name="NATIVE_ATTN",
    aliases=("CPU_ATTN", "INTEL_AMX"),
    summary="paged attention in C++ for each instruction set, the whole batch in one call",
    path="polyattn_cpu.native.attention:NativeAttention",
    rows_check="polyattn_cpu.native.rows:rows_problem",
    **NATIVE_LIBRARY,
    capabilities=NATIVE.but(
        roles=ALL_ROLES,
        cached=frozenset({True, False}),
        kv_cache_dtypes=QUANTISED | {ANY_ROWS},
        layouts=("NHD", "HND", "contiguous"),
        phases=names("prefill decode mixed"),
        by_address=True,
        padding_rows=True,
        features=MASKS
        | names(
            "v_head_size logit_soft_cap alibi learned_sinks lse deterministic batch_invariant "
            "step_invariant call_invariant machine_invariant"
        ),
        excludes=(
            (
                frozenset({"step_invariant", "sink_tokens"}),
                "kept first tokens and the window may share a tile of keys, or not, by the step",
            ),
        ),
    ),
    priorities=(Priority(score=100, why="reads each cached byte once, at the memory's pace"),),
)

NATIVE_MLA = BackendInfo(
    name="NATIVE_MLA",
    summary="absorbed MLA decode over the latent cache, in C++ for each instruction set",
    path="polyattn_cpu.native.attention:NativeMLA",
    rows_check="polyattn_cpu.native.rows:latent_problem",
    **NATIVE_LIBRARY,
    capabilities=NATIVE.but(
        kinds=frozenset({AttentionKind.MLA}),
        kv_cache_dtypes=QUANTISED | {ANY_ROWS},
        phases=names("decode"),
        features=names("causal v_head_size lse deterministic batch_invariant step_invariant"),
    ),
    priorities=(Priority(score=100, why="reads each cached latent once for all heads"),),
)

NATIVE_STORE = BackendInfo(
    name="NATIVE_STORE",
    summary="queries, keys and values normed, rotated, quantised and scattered in one call",
    path="polyattn_cpu.native.store:NativeStore",
    rows_check="polyattn_cpu.native.rows:store_problem",
    **NATIVE_LIBRARY,
    capabilities=NATIVE.but(
        kinds=frozenset(kind for kind in AttentionKind if not kind.is_recurrent),
        kv_cache_dtypes=QUANTISED | {ANY_ROWS},
        layouts=("NHD", "HND", "contiguous"),
        phases=names("store"),
        rotates=names("neox gptj"),
        norms=names("head token"),
    ),
    priorities=(Priority(score=100, why="one call instead of eight operators"),),
)

NATIVE_SCAN = BackendInfo(
    name="NATIVE_SCAN",
    summary="Mamba, linear attention, delta rules and short convolutions, in C++ by the token",
    path="polyattn_cpu.native.scan:NativeScan",
    **NATIVE_LIBRARY,
    capabilities=NATIVE.but(
        kinds=frozenset(
            map(AttentionKind, names("short_conv mamba1 mamba2 linear gdn kda rwkv6 rwkv7"))
        ),
        state_targets=True,
        features=names(
            "causal gqa v_head_size deterministic batch_invariant step_invariant gated bc_in_float32 "
            "wide_conv_states"
        ),
    ),
    priorities=(Priority(score=100, why="one call; a state passes through the cache once"),),
)

NATIVE_INDEX = BackendInfo(
    name="NATIVE_INDEX",
    summary="index keys scored, and the best candidates chosen, in C++ for each instruction set",
    path="polyattn_cpu.native.index:NativeIndex",
    capabilities=NATIVE.but(
        kinds=frozenset({AttentionKind.SPARSE, AttentionKind.SPARSE_MLA}),
        phases=names("index"),
        features=Capabilities.features | {"batch_invariant", "step_invariant"},
        indexes=names(
            "index_heads index_pool index_within index_part index_entries index_forced index_sum "
            "index_signed index_fp8_e4m3 index_fp8_scaled"
        ),
    ),
    priorities=(Priority(score=100, why="reads each index key once; ranks while it scores"),),
    # On an AMX processor it runs what AVX-512 has; it hasn't run on one, nor on Arm.
    **NATIVE_LIBRARY
    | {
        "proof": PROOF | {"aarch64": Proof.COMPILED},
        "proof_of_runs": {
            name: Proof.COMPILED if name == "amx" or proof is Proof.EMULATED else proof
            for name, proof in PROOF_OF_RUNS.items()
        },
    },
)

FLEX_ATTENTION = BackendInfo(
    name="FLEX_ATTENTION",
    aliases=("FLEX",),
    summary="torch's flex_attention through torch.compile, the whole batch in one call",
    path="polyattn_cpu.flex:FlexAttention",
    variant_check="polyattn_cpu.flex_pointwise:variant_problem",
    probe="polyattn_cpu.probes:compiler",
    capabilities=Capabilities(
        platforms={"cpu": (), "cuda": ("sm_80+",), "rocm": ()},
        roles=ALL_ROLES,
        cached=frozenset({True, False}),
        dtypes=names("float32 bfloat16 float16"),
        head_sizes=one_of(16, 32, 64, 128, 256),
        gqa_ratios=one_of(1, 2, 4, 8, 16),
        phases=names("prefill decode mixed"),
        features=MASKS | names("variant custom_mask block_sparse logit_soft_cap alibi"),
    ),
    priorities=(
        Priority(score=20, platform="cpu", why="gathers the cache into one padded tensor"),
        Priority(score=10, why="needs a compilation for each layer"),
    ),
    proof=MEASURED,
)

LATENTS = Capabilities(
    platforms=EVERYWHERE,
    kinds=frozenset({AttentionKind.MLA}),
    dtypes=ALL_DTYPES,
    kv_cache_dtypes=QUANTISED | {ANY_ROWS},
    fp8_formats=names("ocp fnuz"),
    phases=names("decode"),
    features=names("causal v_head_size lse deterministic batch_invariant step_invariant"),
    excludes=NOT_COMPARED,
)
TORCH_MLA = BackendInfo(
    name="TORCH_MLA",
    summary="absorbed MLA decode over the latent cache, in torch",
    path="polyattn_cpu.mla:TorchMLA",
    capabilities=LATENTS,
    priorities=(
        Priority(score=50, platform="cpu", why="reads each cached latent once for all heads"),
        LAST_RESORT,
    ),
    proof=MEASURED,
)

TORCH_MLA_SPARSE = BackendInfo(
    name="TORCH_MLA_SPARSE",
    summary="sparse MLA: attention to chosen rows of the latent cache, in torch",
    path="polyattn_cpu.mla:TorchSparseMLA",
    capabilities=LATENTS.but(
        kinds=frozenset({AttentionKind.SPARSE_MLA}), phases=Capabilities.phases
    ),
    priorities=(
        Priority(score=50, platform="cpu", why="reads each chosen latent once for all heads"),
        LAST_RESORT,
    ),
    proof=MEASURED,
)

TORCH_SCAN = BackendInfo(
    name="TORCH_SCAN",
    summary="Mamba, linear attention, the gated delta rule and short convolutions, in torch",
    path="polyattn_cpu.recurrent:TorchScan",
    capabilities=Capabilities(
        platforms=EVERYWHERE,
        kinds=frozenset(kind for kind in AttentionKind if kind.is_recurrent),
        dtypes=ALL_DTYPES,
        features=names(
            "causal gqa v_head_size deterministic batch_invariant step_invariant gated "
            "grouped_channels bc_in_float32 narrow_states wide_conv_states variant"
        ),
        excludes=(
            (
                frozenset({"step_invariant", "narrow_states"}),
                "a state is rounded at the end of each step",
            ),
            *NOT_COMPARED,
        ),
    ),
    priorities=(
        Priority(score=50, platform="cpu", why="matrix products in chunks; no compiler needed"),
        LAST_RESORT,
    ),
    proof=MEASURED,
)

_AVX512 = frozenset({"avx2", "avx512"})

PROFILES = (
    ("x86-avx2", Device("cpu", "x86_64", "x86 with AVX2", frozenset({"avx2"}))),
    ("x86-avx512", Device("cpu", "x86_64", "x86 with AVX-512", _AVX512)),
    ("x86-amx", Device("cpu", "x86_64", "x86 with AMX", _AVX512 | {"avx512_bf16", "amx"})),
    ("neoverse", Device("cpu", "aarch64", "Arm Neoverse", frozenset({"neon", "sve"}))),
)
PLATFORM = Platform(name="cpu", detect="polyattn_cpu.probes:detect", rank=0, profiles=PROFILES)

declare(
    __name__,
    api_versions=(1, 1),
    platforms=[PLATFORM],
    backends=[
        TORCH_SDPA,
        NATIVE_ATTN,
        NATIVE_MLA,
        NATIVE_STORE,
        NATIVE_SCAN,
        NATIVE_INDEX,
        FLEX_ATTENTION,
        TORCH_MLA,
        TORCH_MLA_SPARSE,
        TORCH_SCAN,
    ],
)
