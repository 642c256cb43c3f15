"""What the plugin declares. This module must import neither torch nor a vendor's library."""

from __future__ import annotations

import os
from dataclasses import replace

from polyattn.plugin import (
    BackendInfo,
    Capabilities,
    Priority,
    Proof,
    Role,
    declare,
    multiples,
    names,
)

EXAMPLE_ATTN = BackendInfo(
    name="EXAMPLE_ATTN",
    summary="attention in 50 lines of torch, to copy",
    path="polyattn_example.backend:ExampleAttention",
    capabilities=Capabilities(
        platforms={"cpu": ()},
        roles=frozenset(Role),
        cached=frozenset({True, False}),
        dtypes=frozenset({"float32", "bfloat16"}),
        head_sizes=multiples(8, high=256),
        features=names("causal non_causal gqa sliding_window lse"),
    ),
    # Below every serious backend: chosen only when it is named.
    priorities=(Priority(score=-10, why="an example; chosen only by name"),),
    proof={"cpu": Proof.MEASURED},
)


def _loopback() -> list[BackendInfo]:
    """TORCH_SDPA's claims for `loopback.py`, above every other backend; for tests."""
    if os.environ.get("EXAMPLE_LOOPBACK") != "1":
        return []
    from polyattn_cpu.hooks import TORCH_SDPA

    return [
        replace(
            TORCH_SDPA,
            name="LOOPBACK_ATTN",
            summary="TORCH_SDPA through a plugin of strangers",
            path="polyattn_example.loopback:LoopbackAttention",
            priorities=(Priority(score=1000, why="every call is to go through it"),),
        )
    ]


declare(__name__, api_versions=(1, 1), backends=[EXAMPLE_ATTN, *_loopback()])
