"""A layer whose window hides nothing in a step runs as the layer without one.

As a program it runs steps about as long as a window, interpreted, beside the float64 reference; it prints
each, and whether the layer ran without its window.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from chips import h200
from interpreting import interpreted
from polyattn import Batch, Device, LayerSpec, RopeSpec
from polyattn.conformance.case import Case
from polyattn.conformance.checks.forests import _backend, _run, forest
from polyattn.conformance.harness.base import Harness
from polyattn.selection.cache_format import format_of

pytest.importorskip("triton")
from polyattn_triton import launch
from polyattn_triton.attention import TritonAttention
from polyattn_triton.prefix import PrefixPlan

DEVICE = Device("cpu", "x86_64", torch_device="cpu")
BASE = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", needs_lse=True, block_size=16
)
TURNED = RopeSpec(rotary_size=32, base=100.0, positions="cache")
NARROW = 37
LAYERS = {
    "window": BASE.replace(sliding_window=NARROW),
    "chunks": BASE.replace(chunk_size=NARROW),
    "both": BASE.replace(sliding_window=NARROW, chunk_size=50),
    "sink tokens": BASE.replace(sliding_window=NARROW, sink_tokens=3, learned_sinks=True),
    "ALiBi, cap": BASE.replace(sliding_window=NARROW, alibi=True, logit_soft_cap=1.5),
    "turned": BASE.replace(sliding_window=NARROW, sink_tokens=3, rope=TURNED),
    "not causal": BASE.replace(sliding_window=NARROW, causal=False),
    "encoder": BASE.replace(
        sliding_window=NARROW, causal=False, role="encoder_only", block_size=None
    ),
    "keys of the call": BASE.replace(
        sliding_window=NARROW, causal=False, cached=False, block_size=None
    ),
    "chunks both ways": BASE.replace(
        chunk_size=NARROW, causal=False, cached=False, block_size=None
    ),
    "captured": BASE.replace(sliding_window=NARROW, graph_capture="uniform"),
    "bounds": BASE.replace(sliding_window=NARROW, length_bounds=True),
    "alike": BASE.replace(sliding_window=NARROW, batch_invariant=True),
}
GONE = ("window", "chunks", "both", "not causal", "sink tokens", "turned")
"""Layers whose cache has NaN where no query looks."""


def steps(longest: int, cached: bool) -> dict[str, list[tuple[int, int]]]:
    """Return steps whose longest sequence has so many keys, or queries that begin before them."""
    if not cached:
        return {"encoded": [(longest, longest), (5, 5), (1, 1)], "queries": [(longest, 9), (5, 2)]}
    return {
        "decodes": [(1, longest), (1, 0), (1, 9)],
        "prompts": [(longest, longest), (20, 20)],
        "chunk": [(30, longest), (0, 7), (1, 1)],
    }


def share(window: int) -> None:
    """Decode rows that share blocks, the longest of 115 keys."""
    spec, plan = BASE.replace(sliding_window=window), TritonAttention.plan
    plans = []

    def planned(self, *step):  # type: ignore[no-untyped-def]
        plans.append(plan(self, *step))
        return plans[-1]

    TritonAttention.plan = planned  # type: ignore[method-assign]
    forest(Case("forest", "", spec, "one run"), Harness("TRITON_ATTN", DEVICE, 7))
    TritonAttention.plan = plan  # type: ignore[method-assign]
    assert isinstance(plans[-1], PrefixPlan)
    print(f"shared, within {window}: {'none' if plans[-1].windowless else 'window'}", flush=True)


def gone(name: str) -> None:
    """Attend where the cache holds NaN at all that no query of a sequence sees."""
    spec = LAYERS[name]
    harness = Harness("TRITON_ATTN", DEVICE, 7)
    layer = harness.layer(spec)
    backend = _backend(layer)
    for step in ([(1, 300), (1, 70)], [(4, 260), (3, 77)], [(70, 170), (5, 90), (40, 40)]):
        work = harness.step(layer, step).remembered()
        cache, table = work.held, work.batch.block_table
        for row, (queries, length) in enumerate(step):
            first = length - queries
            seen = first // spec.chunk_size * spec.chunk_size if spec.chunk_size else 0
            if spec.sliding_window:
                seen = max(seen, first - spec.sliding_window + 1)
            for key in range(spec.sink_tokens, seen):
                for rows in (cache.key, cache.value):
                    rows[table[row, key // 16], key % 16] = torch.nan
        plan = backend.plan(work.batch)
        _run(work, plan, f"{name}, NaN between: ")
        print(f"{name}, NaN between, {step}: {plan.way}", flush=True)


H200 = Device(platform="cuda", arch="sm_90", torch_device="cpu")
LAYER = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
WIDTH = 1024
WINDOW = LAYER.replace(sliding_window=WIDTH)


@cache
def told() -> dict[str, str]:
    """Return by layer, step and longest sequence what ran, each compared with float64's answer."""
    lines = interpreted(__file__, seconds=600).splitlines()
    return dict(line.split(": ") for line in lines)  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        "window",
        "chunks",
        "both",
        "sink tokens",
        "ALiBi, cap",
        "turned",
        "not causal",
        "encoder",
        "keys of the call",
    ],
)
def test_a_window_is_left_out_up_to_its_width(name: str) -> None:
    all_ways = told().items()
    mine = {s: way for s, way in all_ways if s.startswith(f"{name}, ") and "NaN" not in s}
    assert len(mine) in (8, 12)
    for step, way in mine.items():
        assert way == ("none" if int(step.rpartition(" ")[2]) <= 37 else "window"), step


def test_shared_blocks_are_read_without_it_too() -> None:
    ways = [told()[f"shared, within {window}"] for window in (115, 114)]
    assert ways == ["none", "window"]


@pytest.mark.parametrize("name", GONE)
def test_nothing_between_kept_tokens_and_what_is_seen_reaches_an_output(name: str) -> None:
    ways = [way for step, way in told().items() if step.startswith(f"{name}, NaN between")]
    assert ways == ["decode", "few", "prefill"]


@pytest.mark.parametrize("name", ["captured", "bounds", "alike", "chunks both ways"])
def test_a_window_stays_where_other_lengths_may_come_or_bits_count(name: str) -> None:
    ways = [way for step, way in told().items() if step.startswith(f"{name}, ")]
    assert ways and set(ways) == {"window"}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan as on an H200; nothing runs."""
    monkeypatch.setattr(launch, "facts", h200(132))
    layers: dict[LayerSpec, Any] = {}

    def plan(spec: LayerSpec, queries: list[int], lens: list[int]) -> Any:
        if spec not in layers:
            layers[spec] = TritonAttention(spec, format_of(spec, H200, "NHD", 64), H200)
        starts = torch.tensor([0, *queries]).cumsum(0).tolist()
        table = torch.zeros(len(lens), -(-max(lens) // 64), dtype=torch.int32)
        return layers[spec].plan(Batch(starts, lens, table))

    return plan


STEPS = {
    "decodes": ([1] * 40, [WIDTH, *range(1, 40)]),
    "few decodes": ([1] * 2, [WIDTH, WIDTH - 1]),
    "drafts": ([4] * 8, [WIDTH] * 8),
    "prompts": ([WIDTH, 200], [WIDTH, 200]),
    "chunk": ([512, 1], [WIDTH, 40]),
}


@pytest.mark.parametrize(
    "changes", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"head_size": 64}], ids=str
)
@pytest.mark.parametrize("step", STEPS)
def test_its_plan_is_that_of_the_layer_without_a_window(
    planned: Any, step: str, changes: dict[str, Any]
) -> None:
    queries, lens = STEPS[step]
    plain, mine = (planned(s.replace(**changes), queries, lens) for s in (LAYER, WINDOW))
    assert mine.windowless and not plain.windowless
    for field in ("way", "config", "grid", "variant", "splits", "at_once"):
        assert getattr(mine, field) == getattr(plain, field)
    assert torch.equal(mine.work, plain.work)
    longer = planned(WINDOW.replace(**changes), queries, [n + 1 for n in lens])
    assert not longer.windowless


def test_plans_of_both_kinds_are_in_one_workspace(planned: Any) -> None:
    """Layers of one stream run one after another."""
    short, long = (planned(WINDOW, [1] * 3, [n] * 3) for n in (WIDTH, 9000))
    assert short.windowless and not long.windowless
    assert short.kept.tensors[0].data_ptr() == long.kept.tensors[0].data_ptr()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in GONE:
        gone(name)
    share(115)
    share(114)
    for name, spec in LAYERS.items():
        harness = Harness("TRITON_ATTN", DEVICE, 7)
        layer = harness.layer(spec)
        for longest in (NARROW - 1, NARROW, NARROW + 1, 2 * NARROW):
            for step, lengths in steps(longest, spec.cached).items():
                work = harness.step(layer, lengths)
                work.check(f"{name}, {step} of {longest}: ")
                # The longest sequence's: a step's decodes and its prompts are planned apart.
                some = [call.plan for call in work.plan.calls]
                plan = max(some, key=lambda plan: plan.batch.max_seq_len)
                way = "none" if plan.windowless else "window"
                print(f"{name}, {step} of {longest}: {way}", flush=True)
