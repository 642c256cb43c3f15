"""A sequence over several processes gives what one float64 reference gives, on every rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from context_parallel.worker import Case, run_cases, spawned

GQA = dict(num_heads=8, num_kv_heads=2, head_size=32, dtype="float64")
MLA = dict(
    kind="mla", num_heads=8, head_size=24, v_head_size=16, dtype="float32",
)  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "mha_bf16": dict(num_heads=4, head_size=64, dtype="bfloat16"),
    "soft_cap": GQA | dict(logit_soft_cap=5.0),
    "window": GQA | dict(sliding_window=21),
    "sink_tokens": GQA | dict(sliding_window=21, sink_tokens=3),
    "chunk": GQA | dict(chunk_size=24),
    "alibi": GQA | dict(alibi=True),
    "alibi_window": GQA | dict(alibi=True, sliding_window=21),
    "learned_sinks": GQA | dict(learned_sinks=True),
    "learned_sinks_window": GQA | dict(learned_sinks=True, sliding_window=21),
    "v_head_size": GQA | dict(v_head_size=16),
    "int8": dict(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", kv_cache_dtype="int8"),
}
ORDERED = ("window", "sink_tokens", "chunk", "alibi")
"""Words of the layers whose keys' places count: those that a ring refuses."""

DECODE = ((1,) * 7, (150, 1, 40, 0, 16, 65, 17))
"""Ragged rows of one token, a padding row, and rows of which some rank holds nothing."""
MIXED = ((1, 5, 30, 1, 17, 0, 1), (40, 90, 30, 0, 100, 20, 9))
"""Decodes, a padding row, whole prompts, rows with cached context, and one without query tokens."""
PROMPTS = ((70, 1, 33, 2, 5), (70, 1, 33, 2, 5))


def latent(**more: Any) -> dict[str, Any]:
    from polyattn.spec.layer import LatentSpec

    return MLA | dict(latent=LatentSpec(rank=32, rope_head_size=8)) | more


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    layers = LAYERS | {"mla": latent()}
    for seed, (name, spec) in enumerate(layers.items()):
        spec = spec | dict(block_size=16)
        found[f"{name}-decode"] = Case(spec, *DECODE, seed=seed)
        found[f"{name}-mixed"] = Case(spec, *MIXED, seed=100 + seed)
        found[f"{name}-own"] = Case(spec, *MIXED, queries="own", seed=200 + seed)
        if not any(word in name for word in ORDERED) and name != "mla":
            found[f"{name}-ring"] = Case(
                spec, *PROMPTS, queries="own", group={"prefill": "ring"}, seed=300 + seed
            )
    for name in ("gqa", "learned_sinks", "alibi", "mla"):
        spec = layers[name] | dict(block_size=16)
        for step, lens in (("decode", DECODE), ("mixed", MIXED)):
            found[f"{name}-{step}-to_all"] = Case(
                spec, *lens, group={"merge": "all_to_all"}, seed=400
            )
    for name in ("gqa", "window", "learned_sinks", "alibi", "sink_tokens", "mla", "int8"):
        spec = layers[name] | dict(block_size=16)
        for queries in ("all", "own"):
            found[f"{name}-heads-{queries}"] = Case(
                spec, *MIXED, queries=queries, group={"keys": "heads"}, seed=500
            )
    return found


@cache
def found(size: int) -> list[dict[str, Any]]:
    return spawned(size, run_cases, cases())


def judge(size: int, name: str) -> None:
    ranks = [rank[name] if isinstance(rank, dict) else rank for rank in found(size)]
    for rank in ranks:
        assert isinstance(rank, dict), rank
        assert rank["out"] <= 1 and rank["lse"] <= 1, ranks
        assert rank.get("stored", True), "another rank's blocks, or not this one's"
        assert rank.get("again", True), "another run gave other bits"
    if "own" not in name and "to_all" not in name and "ring" not in name:
        assert len({rank["bits"] for rank in ranks}) == 1, "the ranks' outputs differ in bits"


@pytest.mark.parametrize("name", cases())
def test_two_ranks(name: str) -> None:
    judge(2, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_four_ranks(name: str) -> None:
    judge(4, name)
