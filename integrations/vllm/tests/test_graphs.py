"""What a captured graph reads, `build` plans into: the plans of the capture, padding rows and all."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from polyattn import PolyattnError
from polyattn.errors import SelectionError
from polyattn_vllm.attention import PolyattnBackend
from polyattn_vllm.mla import PolyattnMLABackend
from polyattn_vllm.step import Builder
from steps import HEADS, LONGEST, ROWS, SIZE, Runner, random_step
from vllm.platforms.interface import DeviceCapability
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


@pytest.mark.parametrize(
    "part, name, value, told",
    [
        ("model_config", "is_mm_prefix_lm", True, "bidirectional_spans_of_images"),
        (
            "parallel_config",
            "decode_context_parallel_size",
            2,
            "decode_context_parallel_size is given",
        ),
    ],
)
def test_what_no_step_can_be_is_refused_before_the_engine_is_up(
    part: str, name: str, value: Any, told: str
) -> None:
    """Where vLLM lets a backend be chosen, it asks `supports_*`; on a CPU it doesn't."""
    builder = Runner("cpu", torch.float32, graphs=False).builder
    setattr(getattr(builder.vllm_config, part), name, value)
    with pytest.raises(PolyattnError, match=told):
        Builder(builder.kv_cache_spec, ["layer"], builder.vllm_config, torch.device("cpu"))


def test_where_a_backend_is_chosen_vllm_names_what_is_not_served() -> None:
    config: dict[str, Any] = dict.fromkeys(
        ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse",
         "use_mm_prefix", "use_per_head_quant_scales", "attn_type"),
    )  # fmt: skip
    config |= {
        "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "use_sparse": True, "use_mm_prefix": True, "attn_type": "decoder",
        "use_per_head_quant_scales": True, "device_capability": DeviceCapability(9, 0),
    }  # fmt: skip
    for backend in (PolyattnBackend, PolyattnMLABackend):
        reasons = "; ".join(backend.validate_configuration(**config))
        for told in ("partial multimodal", "per-head quant scales", "sparse not"):
            assert told in reasons, reasons
