"""Does TRITON_ATTN's plan of an invariant layer have a request attended to alike in any batch?

By the plan alone, which is quick: what a request's bits follow from is the kernel, its tiles, and where
each tile's keys are cut. The kit runs the kernels (`regrouped`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreting import interpreted
from polyattn import Batch, LayerSpec
from polyattn.errors import BatchError
from polyattn.workload.dice import Dice

pytest.importorskip("triton")
SPECS = {
    "Llama 3.1 8B": LayerSpec(num_heads=32, num_kv_heads=8, head_size=128),
    "Qwen 2.5 7B": LayerSpec(num_heads=28, num_kv_heads=4, head_size=128),
    "Mistral 7B": LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=4096),
    "gpt-oss 20B": LayerSpec(
        num_heads=64, num_kv_heads=8, head_size=64, sliding_window=128, learned_sinks=True
    ),
    "Gemma 2 9B": LayerSpec(num_heads=16, num_kv_heads=8, head_size=256, logit_soft_cap=50.0),
    "Llama, int8": LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="int8"),
    "multi-query": LayerSpec(num_heads=71, num_kv_heads=1, head_size=64),
}
QUERIES = (0, 1, 1, 1, 2, 3, 4, 8, 9, 15, 16, 17, 60, 100, 263, 264, 265, 512, 900)
"""For 32 query heads, 8 KV heads: 16 tokens are 64 rows, 264 are 9 tiles of 128 rows a KV head."""
CONTEXTS = (0, 0, 1, 300, 510, 511, 512, 1023, 4095, 8191, 8192, 40_000)


def plans_of(backend: Any, lens: list[tuple[int, int]]) -> list[Any]:
    table = torch.zeros(len(lens), -(-max(n for _, n in lens) // 16) + 1, dtype=torch.int32)
    starts = [0]
    for queries, _ in lens:
        starts.append(starts[-1] + queries)
    plan = backend.plan(Batch(starts, [n for _, n in lens], table))
    return [plan, *getattr(plan, "others", [])]


def ways(backend: Any, lens: list[tuple[int, int]]) -> dict[int, list[tuple[Any, ...]]]:
    """Return by request what its bits follow from: each piece of its tiles, and how they are run."""
    return ways_of(plans_of(backend, lens))


def ways_of(plans: list[Any]) -> dict[int, list[tuple[Any, ...]]]:
    """Return by request each piece that launches have of its tiles, and how they are run."""
    from polyattn_triton.reading import Work, stretches

    found: dict[int, list[tuple[Any, ...]]] = {}
    for plan in plans:
        count = plan.grid[0]
        if not count:
            continue
        work = Work(plan.work, [])
        # What the kit compares bit by bit: decodes without drafts' masks, and stages.
        way = "few" if plan.way == "singles" else plan.way
        how = (
            way, replace(plan.config, num_stages=0), plan.fresh, plan.at_once > 0, plan.lists,
            plan.chosen, plan.widening,
        )  # fmt: skip
        if plan.way == "prefill":
            for tile in range(count):
                request, row = int(work[tile]), int(work[count + tile])
                found.setdefault(request, []).append((row, 0, None, *how))
            continue
        pieces = stretches(work, count, plan.way != "listed")
        for request, row, begin, end, part in zip(
            *(getattr(pieces, name).tolist() for name in ("seq", "row", "begin", "end", "part")),
            strict=True,
        ):
            merged = plan.merging.alike if part >= 0 else 0
            found.setdefault(request, []).append((row, begin, end, merged, *how))
    return {request: sorted(some, key=lambda x: x[:2]) for request, some in found.items()}


def regroupings(dice: Dice) -> list[tuple[int, int]]:
    queries = [dice.choice(QUERIES) for _ in range(dice.choice((2, 3, 5, 9, 40)))]
    return [(q, q + dice.choice(CONTEXTS)) for q in queries]


@pytest.mark.parametrize("draws", [15, pytest.param(1500, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", SPECS)
def test_a_request_is_attended_to_alike_in_any_batch(
    name: str, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep's are more than 10,000 regroupings."""
    from pretending import pretended

    backend, _ = pretended(monkeypatch, SPECS[name].replace(batch_invariant="batch"))
    free, _ = pretended(monkeypatch, SPECS[name])
    alone: dict[tuple[int, int], Any] = {}
    dice, differ = Dice(len(name)), 0
    for _ in range(draws):
        lens = regroupings(dice)
        found = ways(backend, lens)
        assert found.keys() == {i for i, (queries, _) in enumerate(lens) if queries}
        for request, way in found.items():
            its = lens[request]
            if its not in alone:
                alone[its] = ways(backend, [its])[0]
            assert way == alone[its], (its, lens)
        its = next((pair for pair in lens if pair[0]), None)
        if its is not None:
            (plan,), (by_itself,) = plans_of(free, lens), plans_of(free, [its])
            differ += (plan.way, plan.config) != (by_itself.way, by_itself.config)
    assert differ > 2  # the free layer's plans do


def test_a_class_follows_from_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """At and around what decides it: keys of a piece, rows of the decode kernel, a full chip."""
    from polyattn_triton.alike import LOW, PIECE, TALL_PIECE
    from pretending import pretended

    backend, _ = pretended(monkeypatch, SPECS["Llama 3.1 8B"].replace(batch_invariant="batch"))
    for queries, height in ((1, 16), (LOW // 4, 16), (LOW // 4 + 1, 64)):
        piece = PIECE if height == 16 else TALL_PIECE
        for count in (queries, piece - 1, piece, piece + 1, 2 * piece, 2 * piece + 1):
            (plan,) = plans_of(backend, [(queries, count)])
            assert plan.way == ("singles" if queries == 1 else "few")
            assert plan.grid == (-(-count // piece), 8, 1)
            assert plan.config.block_m == height
            assert (plan.merging is not None) == (count > piece)
    full = 132 // 8 * 128 // 4  # queries of as many tiles as a chip holds, at most
    of = {q: plans_of(backend, [(q, q + 8192)])[0] for q in (1, 16, 17, 200, full, full + 1)}
    ways = [plan.way for plan in of.values()]
    assert ways == ["singles", "few", "pieces", "pieces", "prefill", "prefill"]
    assert of[1].rows == 4 and of[16].config.block_m == 64
    assert of[17].grid == (17, 8, 1) and of[200].grid == (7 * 3, 8, 1)
    assert of[200].at_once and of[full].at_once
    assert plans_of(backend, [(17, PIECE)])[0].way == "prefill"
    mixed = plans_of(backend, [(1, 5000), (full, 9000), (3, 70), (17, 9000), (1, 3)])
    assert [plan.way for plan in mixed] == ["pieces", "prefill", "few"]
    prompts = plans_of(backend, [(300, 300), (full, 9000), (301, 302), (900, 900)])
    assert [plan.fresh for plan in prompts] == [False, True]
    assert [plan.requests[1].tolist() for plan in prompts] == [[0, 1, 1, 0], [1, 0, 0, 1]]
    paged, _ = pretended(monkeypatch, SPECS["multi-query"].replace(batch_invariant="batch"))
    assert not any(plan.fresh for plan in plans_of(paged, [(300, 300), (900, 900)]))


def test_pieces_of_drafts_are_about_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them, none longer than usual, and a last one as long as the others but for a tile."""
    from polyattn_triton.alike import LOW, TALL_PIECE
    from polyattn_triton.reading import reads_of
    from pretending import pretended

    backend, _ = pretended(monkeypatch, SPECS["Llama 3.1 8B"].replace(batch_invariant="batch"))
    for count in (TALL_PIECE + 1, 2052, 4100, 9 * TALL_PIECE + 1, backend.tall_long - 1, 100_003):
        (plan,) = plans_of(backend, [(LOW // 4 + 1, count)])
        reads = reads_of(backend, plan, plan.batch).keys
        keys = np.minimum(reads.end, count) - reads.begin
        assert len(keys) == plan.grid[0] and keys.sum() == count
        usual = TALL_PIECE * (6 if count > 2 * backend.tall_long else 2) // 2
        assert keys.max() <= usual
        even = -(-count // len(keys)) + plan.config.block_n
        assert keys.max() <= even or len(keys) > usual // plan.config.block_n


def test_pieces_are_longer_where_a_request_fills_a_chip_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its own keys; those are dealt out first. A window bounds what pieces there are."""
    from polyattn_triton.alike import ENOUGH, LOW, PIECE, TALL_ENOUGH, TALL_PIECE
    from pretending import pretended

    backend, _ = pretended(monkeypatch, SPECS["Llama 3.1 8B"].replace(batch_invariant="batch"))
    for queries, piece, enough, expected in (
        (LOW // 4 + 1, TALL_PIECE, TALL_ENOUGH, [22, 15, 15, 30]),
        (1, PIECE, ENOUGH, [64, 32, 32, 64]),
    ):
        long = piece * enough // 8
        lens = [long - 1, long, 2 * long, 4 * long]
        grids = [plans_of(backend, [(queries, count)])[0].grid[0] for count in lens]
        assert grids == expected
    (plan,) = plans_of(backend, [(1, 100), (1, 2 * long), (1, long)])
    assert plan.work[4 + 3 * plan.grid[0] :][: plan.grid[0]].unique_consecutive().tolist() == [
        1,
        2,
        0,
    ]
    mistral, _ = pretended(monkeypatch, SPECS["Mistral 7B"].replace(batch_invariant="batch"))
    assert mistral.long == mistral.tall_long == 0
    # One key less than twice as many has the most pieces: a captured step has programs for them.
    options = {"batch_invariant": "batch", "graph_capture": "single_token_decode"}
    for name in ("Llama 3.1 8B", "multi-query"):  # low tiles, and tall ones
        backend, _ = pretended(monkeypatch, SPECS[name].replace(**options))
        long = backend.long if name != "multi-query" else backend.tall_long
        (captured,) = plans_of(backend, [(1, 2 * long)])
        table = captured.batch.block_table
        assert backend.plan(Batch([0, 1], [2 * long - 1], table), captured).grid == captured.grid


@pytest.mark.parametrize(
    ("pieces", "stages"),
    [(48, 3), (50, 2), (64, 2), (66, 2), (67, 3), (98, 3), (100, 2), (132, 2), (133, 3), (198, 3)],
)
def test_decodes_have_a_stage_less_where_a_chip_then_takes_a_round_less(
    pieces: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to two rounds, on 132 multiprocessors that hold three programs each, or four; 8 KV heads."""
    from pretending import pretended

    backend, _ = pretended(monkeypatch, SPECS["Llama 3.1 8B"].replace(batch_invariant="batch"))
    (plan,) = plans_of(backend, [(1, 512)] * pieces)
    assert plan.grid[0] == pieces and plan.config.num_stages == stages


def test_drafts_run_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of their own, where a launch may begin before the last one ends: one of each class."""
    from pretending import pretended

    backend, _ = pretended(monkeypatch, SPECS["Llama 3.1 8B"].replace(batch_invariant="batch"))
    backend.room, lens = 1 << 21, [(300, 9000), (1, 5000), (8, 6500), (8, 6500), (8, 6500)]
    plans = plans_of(backend, lens)
    assert [(plan.way, plan.beside) for plan in plans] == [
        ("pieces", 0), ("few", 0), ("few", 1), ("few", 0), ("few", 0),
    ]  # fmt: skip
    assert [plan.kept.tensors[0] is backend.spaces[1].parts for plan in plans[1:4]] == [0, 1, 0]
    backend.early = False
    assert not any(plan.beside for plan in plans_of(backend, lens))


def test_prefills_are_cut_where_they_end_sooner() -> None:
    """Beside what a simulation says: the pieces dealt out, the longest first, to programs as they end."""
    from heapq import heapreplace

    from polyattn_triton.alike import MERGE, PART, PIECE, SIZES, START, WHOLE, pieces_of

    def duration(tiles: int, keys: int, size: int) -> int:
        lengths, loads = [size] * (keys // size) + [keys % size] * (keys % size > 0), [0] * 132
        for length in lengths:
            for _ in range(tiles):
                heapreplace(loads, loads[0] + length + START)
        return max(loads) + (MERGE + PART * tiles * len(lengths) if len(lengths) > 1 else 0)

    cut = 0
    for tiles in (1, 4, 16, 33, 34, 56, 64, 112, 131):
        for keys in (PIECE, PIECE + 1, 1500, 4608, 8704, 40_000):
            found = int(pieces_of(np.array([tiles]), np.array([keys]), 132)[0])
            sizes = [s for s in SIZES.tolist() if s < keys and (4 * tiles > 132 or not s & (s - 1))]
            best = min(duration(tiles, keys, size) for size in [keys, *sizes])
            assert duration(tiles, keys, found or keys) <= 1.1 * best, (tiles, keys, found)
            cut += found != WHOLE
    assert 20 < cut < 45
    assert (pieces_of(np.array([132, 1000]), np.array([8704, 8704]), 132) == WHOLE).all()


@pytest.mark.parametrize("level", ["batch", "steps"])
def test_parts_have_bounded_room(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt, and of many requests: launches one after another, each tile in one of them."""
    from polyattn_triton import alike
    from pretending import pretended

    lens = [(100, 8292)] * 60 + [(1, 5000)] * 300 + [(40_000, 40_000)]
    backend, _ = pretended(monkeypatch, SPECS["Llama 3.1 8B"].replace(batch_invariant=level))
    plans = plans_of(backend, lens)
    assert len(plans) > 5 and all(not plan.others for plan in plans[1:])
    spec = backend.spec
    for plan in plans:
        of_one = 2 * plan.rows * spec.num_kv_heads * (spec.v_head_size + 1) * 4
        longest = 40 * of_one  # what a tile, or a request of a class, may be beyond
        assert plan.merging is None or plan.grid[0] * of_one <= backend.room + longest
    found = ways(backend, lens)
    assert 4 * backend.workspace.parts.numel() < 2.5 * alike.ROOM  # it grows by doubling
    backend.room = 1 << 40
    monkeypatch.setattr(backend, "_reserve", lambda *room: None)  # 29 GB
    assert len(plans_of(backend, lens)) < len(plans) and ways(backend, lens) == found


@pytest.mark.parametrize("level", ["steps", "calls"])
@pytest.mark.parametrize("name", SPECS)
def test_a_row_s_keys_are_cut_at_the_same_places_in_any_step(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, drafts, decodes and packed prompts, in one kernel; a window's tiles aren't cut."""
    from polyattn_triton.alike import STEPS_PIECE
    from polyattn_triton.reading import Work, stretches
    from pretending import pretended

    if level == "calls" and SPECS[name].kv_cache_dtype != "auto":
        return
    spec = SPECS[name].replace(batch_invariant=level)
    backend, _ = pretended(monkeypatch, spec)
    dice, hows, cut = Dice(len(name)), set(), 0
    for _ in range(6):
        lens = regroupings(dice)
        lens += [(STEPS_PIECE + n, STEPS_PIECE + n) for n in (-1, 0, 1)]
        for plan in plans_of(backend, lens):
            hows.add((plan.way, plan.config, plan.at_once, plan.fresh, plan.rows))
            each = STEPS_PIECE // plan.config.block_n
            pieces = stretches(Work(plan.work, []), plan.grid[0], True)
            assert not plan.merging or not plan.merging.few
            if spec.sliding_window:
                assert plan.merging is None and (pieces.part < 0).all() and not pieces.begin.any()
                continue
            assert not (pieces.begin % each).any() and (pieces.end - pieces.begin <= each).all()
            cut += int((pieces.part >= 0).sum())
    assert len(hows) == 1 and (cut > 0) == (not spec.sliding_window)
    if spec.kv_cache_dtype == "auto":  # a call without a cache goes the same way
        plan = backend.plan(Batch([0, 3000], [3000], None))
        assert (plan.way, plan.config, plan.at_once, plan.rows) == (
            *next(iter(hows))[:3],
            plan.rows,
        )


@pytest.mark.parametrize("level", ["batch", "steps"])
@pytest.mark.parametrize("name", SPECS)
def test_a_captured_step_s_decodes_are_cut_as_an_eager_one_s(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lengths are planned into it, up to those that it was captured with."""
    from pretending import pretended

    spec = SPECS[name].replace(batch_invariant=level)
    backend, _ = pretended(monkeypatch, spec.replace(graph_capture="single_token_decode"))
    eager, _ = pretended(monkeypatch, spec)
    backend.room, rows = 4 << 20, 9
    launches = plans_of(backend, [(1, 70_000)] * rows)
    assert len(launches) > 1 or spec.sliding_window
    buffers = [launch.work.data_ptr() for launch in launches]
    table, dice = launches[0].batch.block_table, Dice(len(name))
    for _ in range(8):
        lens = [dice.choice((0, 1, 511, 512, 513, 1025, 9000, 32_767, 70_000)) for _ in range(rows)]
        again = backend.plan(Batch(list(range(rows + 1)), lens, table), launches[0])
        assert [launch.work.data_ptr() for launch in (again, *again.others)] == buffers
        assert ways_of(launches) == ways(eager, [(1, length) for length in lens])
    if not spec.sliding_window:
        with pytest.raises(BatchError, match="longer than a captured step"):
            backend.plan(Batch(list(range(rows + 1)), [300_000] * rows, table), launches[0])


@pytest.mark.slow
def test_the_kernels_give_the_same_bits_interpreted() -> None:
    """A few regroupings of uneven requests, each beside itself alone, and beside float64."""
    said = interpreted(Path(__file__).with_name("interpreted_alike.py"))
    assert said.split() == ["same", "bits"]
