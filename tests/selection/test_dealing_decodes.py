"""How decodes' keys are dealt out, and that only near predictions are looked at again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import backend
from polyattn import LayerSpec, select
from polyattn.selection.dealing import deal
from polyattn.selection.dealing_decodes import LISTED, even_splits
from polyattn.selection.prediction import Predictor
from polyattn.selection.step_choice import StepChoice
from polyattn.spec.timing import TERMS, TimingModel

PROCESSORS, NO_END = 132, 1 << 60
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
WIDE = LayerSpec(num_heads=12, num_kv_heads=2, head_size=256)
SMALL = LayerSpec(num_heads=24, num_kv_heads=24, head_size=128)


def steps(seed: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    source = random.Random(seed)
    for _ in range(200):
        count, mean = source.randint(1, 150), math.exp(source.uniform(3, 9))
        alike = source.random() < 0.4
        lens = [int(mean * (1 if alike else source.uniform(0.1, 3))) + 1 for _ in range(count)]
        yield np.array(lens, np.int64)


def counts(spec: LayerSpec, lens: np.ndarray[Any, Any], way: str) -> Any:
    seen = NO_END if spec.sliding_window is None else spec.sliding_window - 1
    return deal(spec, np.ones_like(lens), lens, seen)(way, PROCESSORS).exact()


@pytest.mark.parametrize("spec", [SPEC, WIDE, SMALL, SPEC.replace(sliding_window=1000)])
def test_stretches_are_triton_attns(spec: LayerSpec) -> None:
    """What its own planner says: whose rows are even, into how many parts, and a program's blocks."""
    schedule = pytest.importorskip("polyattn_triton.schedule")
    variants = pytest.importorskip("polyattn_triton.variants")
    wide, heads = spec.head_size > 128, spec.num_kv_heads
    block, slots = (32, 2 * PROCESSORS // heads) if wide else (64, 3 * PROCESSORS // heads)
    rates, listed, cut = schedule.Rates(item=1, least=2, merge=4), 0, 0
    for lens in steps(1):
        longest = int(lens.max())
        units = schedule.units_of_decodes(spec, lens, block, 1)
        line = schedule.Line.of_units(units, int(units.max()))
        made = counts(spec, lens, "whole")
        programs = len(lens) * heads
        if line.longest - 1 <= 1.1 * (line.total / len(lens) - 1) + 1:
            keys = min(longest, spec.sliding_window or longest)
            most = max(16, PROCESSORS // programs)
            splits = min(variants.even_splits(programs, PROCESSORS), most, math.ceil(keys / 128))
            assert even_splits(programs, PROCESSORS, keys) == splits
            if not variants.leaves_tail(programs * splits, PROCESSORS):
                assert made.rows * heads < LISTED and (made.rows > 0) == (splits > 1)
                continue
        dealt = schedule.stretches(line, slots, rates)
        listed, cut = listed + 1, cut + (dealt.parts > 1)
        assert made.longest == dealt.share * block
        assert (made.rows * heads > LISTED) == (dealt.parts > 1)
    assert 0 < cut < listed


@pytest.mark.parametrize(
    ("group", "fields", "on_one", "at_once", "weight"),
    [
        # Threads of a key, of which a program has 128 at the least: 16 of 128 elements, 8 of 64 and of 8
        # bits, 32 of 256. Where a group is one head, each thread loads four keys, of 8 bits two.
        (1, {}, 6, 8 * 4, 3),
        (2, {}, 9, 4 * 2, 2),
        (3, {}, 9, 2 * 3, 2),
        (2, {"head_size": 64}, 9, 8 * 2, 2),
        (3, {"head_size": 64}, 9, 5 * 3, 2),
        (1, {"head_size": 256}, 6, 4 * 4, 3),
        (2, {"head_size": 256}, 9, 2 * 2, 2),
        (1, {"kv_cache_dtype": "fp8_e4m3"}, 6, 16 * 2, 3),
        (2, {"kv_cache_dtype": "fp8_e4m3"}, 7, 8 * 2, 2),
    ],
)
def test_pieces_on_cuda_cores_are_the_shortest_with_room(
    group: int, fields: dict[str, Any], on_one: int, at_once: int, weight: int
) -> None:
    """FlashInfer's `PartitionPagedKVCacheBinarySearchMinNumPagePerBatch`, and its kernel's tiles of keys.

    `on_one`: programs that a processor holds, by the registers that cuobjdump shows. 70 rows of 32/16
    heads, one of 28,840 keys and others of 418, are cut, 76 rows aren't: 311 and 636 us on an H200.
    """
    spec, cut = SMALL.replace(num_heads=24 * group, num_kv_heads=24, **fields), 0
    room = on_one * PROCESSORS // 24
    for lens in steps(2):
        pages = [math.ceil(n / 16) for n in lens]
        limit = max(pages)
        if len(lens) < room:
            fits = (c for c in range(8, limit) if sum(math.ceil(p / c) for p in pages) <= room)
            limit = next(fits, limit)
        pieces = sum(math.ceil(p / limit) for p in pages)
        made = counts(spec, lens, "heads")
        assert made.kind == "cores" and made.longest == math.ceil(limit * 16 / at_once) * weight
        assert (made.rows > 0) == (pieces > len(lens))
        assert made.pairs == pieces * 64 // spec.gqa_ratio
        cut += pieces > len(lens)
    assert 0 < cut < 200


def test_flash_attentions_programs_look_through_rows_31_at_a_time() -> None:
    few, many = (counts(SPEC, np.full(n, 200), "cut") for n in (30, 64))
    assert (few.rows, many.rows * 8) == (0, 4)


def model(name: str, kind: str, us: float, deal: str = "") -> TimingModel:
    values = tuple(us if term == "launch" else 0.0 for term in TERMS)
    return TimingModel(name, kind, values, deal=deal, processors=PROCESSORS if deal else 0)


@pytest.mark.parametrize(
    ("second", "deal", "graph", "name"),
    [(12, "cut", 0, "B"), (13, "cut", 0, "A"), (12, "", 0, "A"), (12, "cut", 1, "A")],
)
def test_predictions_that_are_near_are_looked_at_again(
    second: float, deal: str, graph: int, name: str
) -> None:
    """Unless the step is captured: its keys are dealt out in another way."""
    spec = SPEC.replace(graph_capture=graph)
    models = [model("A", "decode", 10), model("B", "decode", second), model("C", "decode", 90)]
    if deal:
        models += [model("A", "dealt", 30, deal), model("B", "dealt", 20, deal)]
    members = {n: backend(n, phases=frozenset({"prefill", "decode"})) for n in "ABC"}
    phases = {"decode": members, "prefill": members}
    choice = StepChoice(spec, models, phases, {"prefill": "A", "decode": "A"})
    lens = [900, 80]
    (call,) = choice.calls([1, 1], lens)
    assert choice.decode(lens) == call.name == name
    assert call.times["C"] == 90


GEMMA = {"head_size": 256, "sliding_window": 4096, "logit_soft_cap": 50.0}
TRITON, FLASH, FI = "TRITON_ATTN", "FLASH_ATTN_V3", "FLASHINFER"


@pytest.mark.parametrize(
    ("heads", "fields", "lens", "us"),
    [
        # One row of few KV heads, of which both libraries cut keys.
        ((6, 2), GEMMA, [12000], {TRITON: 16.1, FLASH: 24.4}),
        ((10, 2), GEMMA, [23269], {TRITON: 16.6, FLASH: 24.2}),
        # 78 rows of four KV heads are 312 tiles of FlashAttention-3 on 132 processors: three turns.
        ((52, 4), {"sliding_window": 2048}, [8865] * 78, {TRITON: 91.4, FI: 106.6, FLASH: 126.1}),
        # Groups of three heads on CUDA cores, and of one.
        ((3, 1), {}, [5000] * 2, {TRITON: 14.7, FI: 19.2}),
        ((36, 36), {"head_size": 64}, [70] * 19, {FI: 17.1, TRITON: 18.7}),
    ],
)
def test_what_decodes_take_on_an_h200(
    heads: tuple[int, int], fields: dict[str, Any], lens: list[int], us: dict[str, float]
) -> None:
    fields = {"head_size": 128} | fields
    spec = LayerSpec(num_heads=heads[0], num_kv_heads=heads[1], **fields)
    selection = select(spec, "h200")
    predictor = Predictor(spec, [m for m in selection.timings if not m.windowless])
    shape = predictor.shape("dealt", [1] * len(lens), lens)
    times = predictor.evaluate(predictor.among("dealt", us), shape)
    assert times == pytest.approx(us, rel=0.12)
    assert min(times, key=times.__getitem__) == min(us, key=us.__getitem__)
