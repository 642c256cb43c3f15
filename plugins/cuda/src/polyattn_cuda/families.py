"""The plugin's declarations for MLA and recurrent layers. Imports neither torch nor any library."""

from __future__ import annotations

from typing import Any

from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    GraphCapture,
    Priority,
    Proof,
    Sizes,
    Variant,
    multiples,
    names,
    one_of,
)

MLA, SPARSE = AttentionKind.MLA, AttentionKind.SPARSE_MLA
FEATURES = names("causal v_head_size lse")
MEASURED = {"sm_90": Proof.MEASURED, "cuda": Proof.SIGNATURE}
SIGNATURE = {"cuda": Proof.SIGNATURE}

FLASHINFER_LIBRARY: dict[str, Any] = {
    "probe": "polyattn_cuda.providers:flashinfer_ready",
    "requires": ("flashinfer-python>=0.6.13",),
    "install": "pip install flashinfer-python",
}
FLASH_MLA = ("flash_mla", "flash_mla_ready", "build FlashMLA", "vllm_flashmla_ready")
FLASH_ATTN_2 = (
    "flash-attn",
    "flash_attn_ready",
    "pip install flash-attn (built for your torch)",
    "vllm_fa2_ready",
)
FLASH_ATTN_3 = ("flash-attn-3", "fa3_ready", "build flash-attn's hopper folder", "vllm_fa3_ready")
"""An upstream's name, its probe and how to install it, and the probe of vLLM's build."""


def builds(
    module: str,
    kind: str,
    upstream: tuple[str, str, str, str],
    claims: Capabilities,
    of_vllm: Capabilities | None = None,
) -> tuple[Variant, Variant]:
    """Return upstream's build and vLLM's, of a class each, with the same claims unless it has its own."""
    name, probe, install, probe_of_vllm = upstream

    def variant(name: str, cls: str, probe: str, install: str, own: Capabilities) -> Variant:
        path = f"polyattn_cuda.{module}:{cls}{kind}"
        probe = f"polyattn_cuda.providers:{probe}"
        return Variant(name=name, path=path, probe=probe, install=install, capabilities=own)

    return (
        variant(name, "Upstream", probe, install, claims),
        variant("vllm", "Vllm", probe_of_vllm, "pip install vllm", of_vllm or claims),
    )


ABSORBED = Capabilities(
    platforms={"cuda": ("sm_90",)},
    kinds=frozenset({MLA}),
    latent_ranks=one_of(512),
    latent_ropes=one_of(64),
    phases=names("decode"),
    decode_query_lens=16,
    features=FEATURES,
    graph_capture=GraphCapture.SINGLE_TOKEN_DECODE,
)
CHOSEN = Capabilities(
    platforms={"cuda": ("sm_90", "sm_100")},
    kinds=frozenset({SPARSE}),
    dtypes=names("bfloat16"),
    latent_ranks=one_of(512),
    latent_ropes=one_of(64),
    features=FEATURES,
)
FLASHINFER_MLA = BackendInfo(
    name="FLASHINFER_MLA",
    aliases=("TRTLLM_MLA",),
    summary="FlashInfer's planned MLA wrapper, absorbed decode",
    path="polyattn_cuda.flashinfer_mla:FlashInferMLA",
    **FLASHINFER_LIBRARY,
    capabilities=ABSORBED.but(
        platforms={"cuda": ("sm_80+",)},
        block_sizes=multiples(1, high=64),
        preferred_block_size=64,
        remedies={"fp8_e4m3": "FLASHINFER_MLA_FP8 reads them on Hopper, with FlashInfer 0.7"},
    ),
    priorities=(Priority(score=90, why="the fastest measured on Hopper: 136 us at 64 x 4,096"),),
    proof=MEASURED,
)
FLASHINFER_MLA_FP8 = BackendInfo(
    name="FLASHINFER_MLA_FP8",
    summary="FlashInfer's planned MLA wrapper over latents in e4m3, multiplied in bf16",
    path="polyattn_cuda.flashinfer_mla:FlashInferMLA",
    probe="polyattn_cuda.providers:flashinfer_ready",
    requires=("flashinfer-python>=0.7",),
    install="pip install 'flashinfer-python>=0.7'",
    # Its planner takes e4m3 latents on sm_90 alone, beside queries in bf16.
    capabilities=ABSORBED.but(
        dtypes=names("bfloat16"),
        kv_cache_dtypes=names("fp8_e4m3"),
        block_sizes=multiples(1, high=64),
        preferred_block_size=64,
        graph_capture=GraphCapture.NONE,
    ),
    priorities=(Priority(score=40, why="471 us at 64 x 4,096 on an H200; TRITON_MLA takes 317"),),
    proof=MEASURED,
)
FLASHINFER_MLA_SPARSE = BackendInfo(
    name="FLASHINFER_MLA_SPARSE",
    summary="FlashInfer's trtllm-gen kernel over chosen rows",
    path="polyattn_cuda.flashinfer_mla:FlashInferSparseMLA",
    **FLASHINFER_LIBRARY,
    capabilities=CHOSEN.but(
        lacks="lse",
        platforms={"cuda": ("sm_100", "sm_103")},
        block_sizes=one_of(32, 64),
        preferred_block_size=64,
    ),
    priorities=(Priority(score=80, why="NVIDIA's own kernel for Blackwell"),),
    proof=SIGNATURE,
)
FLASHMLA_FP8 = (
    "its dense kernel for e4m3 takes queries in e4m3 by one scale that all requests would share; its "
    "sparse one reads rows of 656 bytes (fp8_ds_mla)"
)
FLASHMLA_CLAIMS = ABSORBED.but(
    block_sizes=one_of(64), preferred_block_size=64, remedies={"fp8_e4m3": FLASHMLA_FP8}
)
FLASHMLA = BackendInfo.of_variants(
    *builds("flashmla", "FlashMLA", FLASH_MLA, FLASHMLA_CLAIMS),
    name="FLASHMLA",
    summary="FlashMLA's dense decode: the flash_mla package, or vLLM's build of it",
    priorities=(Priority(score=85, why="DeepSeek's own kernel for Hopper: 145 us there"),),
    proof=MEASURED,
)
FLASHMLA_SPARSE_CLAIMS = CHOSEN.but(
    gqa_ratios=multiples(64, high=128),
    topks=multiples(128),
    block_sizes=Sizes(),
    preferred_block_size=64,
    kv_cache_dtypes=names("auto fp8_ds_mla"),
    remedies={
        "fp8_e4m3": "it reads e4m3 in rows of 656 bytes: fp8_ds_mla, with a scale for each 128"
    },
)
FLASHMLA_SPARSE = BackendInfo.of_variants(
    *builds("flashmla", "FlashSparseMLA", FLASH_MLA, FLASHMLA_SPARSE_CLAIMS),
    name="FLASHMLA_SPARSE",
    summary="FlashMLA over chosen rows, bf16 or of 656 bytes",
    priorities=(Priority(score=85, why="DeepSeek's own kernel"),),
    proof=MEASURED,
)
CUTLASS_MLA = BackendInfo(
    name="CUTLASS_MLA",
    aliases=("CUTLASS",),
    summary="CUTLASS's MLA decode for Blackwell, through FlashInfer",
    path="polyattn_cuda.flashinfer_mla:CutlassMLA",
    **FLASHINFER_LIBRARY,
    capabilities=ABSORBED.but(
        lacks="lse",
        platforms={"cuda": ("sm_100", "sm_103")},
        gqa_ratios=one_of(128),
        block_sizes=one_of(128),
        preferred_block_size=128,
        decode_query_lens=1,
        graph_capture=GraphCapture.NONE,
    ),
    priorities=(Priority(score=85, why="NVIDIA's own kernel for Blackwell"),),
    proof=SIGNATURE,
)
FLASH_ATTN_MLA_CLAIMS = ABSORBED.but(
    # A page of 64 tokens is loaded whole, with the NaN behind a sequence's end.
    block_sizes=multiples(1, high=32),
    preferred_block_size=32,
    remedies={"fp8_e4m3": "FlashAttention-3 takes a second query only for latents in 16 bits"},
)
FLASH_ATTN_MLA = BackendInfo.of_variants(
    *builds("flash_attn_mla", "FlashAttentionMLA", FLASH_ATTN_3, FLASH_ATTN_MLA_CLAIMS),
    name="FLASH_ATTN_MLA",
    summary="FlashAttention-3 with a second query for the latent part",
    priorities=(Priority(score=80, why="141 us there; pages of 32 at most"),),
    proof=MEASURED,
)

FLA_LIBRARY: dict[str, Any] = {
    "probe": "polyattn_cuda.providers:fla_ready",
    "install": "pip install flash-linear-attention",
}
FLA_CLAIMS = Capabilities(
    platforms={"cuda": ("sm_80+",)},
    # Not Mamba-2: fla has no skip connection, and `D x` often cancels an output that it has rounded.
    kinds=frozenset({AttentionKind.LINEAR, AttentionKind.GDN}),
    head_sizes=multiples(8, high=256),
    v_head_sizes=multiples(8, high=256),
    features=names("causal gqa v_head_size"),
)
FLA = BackendInfo(
    name="FLA",
    summary="flash-linear-attention: linear attention, the gated delta rule",
    path="polyattn_cuda.recurrent:FlashLinearAttention",
    requires=("flash-linear-attention>=0.5",),
    **FLA_LIBRARY,
    capabilities=FLA_CLAIMS,
    priorities=(
        Priority(
            score=75,
            archs=("sm_80-sm_89", "sm_120+"),
            kind=AttentionKind.GDN,
            phase="prefill",
            why="long chunks in parallel, where TRITON_SCAN's are short",
        ),
        Priority(score=60, why="several launches, states copied out of their slots and back"),
    ),
    proof=MEASURED,
)
FLA_CHANNELS = BackendInfo(
    name="FLA_CHANNELS",
    summary="flash-linear-attention: KDA and RWKV-7, in chunks",
    path="polyattn_cuda.recurrent:FlashLinearChannels",
    requires=("flash-linear-attention>=0.6",),
    **FLA_LIBRARY,
    capabilities=FLA_CLAIMS.but(kinds=frozenset({AttentionKind.KDA, AttentionKind.RWKV7})),
    priorities=(
        Priority(
            score=65,
            phase="prefill",
            why="chunks in parallel; KDA's prompts take 1.3 to 1.9 of TRITON_SCAN's time on an H100",
        ),
        Priority(score=50, why="several launches, states copied out of their slots and back"),
    ),
    proof=MEASURED,
)
MAMBA_SSM = BackendInfo(
    name="MAMBA_SSM",
    summary="mamba-ssm's Mamba-2 kernels",
    path="polyattn_cuda.recurrent:MambaSSM",
    requires=("mamba-ssm>=2.2",),
    install="pip install mamba-ssm --no-build-isolation",
    capabilities=Capabilities(
        platforms={"cuda": ("sm_80+",)},
        kinds=frozenset({AttentionKind.MAMBA2}),
        head_sizes=multiples(8, high=256),
        features=names("causal gqa"),
    ),
    priorities=(Priority(score=65, why="the authors' kernels; states copied out and back"),),
    proof=MEASURED,
)
CAUSAL_CONV1D = BackendInfo(
    name="CAUSAL_CONV1D",
    summary="causal-conv1d's short convolution",
    path="polyattn_cuda.recurrent:CausalConv1d",
    requires=("causal-conv1d>=1.4",),
    install="pip install causal-conv1d --no-build-isolation",
    capabilities=Capabilities(
        platforms={"cuda": ("sm_80+",)},
        kinds=frozenset({AttentionKind.SHORT_CONV}),
        conv_widths=Sizes(low=2, high=4),
        conv_channels=multiples(8),
        dtypes=names("bfloat16 float16 float32"),
        features=names("causal"),
    ),
    priorities=(Priority(score=60, why="one call for sequences of one length"),),
    proof=SIGNATURE,
)

FAMILIES = [
    FLASHINFER_MLA,
    FLASHINFER_MLA_FP8,
    FLASHINFER_MLA_SPARSE,
    FLASHMLA,
    FLASHMLA_SPARSE,
    CUTLASS_MLA,
    FLASH_ATTN_MLA,
    FLA,
    FLA_CHANNELS,
    MAMBA_SSM,
    CAUSAL_CONV1D,
]
