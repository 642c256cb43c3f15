"""What this plugin declares. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.plugin import (
    ANY_ROWS,
    AttentionKind,
    BackendInfo,
    Capabilities,
    GraphCapture,
    Priority,
    Proof,
    Role,
    Variant,
    declare,
    multiples,
    names,
)

PLATFORMS = {"cuda": ("sm_80+",), "rocm": ("gfx90a", "gfx942", "gfx950")}
DTYPES = names("bfloat16 float16 float32")
CACHES = names("auto int8 fp8_e4m3 fp8_e5m2")
PROOF = {
    "sm_90": Proof.MEASURED,
    "cuda": Proof.COMPILED,
    "rocm": Proof.COMPILED,
    "cpu": Proof.INTERPRETED,
}
TESTS = Priority(score=1, platform="cpu", why="the interpreter: for tests only")
NO_E4M3 = tuple(
    (frozenset({what, arch}), "Triton converts e4m3 from sm_89 on; fp8_e5m2 and int8 work")
    for arch in ("sm_80", "sm_86", "sm_87")
    for what in ("fp8_e4m3", "fp8_inputs", "fp8_output")
)
NO_E4M3_KEYS = tuple(
    (frozenset({form, arch}), "Triton reads this e4m3 from sm_89 on, and on gfx950")
    for arch in ("sm_80", "sm_86", "sm_87", "gfx90a", "gfx942")
    for form in ("index_fp8_e4m3", "index_fp8_scaled")
)
NOT_INTERPRETED = names("bfloat16 fp8_e4m3 fp8_e5m2 fp8_inputs fp8_output")
"""The interpreter computes bf16 wrongly, and isn't held to 8-bit floats."""
IN_TILES = names("step_invariant call_invariant")
"""Attention doesn't have these there: its tiles hold several tokens, and the host's BLAS multiplies them,
whose bits follow from a row's place."""

ALIKE_WITHOUT = {
    "captured_drafts": "the number of launches follows the step's rows",
    "length_bounds": "keys are cut by each request's own length",
}


def declared(
    name: str, path: str, claims: Capabilities, *priorities: Priority, **fields: Any
) -> BackendInfo:
    """Return a backend of two builds: the compiled one, and the interpreted one for tests."""
    words = claims.dtypes | claims.kv_cache_dtypes | claims.features
    tiles = IN_TILES if AttentionKind.ATTENTION in claims.kinds else frozenset()
    on_cpu = claims.but(
        lacks=" ".join((NOT_INTERPRETED | tiles) & words),
        platforms={"cpu": ()},
        excludes=tuple(pair for pair in claims.excludes if pair not in (*NO_E4M3, *NO_E4M3_KEYS)),
    )
    compiled = Variant(
        name="compiled",
        path=f"polyattn_triton.{path}",
        probe="polyattn_triton.probes:compiles",
        requires=("triton>=3.6,<3.10",),
        install='pip install "polyattn[triton]"',
        capabilities=claims,
    )
    probe = "polyattn_triton.probes:interprets"
    return BackendInfo.of_variants(
        compiled,
        replace(compiled, name="interpreter", probe=probe, capabilities=on_cpu),
        name=name,
        priorities=(TESTS, *priorities),
        proof=PROOF,
        **fields,
    )


TRITON_ATTN = declared(
    "TRITON_ATTN",
    "attention:TritonAttention",
    Capabilities(
        platforms=PLATFORMS,
        cached=frozenset({True, False}),
        roles=frozenset(Role),
        dtypes=DTYPES,
        kv_cache_dtypes=CACHES | {ANY_ROWS},
        fp8_formats=names("ocp fnuz"),
        head_sizes=multiples(8, high=576),
        # Below 32 values a head the kit drew a wrong step on an H200 (16, over an e4m3 cache).
        v_head_sizes=multiples(8, low=32, high=512),
        gqa_ratios=multiples(1, high=128),
        layouts=("NHD", "HND", "contiguous"),
        # A head's rows fill no whole lines of memory: by token, its program loads others' bytes too.
        rows_layout="HND",
        decode_query_lens=16,
        shared_prefix=True,
        shared_features=names("appends sliding_window alibi"),
        padding_rows=True,
        features=names(
            "causal non_causal gqa v_head_size sliding_window chunked sink_tokens cache_positions "
            "logit_soft_cap alibi learned_sinks variant custom_mask block_sparse tensor_scales "
            "head_scales lse length_bounds deterministic batch_invariant "
            "step_invariant call_invariant machine_invariant fp8_inputs fp8_output"
        ),
        by_address=True,
        graph_capture=GraphCapture.ANY,
        excludes=(
            (
                frozenset({"cache_positions", ANY_ROWS}),
                "rows of bytes are read in groups, not in the pairs that rotate",
            ),
            *(
                (frozenset({size, ANY_ROWS}), "a row's halves are narrower than products take")
                for size in ("head_size 8", "head_size 16")
            ),
            (
                frozenset({"step_invariant", "cache_positions"}),
                "keys are turned to places after the last token of a tile of rows",
            ),
            *(
                (frozenset({f"head_size {size}", "float32"}), "tiles outgrow shared memory")
                for size in range(520, 577, 8)
            ),
            *(
                (frozenset({"step_invariant", other}), "its bits were compared within a step alone")
                for other in ("variant", "custom_mask", "block_sparse")
            ),
            *(
                (frozenset({"batch_invariant", other}), f"its launches follow from the step: {why}")
                for other, why in ALIKE_WITHOUT.items()
            ),
            (frozenset({"machine_invariant", "captured"}), "its tiles are listed for each step"),
            *NO_E4M3,
        ),
    ),
    Priority(
        score=4,
        platform="cuda",
        phase="prefill",
        over=512,
        why="heads padded to 1,024 elements: prompts take 2.3 of TORCH_SDPA's time on an H100",
    ),
    Priority(score=60, phase="prefill", over=128, why="a good general kernel wherever Triton runs"),
    Priority(
        score=62,
        archs=("sm_90",),
        phase="prefill",
        needs="non_causal",
        over=120,
        why="encoders with heads of 128 take 0.95 to 1.01 of TORCH_SDPA's time on an H200",
    ),
    Priority(score=60, phase="prefill", over=64, why="a good general kernel wherever Triton runs"),
    Priority(
        score=92,
        archs=("sm_90",),
        phase="prefill",
        kind=AttentionKind.ATTENTION,
        needs="non_causal",
        over=56,
        why="encoders with heads of 64 take 0.76 to 0.78 of FLASH_ATTN_V3's time on an H100 and an H200",
    ),
    Priority(
        score=82,
        archs=("sm_90",),
        phase="decode",
        kind=AttentionKind.ATTENTION,
        why="on an H200, 0.94 to 1.5 times as fast as FlashInfer, most with few sequences",
    ),
    Priority(
        score=75,
        phase="decode",
        kind=AttentionKind.ATTENTION,
        why="near the memory's bandwidth; split-KV fills the chip with few sequences too",
    ),
    Priority(score=60, why="a good general kernel wherever Triton runs"),
    aliases=("TRITON",),
    summary="paged prefill and split-KV decode in Triton; every feature, NVIDIA and AMD",
    variant_check="polyattn_triton.functions.pointwise:variant_problem",
    rows_check="polyattn_triton.functions.rows:rows_problem",
)

MLA = Capabilities(
    platforms=PLATFORMS,
    kinds=frozenset({AttentionKind.MLA}),
    dtypes=DTYPES,
    kv_cache_dtypes=CACHES,
    fp8_formats=names("ocp fnuz"),
    latent_ranks=multiples(16, high=512),
    block_sizes=multiples(1, high=1024),
    preferred_block_size=64,
    phases=names("decode"),
    decode_query_lens=16,
    features=names(
        "causal non_causal v_head_size lse deterministic batch_invariant step_invariant"
    ),
    excludes=(
        (
            frozenset({"batch_invariant", "captured"}),
            "its launches follow from the step: the number of programs follows the step's keys",
        ),
        *NO_E4M3,
    ),
    graph_capture=GraphCapture.ANY,
)
TRITON_MLA = declared(
    "TRITON_MLA",
    "mla:TritonMLA",
    MLA,
    Priority(
        score=60,
        why="a good general kernel wherever Triton runs; 8-bit latents take 0.65 of bfloat16's time "
        "of 16 heads, 0.76 of 32, 1.1 of 64 and 1.5 of 128 on an H200",
    ),
    summary="absorbed MLA decode in Triton, split-KV; a cached row is loaded once for scores and output",
)
TRITON_MLA_SPARSE = declared(
    "TRITON_MLA_SPARSE",
    "mla:TritonMLASparse",
    MLA.but(
        adds="prefill",
        lacks="non_causal",
        kinds=frozenset({AttentionKind.SPARSE_MLA}),
        decode_query_lens=1,
    ),
    Priority(
        score=88,
        platform="cuda",
        archs=("sm_90",),
        phase="decode",
        why="64 x 32k on an H100: 0.62 of FLASHMLA_SPARSE's time",
    ),
    Priority(score=60, why="a good general kernel wherever Triton runs"),
    summary="MLA over the chosen rows of the latent cache, in Triton",
)

TOKEN_SCAN = Capabilities(
    platforms=PLATFORMS,
    kinds=frozenset({AttentionKind.RG_LRU, AttentionKind.PHI_LINEAR, AttentionKind.RWKV6}),
    dtypes=DTYPES,
    head_sizes=multiples(1, high=256),
    v_head_sizes=multiples(1, high=256),
    features=names(
        "causal gqa v_head_size deterministic batch_invariant step_invariant narrow_states variant"
    ),
    excludes=(
        (
            frozenset({"step_invariant", "narrow_states"}),
            "a state is rounded at the end of each step",
        ),
    ),
    state_targets=True,
    graph_capture=GraphCapture.ANY,
)
TRITON_SCAN = declared(
    "TRITON_SCAN",
    "scan:TritonScan",
    TOKEN_SCAN.but(
        lacks="variant", adds="gated grouped_channels bc_in_float32 wide_conv_states",
        excludes=(
            *TOKEN_SCAN.excludes,
            *(
                (frozenset({"step_invariant", kind}), "on an H100 chunks and drafts changed its states")
                for kind in ("gdn", "kda", "mamba1")
            ),
            (
                frozenset({"batch_invariant", "captured_prompts"}),
                "a row of one token runs as a prompt where the captured step's decodes are full",
            ),
        ),
        kinds=frozenset(
            {
                AttentionKind.SHORT_CONV, AttentionKind.MAMBA1, AttentionKind.MAMBA2,
                AttentionKind.LINEAR, AttentionKind.GDN, AttentionKind.KDA, AttentionKind.RWKV7,
            }
        ),
    ),
    Priority(score=70, why="a launch or two for a whole prefill; states stay in registers"),
    summary="Mamba, linear attention, delta rules, RWKV-7 and short convolutions, in Triton",
)  # fmt: skip
TRITON_TOKEN_SCAN = declared(
    "TRITON_TOKEN_SCAN",
    "token_scan:TritonTokenScan",
    TOKEN_SCAN,
    Priority(score=60, why="a launch or two; prompts by tiles of tokens, decodes by the token"),
    summary="RG-LRU, RWKV-6 and linear attention with a normaliser, in Triton",
    variant_check="polyattn_triton.functions.pointwise:variant_problem",
)

ATTENDING = frozenset(kind for kind in AttentionKind if not kind.is_recurrent)
TRITON_STORE = declared(
    "TRITON_STORE",
    "store:TritonStore",
    Capabilities(
        platforms=PLATFORMS,
        kinds=ATTENDING,
        phases=names("store"),
        dtypes=DTYPES,
        kv_cache_dtypes=CACHES | {ANY_ROWS},
        fp8_formats=names("ocp fnuz"),
        layouts=("NHD", "HND", "contiguous"),
        features=names("causal gqa tensor_scales head_scales fp8_inputs"),
        excludes=NO_E4M3,
        rotates=names("neox gptj"),
        norms=names("head token"),
    ),
    Priority(score=70, why="one launch, where torch takes a dozen"),
    summary="keys and values normed, rotated, quantised and written to their slots in one launch",
    rows_check="polyattn_triton.functions.row_writers:store_problem",
)
TRITON_MERGE = declared(
    "TRITON_MERGE",
    "state_merge:TritonMerge",
    Capabilities(platforms=PLATFORMS, kinds=ATTENDING, phases=names("merge"), dtypes=DTYPES),
    Priority(score=70, why="one launch, where torch takes five"),
    summary="attention states merged in place, in one launch",
)
TRITON_INDEX = declared(
    "TRITON_INDEX",
    "index:TritonIndex",
    Capabilities(
        platforms=PLATFORMS,
        kinds=frozenset({AttentionKind.SPARSE, AttentionKind.SPARSE_MLA}),
        phases=names("index"),
        dtypes=DTYPES,
        head_sizes=multiples(4, high=128),
        features=Capabilities.features | {"batch_invariant", "step_invariant"},
        indexes=names(
            "index_heads index_pool index_within index_part index_entries index_forced index_sum "
            "index_signed index_fp8_e4m3 index_fp8_scaled"
        ),
        excludes=NO_E4M3_KEYS,
    ),
    Priority(score=70, why="two launches; ranks scores by their bits, without a sort"),
    summary="index keys scored, and the best candidates listed, in two launches",
)

declare(
    __name__,
    api_versions=(1, 1),
    backends=[
        TRITON_ATTN,
        TRITON_MLA,
        TRITON_MLA_SPARSE,
        TRITON_SCAN,
        TRITON_TOKEN_SCAN,
        TRITON_STORE,
        TRITON_MERGE,
        TRITON_INDEX,
    ],
)
