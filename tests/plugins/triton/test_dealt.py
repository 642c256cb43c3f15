"""What the choice takes for this plugin's schedules, beside its plans."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from chips import h200
from polyattn import Batch, Device, LatentSpec, LayerSpec
from polyattn.selection.cache_format import format_of
from polyattn.selection.dealing import SPREAD, Counts, deal
from polyattn_triton import launch, mla
from polyattn_triton.mla import FEW_HEADS_RATES, RATES, ROLES_RATES
from pretending import pretended

SMS = 132
H200 = Device("cuda", "sm_90", torch_device="cpu")


def drawn(
    source: random.Random, most: int, queries: tuple[int, int], top: float
) -> tuple[list[int], list[int]]:
    """Tokens and keys of a step's rows: alike, or each its own."""
    count, mean = source.randint(1, most), math.exp(source.uniform(4, top))
    alike, tokens = source.random() < 0.5, source.randint(*queries)
    q = [tokens if alike else source.randint(*queries) for _ in range(count)]
    return q, [n + int(mean * (1 if alike else source.uniform(0.1, 3))) for n in q]


def batch_of(q: list[int], n: list[int]) -> Batch:
    starts = np.append(0, np.cumsum(q)).tolist()
    return Batch(starts, n, torch.zeros(len(q), -(-max(n) // 64) + 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("heads", "queries"), [(16, (1, 1)), (64, (1, 1)), (128, (1, 1)), (32, (2, 9)), (128, (2, 9))]
)
def test_latents_are_shared_out_as_planned(
    heads: int, queries: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "facts", h200(SMS))
    spec = LayerSpec(
        kind="mla", num_heads=heads, head_size=192, v_head_size=128,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    backend = mla.TritonMLA(spec, format_of(spec, H200, "NHD", 64), H200)
    source, cuts = random.Random(heads), []
    for _ in range(60):
        q, n = drawn(source, 130, queries, 9)
        plan = backend.plan(batch_of(q, n))
        counts = deal(spec, np.array(q), np.array(n), sys.maxsize)("even", SMS)
        span = counts.pairs * heads / SMS / 64**2
        few = backend.kernels.few_heads and queries == (1, 1)
        rates = FEW_HEADS_RATES if few else ROLES_RATES if plan.roles else RATES
        if plan.way.split:
            share, total = plan.work[:2].tolist()
            assert span * (1 + few) == pytest.approx(min(share, total), rel=0.13, abs=1), (
                q,
                n,
                plan.work[:4],
            )
        else:
            assert span >= -(-max(n) // 64) + rates.item - 0.1
        assert counts.rows == (plan.merging is not None)
        cuts.append(counts.rows)
    assert sum(cuts) > 0


def test_few_drafts_are_cut_so_that_each_piece_has_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two drafts of 3 tokens, four tiles: 8 and 20 blocks, twice each, of which 132 programs have one."""
    monkeypatch.setattr(launch, "facts", h200(SMS))
    spec = LayerSpec(
        kind="mla", num_heads=32, head_size=192, v_head_size=128,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    backend = mla.TritonMLA(spec, format_of(spec, H200, "NHD", 64), H200)
    q, n = [3, 3], [481, 1224]
    plan = backend.plan(batch_of(q, n))
    assert int(plan.work[0]) == 1
    counts = deal(spec, np.array(q), np.array(n), sys.maxsize)("even", SMS)
    assert counts.pairs == int(plan.work[0]) * SMS * 64**2 // spec.num_heads


def planned(
    spec: LayerSpec, rows: int, queries: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[int], Any, Counts]]:
    """Yield the keys of random steps, TRITON_ATTN's plans for them, and what is counted of these."""
    backend, _ = pretended(monkeypatch, spec)
    source = random.Random(spec.head_size)
    for _ in range(60):
        q, n = drawn(source, rows, queries, 8)
        plan = backend.plan(batch_of(q, n))
        seen = sys.maxsize if spec.sliding_window is None else spec.sliding_window - 1
        yield n, plan, deal(spec, np.array(q), np.array(n), seen)("whole", SMS).exact()


@pytest.mark.parametrize(
    "changes",
    [{"head_size": 64}, {}, {"head_size": 256}, {"head_size": 64, "learned_sinks": True},
     {"head_size": 192}, {"head_size": 96}, {"sliding_window": 4000},
     {"head_size": 256, "sliding_window": 1024, "logit_soft_cap": 50.0},
     {"kv_cache_dtype": "fp8_e4m3"}, {"head_size": 64, "kv_cache_dtype": "fp8_e4m3"}],
    ids=str,
)  # fmt: skip
def test_prompts_and_chunks_are_cut_as_planned(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Hopper's own prefill and by the portable one, which has two programs on a processor with 64.

    Over 8 bits Hopper's runs where keys are copied for it.
    """
    size = changes.get("head_size", 128)
    spec = LayerSpec(num_heads=16, num_kv_heads=2, head_size=128).replace(
        **changes, v_head_size=size
    )
    ways, own = [], set()
    for _, plan, counts in planned(spec, 12, (17, 400), monkeypatch):
        assert plan.config.block_m == 128 and (counts.rows > 0) == (plan.way == "pieces")
        if "kv_cache_dtype" in changes:
            assert counts.kind == ("prefill" if plan.at_once else "chunked")
            own.add(counts.kind)
        if plan.way == "pieces":
            span = counts.pairs * 16 / SMS / 128 / plan.config.block_n
            share, count = int(plan.work[0]), int(plan.work[3])
            begins = size // 128 if plan.at_once else 2
            assert 0.87 * share - 1 <= span - begins and span - begins * count <= 1.13 * share + 1
        ways.append(plan.way)
    assert {"pieces", "prefill"} == set(ways)
    assert len(own) == (0 if "kv_cache_dtype" not in changes else 1 + (size > 64))


def tiles_of(plan: Any, n: list[int], group: int) -> int:
    """Blocks of keys of all tiles of a step's rows, and one for each tile."""
    high, block, count = plan.config.block_m, plan.config.block_n, 0
    for tokens, keys in zip(plan.batch.query_lens, n, strict=True):
        for end in range(high, tokens * group + high, high):
            last = (min(end, tokens * group) - 1) // group
            count += -(-(keys - tokens + last + 1) // block) + 1
    return count


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 16, 64), (16, 2, 128), (24, 4, 256)])
def test_short_rows_are_shared_out_as_planned(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, ways = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size), []
    for n, plan, counts in planned(spec, 40, (2, 16), monkeypatch):
        few, merged = plan.way == "few", plan.merging
        low = few and plan.config.block_m == 16
        assert (counts.kind == "low") == low and (counts.kind in ("low", "short")) == few
        if few:
            share, _, item, count = plan.work[:4].tolist()
            rows = 64 if size <= 128 else (64 + plan.config.block_m) / 2
            span = counts.pairs * heads / SMS / 64 / rows
            # Programs, if none ends early.
            side = -(-tiles_of(plan, n, heads // kv_heads) // share) * kv_heads
            span /= 0.9 if side <= SMS else 1
            assert item == 1 and span >= min(share, max(n) // plan.config.block_n) - 0.1
            assert not merged or span == pytest.approx(share, abs=0.1)
            waits = -(-merged.parts // 16) if merged else 0
            begun = counts.rows * kv_heads - (1 + waits * 64 / size if waits else 0)
            begun -= SPREAD * math.log2(min(side, SMS))
            assert begun == pytest.approx(round(begun)) and 1 <= round(begun) <= count
            assert (counts.queries > plan.batch.num_tokens) == (merged is not None)
        ways.append(plan.way)
    assert "few" in ways
