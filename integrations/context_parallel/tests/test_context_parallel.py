"""A sequence over several processes gives what one float64 reference gives, on every rank."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from functools import cache
from itertools import chain, product
from typing import Any

import pytest
import ranks_others as others
import torch
from polyattn import LayerSpec, SparseSpec
from polyattn_context_parallel.merging import _Buffers
from polyattn_context_parallel.shards import Blocks, Zigzag
from ranks_others import run_all
from ranks_worker import Case, spawned

GQA = {"num_heads": 8, "num_kv_heads": 2, "head_size": 32, "dtype": "float64"}
MLA = {
    "kind": "mla", "num_heads": 8, "head_size": 24, "v_head_size": 16, "dtype": "float32",
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "mha_bf16": {"num_heads": 4, "head_size": 64, "dtype": "bfloat16"},
    "soft_cap": GQA | {"logit_soft_cap": 5.0},
    "window": GQA | {"sliding_window": 21},
    "sink_tokens": GQA | {"sliding_window": 21, "sink_tokens": 3},
    "chunk": GQA | {"chunk_size": 24},
    "alibi": GQA | {"alibi": True},
    "alibi_window": GQA | {"alibi": True, "sliding_window": 21},
    "learned_sinks": GQA | {"learned_sinks": True},
    "learned_sinks_window": GQA | {"learned_sinks": True, "sliding_window": 21},
    "v_head_size": GQA | {"v_head_size": 16},
    "int8": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": "float32",
        "kv_cache_dtype": "int8",
    },
}
NO_RING = ("window", "sink_tokens", "chunk", "alibi", "mla")
"""Words of the layers that a ring refuses: whose keys' places count, and MLA."""

DECODE = ((1,) * 7, (150, 1, 40, 0, 16, 65, 17))
"""Ragged rows of one token, a padding row, and rows of which some rank holds nothing."""
MIXED = ((1, 5, 30, 1, 17, 0, 1), (40, 90, 30, 0, 100, 20, 9))
"""Decodes, a padding row, whole prompts, rows with cached context, and one without query tokens."""
PROMPTS = ((70, 1, 33, 2, 5), (70, 1, 33, 2, 5))
SEED = secrets.randbelow(2**31)
"""Of this run's numbers and drawn lengths; a failure tells it."""


def drawn(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query lengths and lengths of sequences, most short, as they may come."""
    dice = random.Random(SEED)
    queries = tuple(dice.choice((0, 1, 1, 2, dice.randint(3, 60))) for _ in range(count))
    lens = tuple(q + dice.choice((0, dice.randint(0, 40), dice.randint(0, 200))) for q in queries)
    return queries, lens


def latent(**more: Any) -> dict[str, Any]:
    from polyattn.spec.latent import LatentSpec

    return MLA | {"latent": LatentSpec(rank=32, rope_head_size=8)} | more


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    layers = LAYERS | {"mla": latent()}
    for seed, (name, spec) in enumerate(layers.items()):
        spec = spec | {"block_size": 16}
        seed += SEED
        found[f"{name}-decode"] = Case(spec, *DECODE, seed=seed)
        found[f"{name}-drawn"] = Case(spec, *drawn(6), seed=seed)
        found[f"{name}-mixed"] = Case(spec, *MIXED, seed=100 + seed)
        found[f"{name}-own"] = Case(spec, *MIXED, queries="own", seed=200 + seed)
        if not any(word in name for word in NO_RING):
            found[f"{name}-ring"] = Case(
                spec, *PROMPTS, queries="own", group={"prefill": "ring"}, seed=300 + seed
            )
    for name in ("gqa", "learned_sinks", "alibi", "mla"):
        spec = layers[name] | {"block_size": 16}
        for step, lens in (("decode", DECODE), ("mixed", MIXED)):
            found[f"{name}-{step}-to_all"] = Case(
                spec, *lens, group={"merge": "all_to_all"}, seed=SEED + 400
            )
    for name in ("gqa", "window", "learned_sinks", "alibi", "sink_tokens", "mla", "int8"):
        spec = layers[name] | {"block_size": 16}
        for queries in ("all", "own"):
            found[f"{name}-heads-{queries}"] = Case(
                spec, *MIXED, queries=queries, group={"keys": "heads"}, seed=SEED + 500
            )
    return found


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lse": (GQA | {"needs_lse": False}, {}, "needs_lse=True"),
    "ring and window": (GQA | {"sliding_window": 8}, {"prefill": "ring"}, "sliding_window: a key"),
    "ring and alibi": (GQA | {"alibi": True}, {"prefill": "ring"}, "alibi: a key"),
    "ring and mla": (latent(), {"prefill": "ring"}, "MLA has latents"),
    "placed and chunk": (GQA | {"chunk_size": 8}, {"keys": "placed"}, "keys='blocks'"),
    "star by blocks": (GQA, {"prefill": "star"}, "keys='placed'"),
    "a name": (GQA, {"keys": "block"}, "did you mean 'blocks'?"),
    "heads": (GQA | {"num_heads": 3, "num_kv_heads": 3}, {"merge": "all_to_all"}, "num_heads=3"),
    "encoder": (GQA | {"cached": False}, {}, "only a decoder's causal layer over a cache"),
    "dense context": (GQA | {"dense_context": True, "sliding_window": 8}, {}, "use keys='heads'"),
    "sparse": (
        {"kind": "sparse", "num_heads": 8, "head_size": 32, "sparse": SparseSpec(budget=4)}, {},
        "its tokens choose among keys of the whole sequence",
    ),
}  # fmt: skip


def more() -> dict[str, tuple[Callable[..., Any], Any]]:
    """What else two ranks do in the same processes: a name, what runs, and what it is given."""
    stars = {
        f"star {changes}": (others.star, others.SPEC.replace(**changes))
        for changes in ({}, {"learned_sinks": True}, {"logit_soft_cap": 4.0})
    }
    placed = LayerSpec(**latent(needs_lse=True, block_size=16))
    asked = {
        name: (LayerSpec(**{"needs_lse": True, **spec}), options)
        for name, (spec, options, _) in REFUSED.items()
    }
    return stars | {
        "placed latents": (others.latent_decode, placed),
        "refused": (others.refused, asked),
    }


@cache
def found(size: int) -> list[dict[str, Any]]:
    """Starting a process takes longer than all that it does here, so there is one for each rank."""
    return spawned(size, run_all, cases(), more())


def judge(size: int, name: str) -> None:
    ranks = [rank[name] if isinstance(rank, dict) else rank for rank in found(size)]
    for rank in ranks:
        assert isinstance(rank, dict), (SEED, rank)
        assert rank["out"] <= 1 and rank["lse"] <= 1, (SEED, ranks)
        assert rank.get("stored", True), "another rank's blocks, or not this one's"
        assert rank.get("again", True), "another run gave other bits"
    told = [rank.get("explained", "query tokens") for rank in ranks]
    assert any("query tokens" in each for each in told), (
        "a rank may have no token of a step, not all"
    )
    if "own" not in name and "to_all" not in name and "ring" not in name:
        assert len({rank["bits"] for rank in ranks}) == 1, "the ranks' outputs differ in bits"


@pytest.mark.parametrize("name", cases())
def test_two_ranks(name: str) -> None:
    judge(2, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_four_ranks(name: str) -> None:
    judge(4, name)


SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in more() if name != "refused"])
def test_keys_that_the_engine_placed(name: str, size: int) -> None:
    errors = [rank[name] if isinstance(rank, dict) else rank for rank in found(size)]
    assert all(isinstance(error, float) and error <= 1 for error in errors), errors


@pytest.mark.slow
def test_beside_tensor_parallelism() -> None:
    errors = spawned(4, others.tensor_parallel)
    assert all(error <= 1 for error in errors), errors


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_what_goes_wrong_on_one_rank_is_an_error_on_all(size: int) -> None:
    ranks = spawned(size, others.going_wrong)
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict), found
        assert "the ranks disagree on the layer" in found["spec"][0]
        assert "window 8" in found["spec"][0], "both sides are shown"
        assert "the ranks disagree on the step" in found["lengths"][0]
        assert "seq_lens [5, 6]" in found["lengths"][0] and "[5, 7]" in found["lengths"][0]
        assert "note 3" in found["lengths"][0], "which of the comparisons it was"
        assert "the ranks disagree on the step" in found["sequences"][0]
        words = "differs from the cache's" if rank == 0 else "rank 0 can't take part in the step"
        assert words in found["one refuses"][0]
        assert found["goes on"][0] == "nothing"
        assert "block_table[0, 0]=99 points outside" in found["a table"][0]
        wrong = "query has 0 rows" if rank == size - 1 else "did not answer within 10 s"
        assert wrong in found["a shape"][0] and found["a shape"][1] < 30
        assert "an earlier error" in found["after it"][0]
        if rank < size - 1:
            assert "another rank died" in found["death"][0] and found["death"][1] < 30
            assert "an earlier error" in found["a plan after it"][0]


def test_what_is_refused_says_why() -> None:
    for rank in found(2):
        assert isinstance(rank, dict), rank
        for name, (_, _, words) in REFUSED.items():
            assert words in rank["refused"][name], (name, rank["refused"])
        assert "mask: a step over several ranks" in rank["refused"]["a step's mask"]
        assert "seq_lens are bounds" in rank["refused"]["a step of bounds"]
        assert "ranks plan by exact lengths" in rank["refused"]["a layer of bounds"]
        assert "alibi_slopes is missing" in rank["refused"]["slopes"]
        assert "reads another's keys" in rank["refused"]["a reader's keys"]


def test_each_key_and_each_token_is_one_rank_s() -> None:
    """Of up to 26 keys in blocks of 1 to 3 on up to 4 ranks, and up to 3 sequences of up to 6 tokens."""
    for size, block in product(range(1, 5), range(1, 4)):
        ranks = [Blocks(block, rank, size) for rank in range(size)]
        key, engine = torch.arange(26), block * size
        owner, place = key % engine // block, key // engine * block + key % block
        stored = torch.stack([blocks.slots(key) for blocks in ranks])
        assert (stored == torch.where(owner == torch.arange(size)[:, None], place, -1)).all()
        for length in range(27):
            held = [int(blocks.held(length)) for blocks in ranks]
            assert held == [int((owner[:length] == rank).sum()) for rank in range(size)]
    for size, count in product(range(1, 5), range(1, 4)):
        for queries in product(range(7), repeat=count):
            zigzag = Zigzag(queries, size)
            tokens = [zigzag.tokens(rank).tolist() for rank in range(size)]
            assert sorted(chain(*tokens)) == list(range(sum(queries)))
            padded = (part + [-1] * (zigzag.longest - len(part)) for part in tokens)
            whole = [*chain(*padded)]
            assert [whole[place] for place in zigzag.places()] == list(range(sum(queries)))
            pieces = [piece for rank in range(size) for piece in zigzag.pieces(rank)]
            assert sum(last - first for _, first, last in pieces) == sum(queries)


@pytest.mark.parametrize("by_heads", [False, True])
def test_a_step_without_tokens_has_buffers(by_heads: bool) -> None:
    for size in (1, 2, 3):
        buffers = _Buffers(torch.zeros(0, 6, 16), 8, 6 // size if by_heads else 6, size)
        assert buffers.received.shape == (size, buffers.sent.shape[1])
        assert [tuple(out.shape) for out, _ in buffers.parts] == [tuple(buffers.total.shape)] * size
