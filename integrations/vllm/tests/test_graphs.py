"""What a captured graph reads, `build` plans into: the plans of the capture, padding rows and all."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from polyattn.errors import SelectionError
from polyattn_vllm.step import Builder
from steps import HEADS, LONGEST, ROWS, SIZE, Runner, random_step
from vllm.v1.attention.backend import AttentionCGSupport


def test_graphs_hold_steps_of_one_token_where_there_are_graphs(monkeypatch: Any) -> None:
    spec, config = object(), object()
    assert Builder.get_cudagraph_support(config, spec) is AttentionCGSupport.NEVER  # type: ignore[arg-type]
    monkeypatch.setattr("polyattn_vllm.step.current_platform.is_cpu", lambda: False)
    found = Builder.get_cudagraph_support(config, spec)  # type: ignore[arg-type]
    assert found is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_steps_are_planned_into_the_captured_plans(monkeypatch: Any) -> None:
    runner = Runner("cpu", torch.float32, graphs=False)
    builder = runner.builder
    (group,) = builder.groups.values()
    planned: list[tuple[Any, Any]] = []
    plan = group.plan

    def noted(batch: Any, reuse: Any = None) -> Any:
        planned.append((batch, reuse))
        return plan(batch, reuse)

    monkeypatch.setattr(group, "plan", noted)
    captured = {}
    for size in (8, 4):
        common = runner.step([1] * size, size, torch.zeros(size, 1, dtype=torch.int32))
        captured[size] = builder.build_for_cudagraph_capture(common)
        assert planned[-1][0].lens == [LONGEST] * size and planned[-1][1] is None
    for rows, padded in ((3, 4), (5, 8), (4, 4), (1, 4), (8, 8)):
        lens, table = random_step(rows)
        step = builder.build(0, runner.step(lens, padded, table))
        batch, reuse = planned[-1]
        assert reuse is captured[padded].plans[group]
        assert batch.all_decode and batch.lens == lens + [0] * (padded - rows)
        assert batch.seq_lens.data_ptr() == runner.lens.data_ptr()
        query = torch.randn(padded, HEADS, SIZE)
        found = runner.attend(query, step)[:rows]
        torch.testing.assert_close(
            found.double(), runner.expected(query, lens, table), rtol=1e-5, atol=1e-5
        )
    # Captured again, as vLLM's dummy runs do: into the same plans.
    builder.build_for_cudagraph_capture(
        runner.step([1] * 4, 4, torch.zeros(4, 1, dtype=torch.int32))
    )
    assert planned[-1][1] is captured[4].plans[group]


def test_layers_named_later_are_attached() -> None:
    """A draft model's proposer gives its builder one layer's name and adds the others later."""
    runner = Runner("cpu", torch.float32, graphs=False)
    builder, later = runner.builder, Runner("cpu", torch.float32, graphs=False, sliding_window=40)
    builder.vllm_config.compilation_config.static_forward_context["later"] = later.layer
    builder.layer_names.append("later")
    lens, table = random_step(ROWS)
    step = builder.build(0, runner.step(lens, ROWS, table))
    query = torch.randn(ROWS, HEADS, SIZE)
    for each in (runner, later):
        found, expected = each.attend(query, step), each.expected(query, lens, table)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_other_steps_have_plans_of_their_own() -> None:
    runner = Runner("cpu", torch.float32, graphs=False, sliding_window=40)
    builder = runner.builder
    builder.build_for_cudagraph_capture(
        runner.step([1] * 4, 4, torch.zeros(4, 1, dtype=torch.int32))
    )
    lens, table = random_step(ROWS - 2)
    step = builder.build(
        0, runner.step(lens, ROWS - 2, table)
    )  # a size that nothing was captured of
    query = torch.randn(ROWS - 2, HEADS, SIZE)
    found = runner.attend(query, step)
    torch.testing.assert_close(
        found.double(), runner.expected(query, lens, table), rtol=1e-5, atol=1e-5
    )


def test_who_serves_no_graph_is_refused_with_the_remedy() -> None:
    with pytest.raises(SelectionError, match="PIECEWISE"):
        Runner("cpu", torch.float32, graphs=True)
