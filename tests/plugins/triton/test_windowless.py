"""A layer whose window hides nothing in a step runs as the layer without one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from chips import h200
from interpreting import interpreted
from polyattn import Batch, Device, LayerSpec
from polyattn.selection.cache_format import format_of

pytest.importorskip("triton")
H200 = Device(platform="cuda", arch="sm_90", torch_device="cpu")
LAYER = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
WIDTH = 1024
WINDOW = LAYER.replace(sliding_window=WIDTH)


@cache
def told() -> dict[str, str]:
    """Return by layer, step and longest sequence what ran, each compared with float64's answer."""
    lines = interpreted(Path(__file__).with_name("windowless.py"), seconds=600).splitlines()
    return dict(line.split(": ") for line in lines)  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    ["window", "chunks", "both", "sink tokens", "ALiBi, cap", "turned", "not causal", "encoder"],
)
def test_a_window_is_left_out_up_to_its_width(name: str) -> None:
    all_ways = told().items()
    mine = {s: way for s, way in all_ways if s.startswith(f"{name}, ") and "NaN" not in s}
    assert len(mine) in (4, 12)
    for step, way in mine.items():
        assert way == ("none" if int(step.rpartition(" ")[2]) <= 37 else "window"), step


def test_shared_blocks_are_read_without_it_too() -> None:
    ways = [told()[f"shared, within {window}"] for window in (115, 114)]
    assert ways == ["none", "window"]


@pytest.mark.parametrize("name", ["sink tokens", "turned"])
def test_nothing_between_kept_tokens_and_the_window_reaches_an_output(name: str) -> None:
    ways = [way for step, way in told().items() if step.startswith(f"{name}, NaN between")]
    assert ways == ["decode", "few", "prefill"]


@pytest.mark.parametrize("name", ["captured", "bounds", "alike"])
def test_a_window_stays_where_other_lengths_may_come_or_bits_count(name: str) -> None:
    ways = [way for step, way in told().items() if step.startswith(f"{name}, ")]
    assert ways and set(ways) == {"window"}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan as on an H200; nothing runs."""
    from polyattn_triton import launch
    from polyattn_triton.attention import TritonAttention

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
