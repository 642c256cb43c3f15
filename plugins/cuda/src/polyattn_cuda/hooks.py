"""What this plugin declares. Imports neither torch nor any library; looks at metadata alone."""

from __future__ import annotations

from pathlib import Path

from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    Device,
    GraphCapture,
    Platform,
    Priority,
    Role,
    Sizes,
    Variant,
    declare,
    multiples,
    names,
    one_of,
)

from polyattn_cuda.families import (
    FAMILIES,
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASHINFER_LIBRARY,
    MEASURED,
    builds,
)

MASKS = names("causal non_causal gqa sliding_window")
DECODER_CROSS = frozenset({Role.DECODER, Role.CROSS})
EITHER = frozenset({True, False})
"""Over a cache, and over keys and values that are passed whole."""
ATTENTION = AttentionKind.ATTENTION

FA2_ALIBI = (
    (names("alibi non_causal"), "its ALiBi is symmetric; ours is signed"),
    (names("alibi lse"), "its causal ALiBi leaves the row's part out of the LSE"),
)
PLAIN = Capabilities(
    platforms={"cuda": ("sm_80+",)}, roles=frozenset(Role), cached=EITHER, features=MASKS
)
"""The claims of nearly all attention here."""
FA2 = PLAIN.but(
    adds="logit_soft_cap alibi lse",
    head_sizes=multiples(8, low=32, high=256),
    block_sizes=multiples(256),
    preferred_block_size=256,
    decode_query_lens=16,
    excludes=FA2_ALIBI,
)
FLASH_ATTN = BackendInfo.of_variants(
    *builds(
        "flash_attn",
        "FlashAttention2",
        FLASH_ATTN_2,
        FA2,
        of_vllm=FA2.but(
            block_sizes=multiples(16),
            preferred_block_size=Capabilities.preferred_block_size,
            graph_capture=GraphCapture.UNIFORM,
        ),
    ),
    Variant(
        name="torch",
        path="polyattn_cuda.flash_attn:TorchFlashAttention2",
        probe="polyattn_cuda.providers:torch_fa2_ready",
        install="pip install torch>=2.13",
        capabilities=FA2.but(
            lacks="logit_soft_cap alibi",
            decode_query_lens=1,
            excludes=(),
            remedies=dict.fromkeys(
                ("logit_soft_cap", "alibi"), "torch's varlen_attn has none: pip install flash-attn"
            ),
        ),
    ),
    name="FLASH_ATTN",
    aliases=("FA2", "FLASH_ATTN_V2", "FLASH_ATTENTION_2"),
    summary="FlashAttention-2: the flash-attn package, vLLM's build of it, or torch's own",
    priorities=(
        Priority(score=70, archs=("sm_80-sm_89",), kind=ATTENTION, why="the fastest before Hopper"),
        Priority(score=65, kind=ATTENTION, why="FlashAttention-2 works on every NVIDIA from sm_80"),
    ),
    proof=MEASURED,
)

# From 80 tokens on a page can be a whole tile, loaded by TMA with the NaN behind a sequence's end
# (Dao-AILab/flash-attention#2374); larger blocks are walked as several.
FA3_PAGES = Sizes(low=1, high=64)
FA3_FP8 = (
    (names("fp8_e4m3 float16"), "its output from fp8 is bf16"),
    (
        names("fp8_inputs uncached"),
        "it rounds weights to e4m3, which fp8_compute allows only over a cache",
    ),
)
FA3_ALIKE = tuple(
    (
        frozenset({"batch_invariant", other}),
        "its bits were compared with 16-bit queries and keys alone",
    )
    for other in ("fp8_e4m3", "fp8_inputs", "fp8_output", "v_head_size")
)
FA3_EIGHT = names("tensor_scales head_scales fp8_inputs fp8_output")
"""It reads a scale for each sequence and KV head from the device; its output is quantised after it."""
WHOLE_STEPS = names("prefill decode mixed")
EXPANDED_MLA = frozenset({(192, 128)})
"""Head sizes of an MLA layer whose keys and values are made from its latents."""
FA3 = PLAIN.but(
    platforms={"cuda": ("sm_90",)},
    phases=WHOLE_STEPS,
    decode_query_lens=16,
    head_sizes=one_of(64, 96, 128, 192, 256),
    block_sizes=FA3_PAGES,
    v_head_pairs=EXPANDED_MLA,
    kv_cache_dtypes=names("auto fp8_e4m3"),
    fp8_compute=True,
    features=MASKS | FA3_EIGHT | names("v_head_size logit_soft_cap lse"),
    graph_capture=GraphCapture.ANY,
    mixes_tails=True,
    excludes=FA3_FP8,
)
FLASH_ATTN_V3 = BackendInfo.of_variants(
    *builds(
        "flash_attn_v3",
        "FlashAttention3",
        FLASH_ATTN_3,
        FA3.but(remedies={"learned_sinks": "vLLM's build reads sinks: pip install vllm"}),
        of_vllm=FA3.but(
            adds="learned_sinks batch_invariant",
            excludes=(
                *FA3_FP8,
                (names("learned_sinks float16"), "it reads sinks in bf16"),
                *FA3_ALIKE,
            ),
        ),
    ),
    name="FLASH_ATTN_V3",
    aliases=("FA3", "FLASH_ATTENTION_3"),
    summary="FlashAttention-3 for Hopper: flash_attn_interface, or vLLM's build of it",
    priorities=(
        Priority(score=90, phase="prefill", why="warp-specialised Hopper prefill"),
        Priority(score=70, phase="decode", why="behind FlashInfer's and Triton's decode on Hopper"),
        Priority(
            score=50,
            phase="mixed",
            why="one call splits no long row: chosen by measured times only",
        ),
    ),
    proof=MEASURED,
)

FLASH_ATTN_V4 = BackendInfo(
    name="FLASH_ATTN_V4",
    aliases=("FA4", "FLASH_ATTENTION_4"),
    summary="FlashAttention-4 (CuTe DSL) for Hopper and Blackwell",
    path="polyattn_cuda.flash_attn_v4:FlashAttention4",
    probe="polyattn_cuda.providers:fa4_ready",
    requires=("flash-attn-4>=4.0.0b20",),
    install="pip install flash-attn-4 --pre",
    capabilities=PLAIN.but(
        adds="logit_soft_cap lse",
        lacks="decode",
        platforms={"cuda": ("sm_90", "sm_100", "sm_103")},
        head_sizes=multiples(8, low=32, high=128),
    ),
    priorities=(
        Priority(score=95, archs=("sm_100+",), phase="prefill", why="the fastest on Blackwell"),
        Priority(
            score=85, phase="prefill", why="copies cached pages first: it can't skip NaN rows"
        ),
    ),
    proof=MEASURED,
)

FLASHINFER = BackendInfo(
    name="FLASHINFER",
    summary="FlashInfer's planned wrappers: paged prefill (fa2, fa3) and decode",
    path="polyattn_cuda.flashinfer:FlashInferAttention",
    variant_check="polyattn_cuda.flashinfer_variants:variant_problem",
    **FLASHINFER_LIBRARY,
    capabilities=PLAIN.but(
        adds="v_head_size logit_soft_cap lse variant custom_mask block_sparse fp8_output "
        "fp8_e4m3 fp8_e5m2",
        mixes_tails=True,
        decode_query_lens=16,
        head_sizes=one_of(
            64, 128, 192, 256, why="FA2 loads rows by 64 elements, checks nothing: flashinfer#4299"
        ),
        v_head_pairs=EXPANDED_MLA,
        layouts=("NHD", "HND"),
        graph_capture=GraphCapture.SINGLE_TOKEN_DECODE,
        excludes=(
            *(
                (frozenset({"variant", other}), "what its JIT compiles scales no 8-bit keys")
                for other in ("fp8_e4m3", "fp8_e5m2")
            ),
            *(
                (frozenset({other, "captured"}), "its prefill kernels have no buffers of a graph's")
                for other in ("variant", "custom_mask", "block_sparse")
            ),
            (names("variant lse"), "its JIT's LSE of a row that sees nothing is finite"),
            (names("sliding_window non_causal"), "its window bounds the left side only"),
            (names("v_head_size cached"), "its decode has one size for keys and values"),
            (frozenset({"head_size 192", "fp8_e4m3"}), "of one byte it takes multiples of 128"),
            (frozenset({"head_size 192", "fp8_e5m2"}), "of one byte it takes multiples of 128"),
        ),
    ),
    priorities=(
        Priority(
            score=40, needs="variant", why="nvcc compiles its functions, which takes a minute"
        ),
        Priority(score=50, needs="custom_mask", why="it masks every pair and skips none"),
        Priority(score=50, needs="block_sparse", why="it masks every pair and skips none"),
        Priority(score=80, phase="decode", why="tensor-core decode near the memory's bandwidth"),
        Priority(score=80, phase="prefill", why="paged prefill by FA3 on Hopper, FA2 elsewhere"),
    ),
    proof=MEASURED,
)

FLASHINFER_TRTLLM = BackendInfo(
    name="FLASHINFER_TRTLLM",
    aliases=("TRTLLM", "TRTLLM_MHA", "XQA"),
    summary="TensorRT-LLM's decode in FlashInfer: XQA on Hopper, trtllm-gen on Blackwell",
    path="polyattn_cuda.flashinfer_trtllm:FlashInferTrtllm",
    **FLASHINFER_LIBRARY,
    capabilities=Capabilities(
        platforms={"cuda": ("sm_90+",)},
        roles=DECODER_CROSS,
        # XQA for int8 doesn't compile for Hopper (FlashInfer 0.6.13).
        kv_cache_dtypes=names("auto fp8_e4m3"),
        head_sizes=one_of(64, 128, 256),
        gqa_ratios=one_of(1, 2, 4, 8, 16),
        block_sizes=one_of(16, 32, 64),
        layouts=("NHD", "HND"),
        phases=names("decode"),
        features=MASKS | names("learned_sinks"),
        graph_capture=GraphCapture.SINGLE_TOKEN_DECODE,
        excludes=tuple(
            (frozenset({"fp8_e4m3", arch}), "trtllm-gen's 8-bit kernels ran on no device yet")
            for arch in ("sm_100", "sm_103")
        ),
    ),
    priorities=(
        Priority(score=60, phase="decode", why="nothing to plan, but the slowest on Hopper"),
    ),
    proof=MEASURED,
)

CUDNN_ATTENTION = BackendInfo(
    name="CUDNN_ATTENTION",
    aliases=("CUDNN", "CUDNN_ATTN"),
    summary="torch's cuDNN attention, one sequence at a time",
    path="polyattn_cuda.cudnn:CudnnAttention",
    probe="polyattn_cuda.providers:cudnn_ready",
    capabilities=PLAIN.but(
        adds="lse", lacks="decode sliding_window", head_sizes=multiples(8, low=32, high=128)
    ),
    priorities=(
        # 256 sentences on an H200: 22 ms, TRITON_ATTN 0.14; 64 images of 577 tokens: 333 us and 307.
        Priority(score=55, phase="prefill", why="one call per length: fast for few long prompts"),
    ),
    proof=MEASURED,
)

XFORMERS = BackendInfo(
    name="XFORMERS",
    summary="xFormers' memory-efficient attention (CUTLASS), for GPUs before Ampere",
    path="polyattn_cuda.xformers:XFormersAttention",
    probe="polyattn_cuda.providers:xformers_ready",
    requires=("xformers>=0.0.35",),
    install="pip install xformers",
    capabilities=PLAIN.but(
        adds="float32 v_head_size lse",
        platforms={"cuda": ("sm_75-sm_90",)},
        head_sizes=multiples(8, high=256),
        v_head_sizes=multiples(8, high=256),
        excludes=(
            (names("bfloat16 sm_75"), "bf16 products begin with sm_80"),
            (names("sliding_window non_causal"), "its local masks are causal"),
        ),
    ),
    priorities=(
        Priority(score=30, why="copies pages and repeats KV heads: where nothing else runs"),
    ),
    proof=MEASURED,
)


# Figures are from the vendors' datasheets.
def _nvidia(
    name: str, arch: str, bandwidth: float, matmul: float, reported: str, fp8: bool = True
) -> Device:
    return Device(
        "cuda", arch, name, fp8="ocp" if fp8 else None, bandwidth=bandwidth, matmul=matmul,
        reported=f"NVIDIA {reported}",
    )  # fmt: skip


_A100 = _nvidia("A100 80 GB SXM", "sm_80", 2039, 312, "A100-SXM4-80GB", fp8=False)
_H100 = _nvidia("H100 SXM", "sm_90", 3350, 989, "H100 80GB HBM3")
_H200 = _nvidia("H200 SXM", "sm_90", 4800, 989, "H200")
_RTX4090 = _nvidia("GeForce RTX 4090", "sm_89", 1008, 165, "GeForce RTX 4090")
_RTX5090 = _nvidia("GeForce RTX 5090", "sm_120", 1792, 210, "GeForce RTX 5090")

PROFILES = (
    ("a100-sxm", _A100),
    ("a100", _A100),
    ("l40s", _nvidia("L40S", "sm_89", 864, 362, "L40S")),
    ("h100-sxm", _H100),
    ("h100", _H100),
    ("h200-sxm", _H200),
    ("h200", _H200),
    ("b200", _nvidia("B200", "sm_100", 8000, 2250, "B200")),
    ("rtx4090", _RTX4090),
    ("4090", _RTX4090),
    ("rtx5090", _RTX5090),
    ("5090", _RTX5090),
)
PLATFORM = Platform(
    name="cuda",
    profiles=PROFILES,
    detect="polyattn_cuda.platform:detect",
    rank=20,
    device_types=("cuda",),
    current="polyattn_cuda.platform:current",
)

declare(
    __name__,
    api_versions=(1, 1),
    platforms=[PLATFORM],
    backends=[
        FLASH_ATTN,
        FLASH_ATTN_V3,
        FLASH_ATTN_V4,
        FLASHINFER,
        FLASHINFER_TRTLLM,
        CUDNN_ATTENTION,
        XFORMERS,
        *FAMILIES,
    ],
    timings=[str(Path(__file__).with_name(f"timings_{chip}.json")) for chip in ("h200", "h100")],
)
