"""Planners' integer formulas by exhaustion: every small case, and for the native planner every length.

What this proves, and up to which bounds, is in docs/proofs.md; ranges of keys are in
tests/spec/test_key_ranges.py, and the same on the device in tests/plugins/triton/seen.py.
"""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from polyattn import Device, LayerSpec, SparseSpec
from polyattn.errors import PluginError
from polyattn.kernel import LatentSpec
from polyattn.runtime.plan_checks import check_plan
from polyattn.runtime.reads import shows
from polyattn_cpu.native import library
from test_reads import H200, form_of, step_of, triton

pytest.importorskip("triton")
from polyattn_triton.configs import PrefixConfig
from polyattn_triton.prefix_schedule import Shape, Tiles, cut
from polyattn_triton.reading import Work
from polyattn_triton.reading import stretches as walked
from polyattn_triton.schedule import (
    Line,
    Rates,
    key_tiles,
    most_key_tiles,
    most_keys,
    rows_of,
    stretches,
    whole,
)

slow = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def lengths(most: int, count: int) -> list[np.ndarray]:
    """Return all lists of up to `count` numbers of key tiles up to `most`."""
    found = (product(range(most + 1), repeat=n) for n in range(1, count + 1))
    return [np.array(keys) for some in found for keys in some]


@pytest.mark.parametrize(
    ("most", "count", "items"),
    [(5, 3, (1,)), pytest.param(3, 4, (1, 2, 3), marks=slow), pytest.param(40, 1, (1, 2), marks=slow)],
)  # fmt: skip
def test_stretches_have_every_key_tile_once(most: int, count: int, items: tuple[int, ...]) -> None:
    """Of all such lists, for 1 to 6 programs: walked as a program does, in the order of the keys."""
    for keys in lengths(most, count):
        for programs, item, least in product(range(1, 7), items, (1, 2)):
            dealt = stretches(Line.of(keys, item), programs, Rates(item, least))
            faults: list[str] = []
            pieces = walked(Work(torch.from_numpy(dealt.work()), faults), programs, False)
            order = np.lexsort((pieces.begin, pieces.part, pieces.seq))
            tile, begin, part = pieces.seq[order], pieces.begin[order], pieces.part[order]
            # Below 0: not all of its queries' units.
            end = np.clip(pieces.end[order], 0, keys[tile])
            case = (keys, programs, item, least)
            first = np.diff(tile, prepend=-1) > 0
            assert not faults and tile[first].tolist() == list(range(len(keys))), case
            assert (begin[first] == 0).all(), case
            # A part may have a tile's queries alone, or what is behind its keys: [n, n).
            assert (
                np.minimum(begin, keys[tile])[~first] == end[np.flatnonzero(~first) - 1]
            ).all(), case
            assert (end[[*(np.flatnonzero(first)[1:] - 1), -1]] == keys).all(), case
            mine = part[part >= 0]
            assert len(set(mine)) == len(mine) and (mine < 2 * programs).all(), case


def test_whole_tiles_are_dealt_out_once() -> None:
    """Of all lists of up to 4 numbers up to 4: each tile, the longest first."""
    for keys in lengths(4, 4):
        for slots, item, merge in product((1, 2, 3, 5), (1, 3), (0, 6)):
            order = whole(keys, slots, Rates(item, 2, merge))
            if order is not None:
                assert sorted(order) == list(range(len(keys)))
                assert (np.diff(keys[order]) <= 0).all()


def test_tiles_have_every_row_once() -> None:
    """Up to 3 sequences of up to 5 tokens, groups up to 5, tiles of up to 8 rows."""
    for queries in lengths(5, 3):
        for group, height in product(range(1, 6), range(1, 9)):
            seq, row = rows_of(queries, group, height)
            there = queries[seq] * group
            stop = np.minimum(row + height, there)
            covered = [(s, r) for s, a, b in zip(seq, row, stop, strict=True) for r in range(a, b)]
            assert covered == [(s, r) for s, n in enumerate(queries) for r in range(n * group)]
            assert (row < there).all()


TILE_MASKS: list[dict[str, Any]] = [
    {"causal": causal, "sliding_window": window, "sink_tokens": kept, "chunk_size": chunk}
    for causal, window, kept, chunk in product((True, False), (None, 1, 4, 7), (0, 1, 6), (None, 5, 8))
    if window or not kept
]  # fmt: skip


def test_key_tiles_are_those_that_hold_a_key_that_is_shown() -> None:
    """Of each run of up to 5 queries over up to 30 keys, in tiles of 4: by the rule, key by key."""
    last = np.array([(n - q, n - 1, n) for n in range(1, 31) for q in range(1, min(n, 5) + 1)]).T
    inner = np.array([(a, b, 30) for b in range(30) for a in range(max(0, b - 4), b + 1)]).T
    first, stop, lens = np.concatenate([last, inner], 1)
    query = first[:, None] + np.arange(5)
    keys = np.arange(32)
    for mask in TILE_MASKS:
        spec = LayerSpec(num_heads=1, head_size=64, **mask)
        seen = shows(spec, query[..., None], keys, lens[:, None, None])
        seen = (seen & (query <= stop[:, None])[..., None]).any(1)
        tiles = seen.reshape(len(lens), 8, 4).any(2).sum(1)
        assert (key_tiles(spec, first, stop, lens, 4) == tiles).all(), mask
        for longer in (0, 1, 2, 3, 7):  # the same queries of a longer sequence's bound
            bound = most_key_tiles(spec, first + longer, stop + longer, lens + longer, 4)
            assert (tiles <= bound).all(), mask
        some = slice(0, last.shape[1])
        most = most_keys(spec, lens[some], (stop - first + 1)[some])
        more = most - seen[some].sum(1)
        assert (more >= 0).all() and (more == 0).any(), mask
        assert spec.chunk_size or (more == 0).all(), mask


@pytest.mark.parametrize("most", [17, pytest.param(33, marks=slow)])
def test_pieces_of_prefixes_have_every_key_tile_once(most: int) -> None:
    """Up to 3 tiles of 1 to 33 keys in tiles of 8, of one row or of four, for 1 to 5 programs."""
    config = PrefixConfig(
        tall=64, block_n=8, num_warps=4, num_stages=2, on_one=1, small_us=7, tall_us=19, item_us=11
    )
    shape = Shape(4, 16, config)
    spans = (1, 8, 9, most)
    for count in (1, 2, 3):
        for keys, rows in product(product(spans, repeat=count), product((1, 9), repeat=count)):
            stop = np.array(keys)
            none = np.zeros(count, np.int64)
            tiles = Tiles(np.arange(count), none, stop, none, np.array(rows), none)
            for programs in range(1, 6):
                pieces = cut(tiles, shape, programs)
                case = (keys, rows, programs)
                parts = [
                    (int(tile), tile_at)
                    for tile, begin, end in zip(pieces.tile, pieces.begin, pieces.end, strict=True)
                    for tile_at in range(begin, end)
                ]
                assert parts == [(i, k) for i, n in enumerate(keys) for k in range(-(-n // 8))], (
                    case
                )
                assert (np.diff(pieces.program) >= 0).all(), case
                assert ((pieces.program >= 0) & (pieces.program < programs)).all(), case


def test_a_plan_s_tiles_count_the_keys_that_their_rows_see() -> None:
    """No tile too many, which would only be slow, and none too few: of TRITON_ATTN and TRITON_MLA."""
    batch = step_of([300, 20, 1, 0], [1500, 20, 700, 90])
    queries, lens = np.array(batch.query_lens), np.array(batch.lens)

    def wanted(tiles: Any, group: int, rows: int, block: int) -> list[int]:
        last = np.minimum(tiles.row + rows, queries[tiles.seq] * group) - 1
        return [-(-n // block) for n in (lens - queries)[tiles.seq] + last // group + 1]

    backend = triton()
    plan = backend.plan_rows(batch, cut=True)
    tiles, config = backend._tiles(plan), plan.config
    assert tiles.keys.tolist() == wanted(tiles, 4, config.block_m, config.block_n)
    for topk in (None, 100):
        backend, made = latents(topk), []
        backend.kernels.plan = lambda batch, tiles, *_: made.append(tiles)  # noqa: B023
        backend.plan(batch)
        (tiles,), config = made, backend.kernels.config
        if topk:
            assert set(tiles.keys.tolist()) == {-(-topk // config.block_n)}
        else:
            assert tiles.keys.tolist() == wanted(tiles, 20, config.block_h, config.block_n)
            backend.plan(step_of([1], [0]))
            assert made[1].keys.tolist() == [0] * len(made[1].seq)


def latents(topk: int | None) -> Any:
    """TRITON_MLA, or with `topk` TRITON_MLA_SPARSE, of 20 heads."""
    from polyattn_triton.mla import TritonMLA, TritonMLASparse

    spec = LayerSpec(
        kind="sparse_mla" if topk else "mla", num_heads=20, num_kv_heads=20, head_size=48,
        v_head_size=32, dtype="bfloat16", latent=LatentSpec(rank=64, rope_head_size=16),
        sparse=SparseSpec(budget=topk) if topk else None,
    )  # fmt: skip
    return (TritonMLASparse if topk else TritonMLA)(spec, form_of(spec), H200)


def test_a_wrong_plan_over_chosen_keys_is_told() -> None:
    """The second number of its work is a tile's token, or how many key tiles there are."""
    for topk, tokens in ((64, 200), (2048, 3)):
        backend, batch = latents(topk), step_of([1] * tokens, [3000] * tokens)
        plan = backend.plan(batch)
        assert check_plan(backend, plan, batch)
        plan.work[1] += 1
        with pytest.raises(PluginError, match=r"sequence \d+, query token 0, query head \d+"):
            check_plan(backend, plan, batch)


KINDS = (
    "NATIVE_ATTN", "NATIVE_ATTN, invariant", "NATIVE_ATTN, row formats", "NATIVE_MLA", "TRITON_ATTN",
    "TRITON_ATTN, captured", "TRITON_ATTN, shared prefixes", "TRITON_ATTN, invariant",
    "TRITON_ATTN, row formats", "TRITON_MLA", "TRITON_MLA, captured", "TRITON_MLA_SPARSE", "PALLAS_ATTN",
    "HPU_ATTN", "steps taken apart",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_plans_at_lengths_where_sources_turn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few layers of each kind of `benchmarks/random_plans.py`, key by key."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    if kind.startswith("NATIVE") and library.why_not() is not None:
        pytest.skip("no native kernels")
    if kind == "PALLAS_ATTN":
        pytest.importorskip("jax")
    random_plans = importlib.import_module("random_plans")
    assert tuple(random_plans.KINDS) == KINDS
    for seed in range(3):
        checked, failed = random_plans.piece(kind, seed, 20)
        assert checked == 20 and not failed, failed


NATIVE_MASKS: list[dict[str, Any]] = [
    {}, {"sliding_window": 5}, {"sliding_window": 520, "sink_tokens": 3}, {"chunk_size": 100},
    {"sliding_window": 5, "causal": False},
]  # fmt: skip


def native(heads: int, kv_heads: int, **mask: Any) -> Any:
    from polyattn_cpu.native.attention import NativeAttention

    if library.why_not() is not None:
        pytest.skip("no native kernels")
    spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=64, dtype="float32", **mask)
    return NativeAttention(spec, form_of(spec), Device("cpu", "x86_64", torch_device="cpu"))


@pytest.mark.parametrize("mask", NATIVE_MASKS, ids=str)
@pytest.mark.parametrize(
    ("queries", "least", "most"),
    [(1, 500, 530), *(pytest.param(q, 0, 3300, marks=slow) for q in (1, 9))],
)
def test_every_length_of_a_native_step(
    queries: int, least: int, most: int, mask: dict[str, Any]
) -> None:
    """Every number of keys, alone and with its successors in one step; parts have 512 or 1,024."""
    backend = native(8, 2, **mask)
    for first in range(max(least, queries), most, 50):
        lens = [*range(first, min(first + 50, most))]
        batch = step_of([queries] * len(lens), lens)
        assert check_plan(backend, backend.plan(batch), batch)
    for length in range(max(least, queries), most, 1 if most < 600 else 97):
        batch = step_of([queries], [length])
        assert check_plan(backend, backend.plan(batch), batch)


@pytest.mark.parametrize("heads", [1, 7, 71, 130])
@pytest.mark.parametrize("most", [40, pytest.param(400, marks=slow)])
def test_every_number_of_queries_of_a_native_step(heads: int, most: int) -> None:
    """A block has 100 rows at the most, of one token at least: every number of tokens, and their keys."""
    backend = native(heads, 1, sliding_window=5)
    for first in range(1, most, 20):
        queries = [*range(first, min(first + 20, most))]
        batch = step_of(queries, [2 * n for n in queries])
        assert check_plan(backend, backend.plan(batch), batch)
