"""What a captured graph reads, `build` plans into: the plans of the capture, padding rows and all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from polyattn import PolyattnError
from polyattn.errors import SelectionError
from polyattn_vllm.attention import PolyattnBackend
from polyattn_vllm.mla import PolyattnMLABackend, PolyattnMLAImpl
from polyattn_vllm.step import Builder
from steps import HEADS, LONGEST, ROWS, SIZE, Runner, random_step
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec


def test_graphs_hold_uniform_steps_where_there_are_graphs(monkeypatch: Any) -> None:
    config, plain, latent = (
        object.__new__(kind) for kind in (object, AttentionSpec, MLAAttentionSpec)
    )

    def support(spec: Any) -> AttentionCGSupport:
        return Builder.get_cudagraph_support(config, spec)  # type: ignore[arg-type]

    assert support(plain) is AttentionCGSupport.NEVER
    monkeypatch.setattr("polyattn_vllm.step.current_platform.is_cpu", lambda: False)
    assert support(plain) is AttentionCGSupport.UNIFORM_BATCH
    assert support(latent) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize(
    "support, drafts, resolved",
    [("UNIFORM_BATCH", 3, "FULL_AND_PIECEWISE"), ("UNIFORM_SINGLE_TOKEN_DECODE", 3, "PIECEWISE")],
)
def test_vllm_leaves_mixed_steps_out_of_full_graphs(
    support: str, drafts: int, resolved: str, monkeypatch: Any
) -> None:
    """`ALWAYS` isn't claimed: of a wanted FULL vLLM makes what the claim allows, and warns by name."""
    config = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL, mode=CompilationMode.VLLM_COMPILE)
    config.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    config.cudagraph_mode, told = CUDAGraphMode.FULL, []
    monkeypatch.setattr(
        "vllm.config.compilation.logger.warning", lambda text, *a: told.append(text)
    )
    config.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport[support], "PolyattnBackend", 1 + drafts, is_profiling=True
    )
    assert config.cudagraph_mode.name == resolved
    assert "FULL is not supported with PolyattnBackend backend" in told[0]


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "EXAMPLE_ATTN"])
def test_drafts_are_planned_into_the_captured_plans(backend: str, monkeypatch: Any) -> None:
    """Steps of 1 + 3 tokens a request; the second backend takes no padding of so many without keys."""
    monkeypatch.setenv("POLYATTN_BACKEND", backend)
    runner, each = Runner("cpu", torch.float32, graphs=False, drafts=3), 4
    builder = runner.builder
    (group,) = builder.groups.values()
    empty, captured = torch.zeros(ROWS, 1, dtype=torch.int32), {}
    for size in (8, 4):
        common = runner.step([each] * size, size, empty[:size], each)
        captured[size] = builder.build_for_cudagraph_capture(common).plans[group]
    pads = group.planner.padding_rows
    assert pads == (backend == "TORCH_SDPA")
    reused: list[Any] = []
    plan = group.plan
    monkeypatch.setattr(
        group, "plan", lambda b, reuse=None: (reused.append(reuse), plan(b, reuse))[1]
    )
    for rows, padded in ((3, 4), (5, 8), (4, 4), (1, 4), (8, 8)):
        lens, table = random_step(rows, each)
        step = builder.build(0, runner.step(lens, padded, table, each))
        batch = step.plans[group].batch
        assert reused[-1] is captured[padded] and batch.num_tokens == padded * each
        assert batch.lens == lens + [0 if pads else each] * (padded - rows)
        assert batch.seq_lens.tolist() == batch.lens
        assert batch.query_start_loc is builder.captured[padded, each].starts
        query = torch.randn(padded * each, HEADS, SIZE)
        found = runner.attend(query, step)[: rows * each]
        expected = runner.expected(query, lens, table, each)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    # The draft model's own steps, of one token a request, have plans of their own.
    single = builder.build_for_cudagraph_capture(runner.step([1] * 4, 4, empty[:4]))
    assert reused[-1] is None and single.plans[group].batch.all_decode


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


@pytest.mark.parametrize("cache", ["fp8_e4m3"])
def test_a_scale_for_each_head(cache: str) -> None:
    """As compressed-tensors' strategy `attn_head` leaves them on a layer."""
    scales = torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25])
    runner = Runner("cpu", torch.float32, graphs=False, scales=scales, kv_cache_dtype=cache)
    (group,) = runner.builder.groups.values()
    assert group.spec.scales == "head"
    lens, table = random_step(ROWS)
    query = torch.randn(ROWS, HEADS, SIZE)
    found = runner.attend(query, runner.builder.build(0, runner.step(lens, ROWS, table)))
    expected = runner.expected(query, lens, table)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_prefix_language_model_sees_its_whole_prompt() -> None:
    """HRM-Text: vLLM says of its cache that it isn't causal, and of each step."""
    runner, each = Runner("cpu", torch.float32, graphs=False, causal=False, drafts=3), 4
    lens, table = random_step(ROWS, each)
    query = torch.randn(ROWS * each, HEADS, SIZE)
    found = runner.attend(query, runner.builder.build(0, runner.step(lens, ROWS, table, each)))
    expected = runner.expected(query, lens, table, each)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_step_that_is_not_causal_is_refused_of_layers_that_are() -> None:
    runner = Runner("cpu", torch.float32, graphs=False)
    runner.causal = False
    with pytest.raises(PolyattnError, match="non_causal_steps is given"):
        runner.builder.build(0, runner.step([4], 1, torch.zeros(1, 1, dtype=torch.int32)))


def test_who_serves_no_graph_is_refused_with_the_remedy() -> None:
    with pytest.raises(SelectionError, match="PIECEWISE"):
        Runner("cpu", torch.float32, graphs=True)


def test_who_reads_another_layout_is_refused_with_the_remedy(monkeypatch: Any) -> None:
    builder = Runner("cpu", torch.float32, graphs=False).builder
    monkeypatch.setattr("polyattn_vllm.step.layout_of", lambda config: "HND")
    monkeypatch.setenv("POLYATTN_BACKEND", "EXAMPLE_ATTN")
    with pytest.raises(SelectionError, match="POLYATTN_LAYOUT=NHD makes it choose NHD"):
        Builder(builder.kv_cache_spec, ["layer"], builder.vllm_config, torch.device("cpu"))


@pytest.mark.parametrize(
    "part, name, value, told",
    [
        ("model_config", "is_mm_prefix_lm", True, "bidirectional_spans_of_images"),
        ("model_config", "rswa_window", 64, "rswa_window"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
        ("", "diffusion_config", object(), "diffusion_config"),
    ],
)
def test_what_no_step_can_be_is_refused_before_the_engine_is_up(
    part: str, name: str, value: Any, told: str
) -> None:
    """Where vLLM lets a backend be chosen, it asks `supports_*`; on a CPU it doesn't."""
    builder = Runner("cpu", torch.float32, graphs=False).builder
    config = builder.vllm_config
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(PolyattnError, match=f"{told} is given"):
        Builder(builder.kv_cache_spec, ["layer"], builder.vllm_config, torch.device("cpu"))


def test_layers_that_latents_do_not_serve_are_refused_as_they_are_made() -> None:
    """Sparse MLA's indexer, and scales of each head; on a CPU vLLM asks no backend of them."""
    sizes: dict[str, Any] = {
        "num_heads": 4, "head_size": 576, "scale": 1.0, "num_kv_heads": 1, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_head_dim": 96, "v_head_dim": 32,
    }  # fmt: skip
    with pytest.raises(PolyattnError, match="indexer is given"):
        PolyattnMLAImpl(**sizes, kv_cache_dtype="auto", indexer=object())
    with pytest.raises(PolyattnError, match="kv_cache_dtype=fp8_ds_mla"):
        PolyattnMLAImpl(**sizes, kv_cache_dtype="fp8_ds_mla")
    builder = Runner("cpu", torch.float32, graphs=False).builder
    layer = SimpleNamespace(
        impl=PolyattnMLAImpl(**sizes, kv_cache_dtype="fp8"), _k_scale=torch.ones(4)
    )
    with pytest.raises(PolyattnError, match="scales='head'"):
        builder._spec(layer)


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
        for told in ("partial multimodal", "sparse not"):
            assert told in reasons, reasons
        assert ("per-head quant scales" in reasons) == backend.is_mla()
