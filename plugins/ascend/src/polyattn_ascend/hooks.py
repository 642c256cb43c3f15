"""What this plugin declares. Imports neither torch nor torch-npu."""

from __future__ import annotations

from polyattn.plugin import (
    BackendInfo,
    Capabilities,
    Device,
    Platform,
    Priority,
    Proof,
    declare,
    multiples,
    names,
    one_of,
)

PROFILES = (  # bandwidths in GB/s of Huawei's datasheets, for Atlas 800 A2 and A3
    ("ascend-910b", Device("npu", "910b", "Ascend 910B", bandwidth=1600)),
    ("ascend-910c", Device("npu", "910c", "Ascend 910C", bandwidth=3200)),
)

ASCEND_ATTN = BackendInfo(
    name="ASCEND_ATTN",
    aliases=("ASCEND",),
    summary="CANN's fused attention over pages, through torch-npu",
    path="polyattn_ascend.attention:FusedAttention",
    requires=("torch-npu>=2.11",),
    install="pip install torch-npu, beside CANN",
    capabilities=Capabilities(
        platforms={"npu": ("910b", "910c")},
        # With packed queries it takes these alone: op-plugin's documents of the operator, "TND".
        head_sizes=one_of(128),
        v_head_sizes=one_of(128),
        gqa_ratios=multiples(1, high=64),
        block_sizes=multiples(128, high=512),
        preferred_block_size=128,
        features=names("causal non_causal gqa learned_sinks lse"),
        excludes=(
            (names("learned_sinks float16"), "its sinks are bfloat16"),
            (
                names("learned_sinks lse"),
                "its sinks are rounded to bfloat16, too coarse for an LSE",
            ),
        ),
    ),
    priorities=(Priority(score=85, why="CANN's own fused attention"),),
    proof={"npu": Proof.SIGNATURE},
)

PLATFORM = Platform(
    name="npu",
    profiles=PROFILES,
    detect="polyattn_ascend.platform:detect",
    rank=20,
    current="polyattn_ascend.platform:current",
)

declare(__name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[ASCEND_ATTN])
