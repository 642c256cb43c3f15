"""Which words classify a layer? Its kind and family, its role, and its graph capture."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8")
"""What a cache's elements may be; beside these, the formats of rows (`spec.row_format`)."""
FP8_FORMATS = ("ocp", "fnuz")
QUANTISED_DTYPES = ("auto", "fp8_e4m3")
"""What queries, keys and values may arrive in, and outputs leave in, beside the layer's dtype."""
DTYPE_ALIASES = {
    "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "bf16": "bfloat16",
    "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "double": "float64",
    "int8_per_token_head": "int8_rows", "fp8_per_token_head": "e4m3_rows",
}  # fmt: skip
"""What engines and torch call a dtype, and its name here."""
SCALES = ("number", "tensor", "head")
"""The forms of a layer's scales: numbers, tensors of one element, tensors of one for each KV head."""
WORDS = {
    "dtype": DTYPES,
    "qkv_dtype": QUANTISED_DTYPES,
    "out_dtype": QUANTISED_DTYPES,
    "scales": SCALES,
}
"""What a layer's fields may be."""
LAYOUTS = ("NHD", "HND", "contiguous")
FEATURE_MAPS = ("elu+1", "relu")
"""What linear attention with a normaliser may take of queries and keys."""
ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e4m3fnuz": 1,
    "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip
"""Bytes of an element of each dtype that a cache can have, where it is no row of bytes."""
PHASES = ("prefill", "decode", "mixed", "store", "merge", "index")
"""A kernel's roles: attention's three, storing keys and values, merging states, choosing keys."""


def dtype_name(value: Any) -> Any:
    """Return the name of a dtype: of torch's `torch.bfloat16`, of an alias, else the value itself."""
    if not isinstance(value, str) and type(value).__module__ != "torch":
        return value
    name = str(value).removeprefix("torch.")
    return DTYPE_ALIASES.get(name.lower(), name)


class AttentionKind(str, Enum):
    """What a layer computes: attention, or something in its place.

    Attributes:
        ATTENTION: softmax attention over keys and values.
        MLA: multi-head latent attention (DeepSeek-V2, 2024).
        SPARSE_MLA: MLA over chosen tokens (DeepSeek-V3.2, 2025).
        SPARSE: attention over keys that each call chooses.
        MAMBA1: a selective state space (Gu and Dao, 2023).
        MAMBA2: a state space with scalar decay (Dao and Gu, 2024).
        LINEAR: linear attention with decay (lightning attention, Qin et al., 2024).
        GDN: a gated delta rule (Yang et al., 2024).
        KDA: a delta rule with a decay for each channel (Kimi Team, 2025).
        RWKV6: RWKV-6's recurrence; RWKV-5's has one decay for all tokens (Peng et al., 2024).
        RWKV7: RWKV-7's recurrence (Peng et al., 2025).
        RG_LRU: a real-gated linear recurrent unit (Griffin, De et al., 2024).
        PHI_LINEAR: linear attention with a normaliser (Katharopoulos et al., 2020).
        SHORT_CONV: a causal convolution over a channel's last inputs.

    Examples:
        >>> AttentionKind("mla").is_latent, AttentionKind.GDN.is_recurrent
        (True, True)

    """

    ATTENTION = "attention"
    MLA = "mla"
    SPARSE_MLA = "sparse_mla"
    SPARSE = "sparse"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    LINEAR = "linear"
    GDN = "gdn"
    KDA = "kda"
    RWKV6 = "rwkv6"
    RWKV7 = "rwkv7"
    RG_LRU = "rg_lru"
    PHI_LINEAR = "phi_linear"
    SHORT_CONV = "short_conv"

    @property
    def family(self) -> str:
        """The folder of `polyattn.families` that plans and runs this kind."""
        return FAMILY_OF.get(self, "recurrent")

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps a per-sequence state instead of keys and values."""
        return self not in FAMILY_OF

    @property
    def is_latent(self) -> bool:
        """Whether the layer caches an MLA latent."""
        return FAMILY_OF.get(self) == "mla"

    @property
    def is_grouped(self) -> bool:
        """Whether heads may share their keys, or their B and C; others have one KV head each."""
        return self not in UNGROUPED


FAMILY_OF = {
    AttentionKind.ATTENTION: "attention",
    AttentionKind.MLA: "mla",
    AttentionKind.SPARSE_MLA: "mla",
    AttentionKind.SPARSE: "sparse",
}
"""The kinds that attend over a cache; every other one is a recurrence."""


UNGROUPED = {
    AttentionKind.SHORT_CONV,
    AttentionKind.MAMBA1,
    AttentionKind.RWKV6,
    AttentionKind.RWKV7,
    AttentionKind.RG_LRU,
}


class Role(str, Enum):
    """Where a layer is in its model.

    Attributes:
        DECODER: causal self-attention over a cache.
        ENCODER: the encoder of an encoder-decoder model.
        ENCODER_ONLY: an encoder without a decoder, such as BERT.
        CROSS: a decoder's attention to an encoder's keys.

    Examples:
        >>> LayerSpec(num_heads=12, head_size=64, role="encoder_only", causal=False).cached
        False

    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"


class GraphCapture(IntEnum):
    """Which steps the caller captures in a device graph; a higher level includes the lower ones.

    Attributes:
        NONE: no step.
        SINGLE_TOKEN_DECODE: steps of one query token a row.
        UNIFORM: steps of the same number of query tokens a row.
        ANY: also steps with prompts.

    Examples:
        >>> LayerSpec(num_heads=4, head_size=64, graph_capture="uniform").graph_capture
        <GraphCapture.UNIFORM: 2>

    """

    NONE = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM = 2
    ANY = 3


class Invariance(IntEnum):
    """What must not change a bit of a token's result; a higher level includes the lower ones.

    Attributes:
        NONE: anything may.
        BATCH: which other requests are in the batch, the request's place in it, and whether the step is
            captured.
        STEPS: how a sequence's tokens are divided among steps. A decode, a draft, a chunk of any
            length, a whole prompt and a chunk after a cached prefix give one token the same bits.
        CALLS: whether keys come from a cache or are passed whole, as in a trainer's packed forward.
        MACHINES: which backend computes, on which machine. Bits are those that `docs/invariance.md`
            specifies, of float32 layers.

    Examples:
        >>> LayerSpec(num_heads=4, head_size=64, batch_invariant="steps").batch_invariant
        <Invariance.STEPS: 2>

    """

    NONE = 0
    BATCH = 1
    STEPS = 2
    CALLS = 3
    MACHINES = 4
