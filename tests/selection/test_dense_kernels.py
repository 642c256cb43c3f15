"""Dense kernels that torch calls, and steps within a layer's window: what is counted, who is chosen."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from heapq import heapreplace
from itertools import groupby

import numpy as np
import pytest
from fakes import backend
from polyattn import LayerSpec
from polyattn.registry.devices import resolve_device
from polyattn.registry.timings import Entry, Timings, TimingTable, class_of_step, layer_class
from polyattn.selection.dealing import deal
from polyattn.selection.step_choice import StepChoice
from polyattn.settings import current_settings
from polyattn.spec.timing import TERMS, TimingModel

PROCESSORS, NO_END = 132, 1 << 60
SPEC = LayerSpec(num_heads=24, num_kv_heads=8, head_size=120)
Rows = list[tuple[int, int]]


def ended(costs: list[int], processors: int) -> int:
    """When the last of some tiles ends: each goes to the processor that is free first."""
    loads = [0] * processors
    for cost in costs:
        heapreplace(loads, loads[0] + cost)
    return max(loads)


def called(rows: Rows) -> tuple[float, int, int]:
    """Blocks of 128 x 64 that the fullest processor has of each dense call, summed; calls, contexts."""
    blocks, calls, contexts = 0, 0, 0
    for (q, n), same in groupby(rows):
        times = len(list(same)) * SPEC.num_heads
        tiles = range(math.ceil(q / 128))
        own = [math.ceil(min(q, (tile + 1) * 128) / 64) + 1 for tile in tiles]
        blocks, calls = blocks + ended(own * times, PROCESSORS), calls + 1
        if n > q:
            every = [math.ceil((n - q) / 64) + 1] * len(tiles) * times
            blocks, contexts = blocks + ended(every, PROCESSORS), contexts + 1
    return blocks, calls, contexts


def dealt(way: str, rows: Rows, spec: LayerSpec = SPEC) -> tuple[float, float, str]:
    q, n = np.array(rows).T
    seen = NO_END if spec.sliding_window is None else spec.sliding_window - 1
    counts = deal(spec, q, n, seen)(way, PROCESSORS).exact()
    return counts.pairs * spec.num_heads / PROCESSORS / 128 / 64, counts.rows * 8, counts.kind


def test_calls_of_equal_lengths_follow_one_another() -> None:
    source = random.Random(5)
    off = []
    for _ in range(120):
        some: Rows = []
        for _ in range(source.randint(1, 4)):
            q = int(math.exp(source.uniform(3, 8)))
            context = source.choice((0, int(math.exp(source.uniform(3, 9)))))
            some += [(q, q + context)] * source.randint(1, 3)
        blocks, calls, contexts = called(some)
        mine, items, _ = dealt("runs", some)
        assert items == pytest.approx(calls + 3 * contexts)
        off.append(mine / blocks)
    # Which processor is the last one is estimated, of more tiles than there are processors.
    assert min(off) > 0.8 and max(off) < 1.3 and abs(np.mean(np.log(off))) < 0.06
    few = [(128, 128)] * 2 + [(100, 400)]
    assert dealt("runs", few)[0] == pytest.approx(called(few)[0], abs=0.01)
    # Neighbours of equal lengths share a call, others wait for one another.
    alike, apart = [(300, 300)] * 4 + [(200, 200)] * 4, [(300, 300), (200, 200)] * 4
    assert dealt("runs", apart)[0] > 1.5 * dealt("runs", alike)[0]


def test_torchs_prompts_of_one_length_run_another_kernel() -> None:
    alike, ragged, chunks = [(500, 500)] * 6, [(500, 500)] * 5 + [(499, 499)], [(500, 900)] * 6
    assert dealt("packed", alike) == (*dealt("runs", alike)[:2], "prefill")
    assert dealt("packed", ragged)[2] == "ragged" and dealt("packed", chunks)[2] == "chunked"
    tiles = [min(500 - first, 128) + first for first in range(0, 500, 128)]
    blocks = [math.ceil(n / 64) + 1 for n in tiles] * 6 * SPEC.num_heads
    assert dealt("packed", ragged)[0] / 2 == pytest.approx(ended(blocks, 2 * PROCESSORS), rel=0.1)
    # With a window torch has one kernel, and the window's keys alone count.
    near = SPEC.replace(sliding_window=256)
    assert dealt("packed", alike, near)[2] == "ragged"
    assert dealt("packed", chunks, near)[0] < 0.6 * dealt("packed", chunks)[0]


def model(name: str, kind: str, us: float) -> TimingModel:
    return TimingModel(name, kind, tuple(us * (term == "launch") for term in TERMS))


DROPS, KEEPS = "TRITON_ATTN", "FLASHINFER"
NEAR = SPEC.replace(sliding_window=1000)


def table() -> Timings:
    """TRITON_ATTN takes 10 us, in a windowed layer 90; FLASHINFER 50."""
    plain, near = (tuple(sorted(layer_class(spec).items())) for spec in (SPEC, NEAR))
    entries = []
    for kind in ("decode", "prefill", "chunked"):
        entries.append(Entry(plain, model(DROPS, kind, 10)))
        entries.append(Entry(near, model(DROPS, kind, 90)))
        entries.append(Entry(plain, model(KEEPS, kind, 50)))
    device = resolve_device("h200", current_settings())
    return Timings((TimingTable("", "cuda", "sm_90", device.name, "", tuple(entries)),))


@pytest.mark.parametrize(
    ("changes", "within"),
    [({}, True), ({"graph_capture": "uniform"}, False), ({"length_bounds": True}, False)],
    ids=["planned", "captured", "bounds"],
)
def test_a_step_within_the_window_is_timed_without_it(
    changes: dict[str, object], within: bool
) -> None:
    spec = NEAR.replace(**changes)
    models = table().models(spec, resolve_device("h200", current_settings()))
    phases = ("decode", "prefill")
    both = {n: backend(n, phases=frozenset(phases)) for n in (DROPS, KEEPS)}
    choice = StepChoice(spec, models, dict.fromkeys(phases, both), dict.fromkeys(phases, KEEPS))
    for longest in (999, 1000, 1001):
        name = DROPS if within and longest <= 1000 else KEEPS
        for queries in (1, 300, longest):
            rows = [queries, 1], [longest, 1]
            if queries > 1:
                rows = [queries], [longest]
            (call,) = choice.calls(*rows)
            assert call.name == name, (queries, longest)
        assert choice.decode([longest, 3]) == choice.decode([longest, 3], longest) == name
    # A layer without a window is none of this.
    assert not any(
        m.windowless for m in table().models(SPEC, resolve_device("h200", current_settings()))
    )


def test_a_call_of_a_mixed_step_is_within_the_window_by_itself() -> None:
    """A decode behind 12,972 keys and two prompts of 159 take TRITON_ATTN 21.0 us in two calls, which
    34.1 were predicted for by the windowed prefill (25/5 heads of 64, window 1,024, H200)."""
    models = table().models(NEAR, resolve_device("h200", current_settings()))
    phases = ("decode", "prefill")
    both = {n: backend(n, phases=frozenset(phases)) for n in (DROPS, KEEPS)}
    choice = StepChoice(NEAR, models, dict.fromkeys(phases, both), dict.fromkeys(phases, KEEPS))
    for keys, own, names in (
        (5000, 300, [KEEPS, DROPS]),
        (300, 5000, [DROPS, KEEPS]),
        (5000, 5000, [KEEPS, KEEPS]),
        (300, 300, [DROPS, DROPS]),
    ):
        assert [call.name for call in choice.calls([1, 300], [keys, own])] == names


def test_a_step_within_the_window_is_fitted_without_it() -> None:
    for name, longest, plain in ((DROPS, 1000, True), (DROPS, 1001, False), (KEEPS, 1000, False)):
        assert class_of_step(NEAR, name, longest) == layer_class(SPEC if plain else NEAR)
    captured = replace(NEAR, graph_capture=NEAR.graph_capture)
    assert class_of_step(captured, DROPS, 5) == layer_class(SPEC)
