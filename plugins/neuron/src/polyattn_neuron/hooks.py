"""What this plugin declares. Imports neither torch nor NKI."""

from __future__ import annotations

from polyattn.plugin import (
    BackendInfo,
    Capabilities,
    Device,
    Platform,
    Priority,
    Proof,
    Role,
    declare,
    multiples,
    names,
)

PROFILES = (  # bandwidths in GB/s of a chip, from AWS's documents
    ("trn2", Device("neuron", "trn2", "Trainium2", bandwidth=2900)),
    ("trn3", Device("neuron", "trn3", "Trainium3", bandwidth=4900)),
)

NKI_ATTN = BackendInfo(
    name="NKI_ATTN",
    summary="pages gathered, and attended to by the NKI library's attention_cte",
    path="polyattn_neuron.attention:NkiAttention",
    probe="polyattn_neuron.platform:ready",
    install="pip install torch-neuronx nki-library, from AWS's index of packages",
    capabilities=Capabilities(
        platforms={"neuron": ("trn2", "trn3")},
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        dtypes=names("bfloat16"),  # it multiplies in bfloat16, whatever its inputs are
        head_sizes=multiples(1, high=128),
        v_head_sizes=multiples(1, high=128),
        features=names("causal non_causal gqa sliding_window window_right chunked"),
    ),
    priorities=(Priority(score=60, why="AWS's own kernel, a call for each sequence"),),
    proof={"neuron": Proof.SIGNATURE},
)

PLATFORM = Platform(
    name="neuron", profiles=PROFILES, detect="polyattn_neuron.platform:detect", rank=20
)

declare(__name__, api_versions=(1, 1), platforms=[PLATFORM], backends=[NKI_ATTN])
