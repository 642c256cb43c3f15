"""What a captured graph reads, `build` plans into: the plans of the capture, padding rows and all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from polyattn import PolyattnError
from polyattn.errors import SelectionError
from polyattn_vllm.attention import PolyattnBackend, PolyattnImpl
from polyattn_vllm.mla import PolyattnMLABackend, PolyattnMLAImpl
from polyattn_vllm.step import Builder, Step, layer_spec
from steps import (
    HEADS,
    LONGEST,
    MOST_TOKENS,
    PAGE,
    ROWS,
    SIZE,
    STEPS,
    LatentRunner,
    Runner,
    random_step,
    random_table,
)
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec, MLAAttentionSpec
from vllm.v1.spec_decode.utils import extend_all_queries_by_N


@pytest.fixture(autouse=True)
def unread_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step's bounds pass, as on an accelerator, whose lengths aren't read."""
    monkeypatch.setattr("polyattn.runtime.group.check_bounds", lambda *_: None)


def test_graphs_hold_uniform_steps_where_there_are_graphs(monkeypatch: Any) -> None:
    """Where `FULL` is asked for, any step, if a backend for that serves each layer."""
    runner = Runner("cpu", torch.float32, graphs="NONE")
    config = runner.builder.vllm_config
    plain, latent, unknown = (
        object.__new__(kind) for kind in (AttentionSpec, MLAAttentionSpec, EncoderOnlyAttentionSpec)
    )
    for cached in (plain, latent):
        object.__setattr__(cached, "block_size", PAGE)

    def support(spec: Any) -> AttentionCGSupport:
        return Builder.get_cudagraph_support(config, spec)

    assert support(plain) is AttentionCGSupport.NEVER
    monkeypatch.setattr("polyattn_vllm.step.current_platform.is_cpu", lambda: False)
    assert support(plain) is AttentionCGSupport.UNIFORM_BATCH
    assert support(latent) is AttentionCGSupport.UNIFORM_BATCH
    assert support(unknown) is AttentionCGSupport.NEVER
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    assert support(plain) is AttentionCGSupport.UNIFORM_BATCH  # no backend of a CPU's is captured
    asked: list[Any] = []
    monkeypatch.setattr("polyattn_vllm.step.selected", lambda spec, *a, **k: asked.append(spec))
    assert support(plain) is AttentionCGSupport.ALWAYS
    assert support(latent) is AttentionCGSupport.ALWAYS
    assert [spec.graph_capture.name for spec in asked] == ["ANY"] * 2
    config.compilation_config.max_cudagraph_capture_size = LONGEST + 1
    assert support(plain) is AttentionCGSupport.UNIFORM_BATCH
    config.compilation_config.max_cudagraph_capture_size = LONGEST
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert support(plain) is AttentionCGSupport.UNIFORM_BATCH


def test_graphs_hold_single_tokens_at_a_level_that_a_captured_backend_gives(
    monkeypatch: Any,
) -> None:
    """And none where no backend does, so that vLLM goes on without them."""
    runner = Runner("cpu", torch.float32, graphs="NONE", drafts=3)
    config = runner.builder.vllm_config
    plain = object.__new__(AttentionSpec)
    object.__setattr__(plain, "block_size", PAGE)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    monkeypatch.setattr("polyattn_vllm.step.current_platform.is_cpu", lambda: False)
    monkeypatch.setattr("polyattn_vllm.step.envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    # Nothing that runs on a CPU is captured.
    assert Builder.get_cudagraph_support(config, plain) is AttentionCGSupport.NEVER
    asked: list[Any] = []
    monkeypatch.setattr("polyattn_vllm.step.selected", lambda spec, *a, **k: asked.append(spec))
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert Builder.get_cudagraph_support(config, plain) is single
    assert [(s.batch_invariant.name, s.graph_capture.name) for s in asked] == [
        ("STEPS", "SINGLE_TOKEN_DECODE")
    ]


@pytest.mark.parametrize(
    "support, drafts, resolved",
    [
        ("ALWAYS", 3, "FULL"),
        ("UNIFORM_BATCH", 3, "FULL_AND_PIECEWISE"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", 3, "PIECEWISE"),
    ],
)
def test_vllm_makes_of_a_wanted_full_what_the_claim_allows(
    support: str, drafts: int, resolved: str, monkeypatch: Any
) -> None:
    """Of `FULL` it leaves mixed steps out where they aren't claimed, and warns by name."""
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
    assert any("FULL is not supported with PolyattnBackend backend" in text for text in told) == (
        resolved != "FULL"
    )


def noted(group: Any, monkeypatch: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Note what a group plans, and into which plan; return the list and the group's own `plan`."""
    planned: list[tuple[Any, Any]] = []
    plan = group.plan

    def note(batch: Any, reuse: Any = None) -> Any:
        planned.append((batch, reuse))
        return plan(batch, reuse)

    monkeypatch.setattr(group, "plan", note)
    return planned, plan


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "EXAMPLE_ATTN", "TORCH_MLA"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_mixed_steps_are_planned_into_the_captured_plans(
    backend: str, drafts: int, monkeypatch: Any
) -> None:
    """Prompts and decodes in one graph, whose every buffer has the step before it is replayed."""
    monkeypatch.setenv("POLYATTN_BACKEND", backend)
    kind = LatentRunner if backend == "TORCH_MLA" else Runner
    runner = kind("cpu", torch.float32, graphs="NONE", drafts=drafts)
    builder = runner.builder
    # A CPU's backends aren't captured; what is left of ALWAYS are buffers and plans.
    builder.support = AttentionCGSupport.ALWAYS
    builder.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    (group,) = builder.groups.values()
    captured = {}
    for size in (16, 8, 4):
        captured[size] = builder.build_for_cudagraph_capture(runner.made_up(size)).plans[group]
        assert captured[size].batch.max_query_len == size
        assert captured[size].batch.max_seq_len == LONGEST
    planned, plan = noted(group, monkeypatch)
    for queries, lens, size in STEPS:
        rows, tokens, table = len(lens), sum(queries), random_table(len(lens))
        common = runner.ragged(queries, lens, min(size, ROWS), size, table)
        step = builder.build(0, common)
        (batch, into), read = planned[-1], captured[size].batch
        assert into is step.plans[group] is captured[size] and batch.num_tokens == size
        for new, old in (
            (batch.query_start_loc, read.query_start_loc), (batch.seq_lens, read.seq_lens),
            (batch.block_table, read.block_table),
        ):  # fmt: skip
            assert new.data_ptr() == old.data_ptr()
        assert batch.seq_lens[:rows].tolist() == lens
        assert batch.query_start_loc.diff()[:rows].tolist() == queries
        assert torch.equal(batch.block_table[:rows], table)
        step.plans[group] = plan(batch)  # a CPU's kernels go by the host's lengths
        query = torch.randn(size, HEADS, SIZE)
        found = runner.attend(query, step)[:tokens]
        expected = runner.expected(query, lens, table, queries)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    # A step that no graph holds has plans of its own.
    builder.build(0, runner.ragged([1, 1, 20], [9, 9, 20], 3, 22, random_table(3)))
    assert planned[-1][1] is None


def test_lengths_of_a_mixed_step_are_the_devices(monkeypatch: Any) -> None:
    """The host has bounds of them where drafts were refused; a captured graph reads the device's."""
    runner = Runner("cpu", torch.float32, graphs="NONE")
    builder = runner.builder
    builder.support = AttentionCGSupport.ALWAYS
    builder.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    builder.build_for_cudagraph_capture(runner.made_up(16))
    common = runner.ragged([1, 15], [40, 100], ROWS, 16, random_table(2))
    common.seq_lens[:2] -= torch.tensor([3, 2])
    builder._lengths = lambda common: ([0, 1] + [16] * (ROWS - 1), [40, 100] + [0] * (ROWS - 2))
    (group,) = builder.groups.values()
    planned, _ = noted(group, monkeypatch)
    builder.build(0, common)
    batch, _ = planned[-1]
    assert batch.lens[:2] == [40, 100] and batch.seq_lens[:2].tolist() == [37, 98]


@pytest.mark.parametrize("more", [1, 3])
def test_lengths_of_a_draft_models_step_count_its_own_tokens(more: int) -> None:
    """On an accelerator lengths are the host's, which vLLM leaves behind; a row of padding has none."""
    runner = Runner("cpu", torch.float32, graphs="NONE", drafts=3)
    common = runner.ragged([4, 2, 20], [40, 9, 20], 3, 26, random_table(3))
    slots, rows = torch.zeros(26 + 3 * more, dtype=torch.int64), torch.arange(4, dtype=torch.int32)
    longer = extend_all_queries_by_N(common, more, rows, slots)
    builder: Any = SimpleNamespace(
        device=torch.device("cuda"), vllm_config=runner.builder.vllm_config
    )
    assert Builder._lengths(builder, common) == ([0, 4, 6, 26], [40, 9, 20])
    starts, lens = longer.query_start_loc.tolist(), longer.seq_lens.tolist()
    assert Builder._lengths(builder, longer) == (starts, lens) and lens == [
        n + more for n in (40, 9, 20)
    ]
    longer.seq_lens_cpu_upper_bound[1] = 0
    assert Builder._lengths(builder, longer)[1] == [40 + more, 0, 20 + more]
    longer.max_seq_len = LONGEST  # a bound that vLLM makes up says nothing of rows
    assert Builder._lengths(builder, longer)[1] == [40, 0, 20]
    longer.seq_lens_cpu_upper_bound = None
    with pytest.raises(NotImplementedError, match="seq_lens_cpu_upper_bound is None"):
        Builder._lengths(builder, longer)
    # A CPU's lengths are the step's own, less what was rejected; the longest one isn't.
    common.seq_lens -= 2
    assert runner.builder._lengths(common)[1] == [38, 7, 18]


@pytest.mark.parametrize(
    ("capture", "drafts", "bounds"),
    [("single_token_decode", 0, False), ("uniform", 3, True), ("none", 0, True)],
)
def test_lengths_of_steps_outside_of_graphs_are_exact(
    capture: str, drafts: int, bounds: bool, monkeypatch: Any
) -> None:
    """So prompts get the plans of prompts; a captured step's serve lengths that come later."""
    runner = Runner("cpu", torch.float32, graphs="NONE", drafts=drafts)
    (group,) = runner.builder.groups.values()
    planned: list[Any] = []
    monkeypatch.setattr(group, "spec", group.spec.replace(graph_capture=capture))
    monkeypatch.setattr(group, "plan", lambda batch, reuse: planned.append(batch))
    runner.builder.build(0, runner.ragged([3, 1], [9, 5], 2, 4, random_table(2)))
    assert [batch.lens_are_bounds for batch in planned] == [bounds]


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "EXAMPLE_ATTN"])
def test_drafts_are_planned_into_the_captured_plans(backend: str, monkeypatch: Any) -> None:
    """Steps of 1 + 3 tokens a request; the second backend takes no padding of so many without keys."""
    monkeypatch.setenv("POLYATTN_BACKEND", backend)
    runner, each = Runner("cpu", torch.float32, graphs="NONE", drafts=3), 4
    builder = runner.builder
    (group,) = builder.groups.values()
    empty, captured = torch.zeros(ROWS, 1, dtype=torch.int32), {}
    for size in (8, 4):
        common = runner.step([each] * size, size, empty[:size], each)
        captured[size] = builder.build_for_cudagraph_capture(common).plans[group]
    pads = group.planner.padding_rows
    assert pads == (backend == "TORCH_SDPA")
    planned, plan = noted(group, monkeypatch)
    for rows, padded in ((3, 4), (5, 8), (4, 4), (1, 4), (8, 8)):
        lens, table = random_step(rows, each)
        step = builder.build(0, runner.step(lens, padded, table, each))
        batch, into = planned[-1]
        assert into is step.plans[group] is captured[padded]
        assert batch.num_tokens == padded * each
        assert batch.lens == lens + [0 if pads else each] * (padded - rows)
        assert batch.seq_lens.tolist() == batch.lens
        assert batch.query_start_loc is builder.captured[padded, padded * each].starts
        step.plans[group] = plan(batch)
        query = torch.randn(padded * each, HEADS, SIZE)
        found = runner.attend(query, step)[: rows * each]
        expected = runner.expected(query, lens, table, each)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    # The draft model's own steps, of one token a request, have plans of their own.
    single = builder.build_for_cudagraph_capture(runner.step([1] * 4, 4, empty[:4]))
    assert planned[-1][1] is None and single.plans[group].batch.all_decode


def test_steps_are_planned_into_the_captured_plans(monkeypatch: Any) -> None:
    runner = Runner("cpu", torch.float32, graphs="NONE")
    builder = runner.builder
    (group,) = builder.groups.values()
    planned, plan = noted(group, monkeypatch)
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
        step.plans[group] = plan(batch)
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
    runner = Runner("cpu", torch.float32, graphs="NONE")
    builder, later = runner.builder, Runner("cpu", torch.float32, graphs="NONE", sliding_window=40)
    builder.vllm_config.compilation_config.static_forward_context["later"] = later.layer
    builder.layer_names.append("later")
    lens, table = random_step(ROWS)
    step = builder.build(0, runner.step(lens, ROWS, table))
    query = torch.randn(ROWS, HEADS, SIZE)
    for each in (runner, later):
        found, expected = each.attend(query, step), each.expected(query, lens, table)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_other_steps_have_plans_of_their_own() -> None:
    runner = Runner("cpu", torch.float32, graphs="NONE", sliding_window=40)
    builder = runner.builder
    builder.build_for_cudagraph_capture(
        runner.step([1] * 4, 4, torch.zeros(4, 1, dtype=torch.int32))
    )
    lens, table = random_step(ROWS - 2)
    # Nothing was captured of this size.
    step = builder.build(0, runner.step(lens, ROWS - 2, table))
    query = torch.randn(ROWS - 2, HEADS, SIZE)
    found = runner.attend(query, step)
    torch.testing.assert_close(
        found.double(), runner.expected(query, lens, table), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("cache", ["fp8_e4m3"])
def test_a_scale_for_each_head(cache: str) -> None:
    """As compressed-tensors' strategy `attn_head` leaves them on a layer."""
    scales = torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25])
    runner = Runner("cpu", torch.float32, graphs="NONE", scales=scales, kv_cache_dtype=cache)
    (group,) = runner.builder.groups.values()
    assert group.spec.scales == "head"
    lens, table = random_step(ROWS)
    query = torch.randn(ROWS, HEADS, SIZE)
    found = runner.attend(query, runner.builder.build(0, runner.step(lens, ROWS, table)))
    expected = runner.expected(query, lens, table)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_prefix_language_model_sees_its_whole_prompt() -> None:
    """HRM-Text: vLLM says of its cache that it isn't causal, and of each step."""
    runner, each = Runner("cpu", torch.float32, graphs="NONE", causal=False, drafts=3), 4
    lens, table = random_step(ROWS, each)
    query = torch.randn(ROWS * each, HEADS, SIZE)
    found = runner.attend(query, runner.builder.build(0, runner.step(lens, ROWS, table, each)))
    expected = runner.expected(query, lens, table, each)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_step_that_is_not_causal_is_refused_of_layers_that_are() -> None:
    runner = Runner("cpu", torch.float32, graphs="NONE")
    runner.causal = False
    with pytest.raises(PolyattnError, match="non_causal_steps is given"):
        runner.builder.build(0, runner.step([4], 1, torch.zeros(1, 1, dtype=torch.int32)))


def test_who_serves_no_graph_is_refused_with_the_remedy(monkeypatch: Any) -> None:
    monkeypatch.setattr("polyattn_vllm.step.current_platform.is_cpu", lambda: False)
    with pytest.raises(SelectionError, match="PIECEWISE"):
        Runner("cpu", torch.float32, graphs="FULL_AND_PIECEWISE")


def test_who_reads_another_layout_is_refused_with_the_remedy(monkeypatch: Any) -> None:
    builder = Runner("cpu", torch.float32, graphs="NONE").builder
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
        ("attention_config", "use_non_causal", True, "use_non_causal"),
    ],
)
def test_what_no_step_can_be_is_refused_before_the_engine_is_up(
    part: str, name: str, value: Any, told: str
) -> None:
    """Where vLLM lets a backend be chosen, it asks `supports_*`; on a CPU it doesn't."""
    builder = Runner("cpu", torch.float32, graphs="NONE").builder
    config = builder.vllm_config
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(PolyattnError, match=f"{told} is given"):
        Builder(builder.kv_cache_spec, ["layer"], builder.vllm_config, torch.device("cpu"))


def test_a_drafter_that_is_not_causal_is_refused_as_its_layers_are_made() -> None:
    """DFlash's: they are made under a configuration of the drafter's, and their steps come later."""
    drafter = VllmConfig()
    drafter.attention_config.use_non_causal = True
    with set_current_vllm_config(drafter), pytest.raises(PolyattnError, match="use_non_causal"):
        PolyattnImpl(HEADS, SIZE, SIZE**-0.5)


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
    builder = Runner("cpu", torch.float32, graphs="NONE").builder
    layer = SimpleNamespace(
        impl=PolyattnMLAImpl(**sizes, kv_cache_dtype="fp8"), _k_scale=torch.ones(4)
    )
    with pytest.raises(PolyattnError, match="scales='head'"):
        layer_spec(layer, builder.vllm_config, builder.kv_cache_spec, builder.support)


def test_where_a_backend_is_chosen_vllm_names_what_is_not_served() -> None:
    config: dict[str, Any] = dict.fromkeys(
        ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse",
         "use_mm_prefix", "use_per_head_quant_scales", "attn_type"),
    )  # fmt: skip
    config |= {
        "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "use_sparse": True, "use_mm_prefix": True, "attn_type": "decoder",
        "use_per_head_quant_scales": True, "device_capability": DeviceCapability(9, 0),
        "use_non_causal": True,
    }  # fmt: skip
    for backend in (PolyattnBackend, PolyattnMLABackend):
        reasons = "; ".join(backend.validate_configuration(**config))
        for told in ("partial multimodal", "sparse not", "non-causal attention not"):
            assert told in reasons, reasons
        assert ("per-head quant scales" in reasons) == backend.is_mla()


def test_vllms_own_runner_gives_the_steps_that_mixed_graphs_hold(monkeypatch: Any) -> None:
    """Its functions make the step of a capture and those of replays; ours are built from them."""
    gpu = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.utils import AttentionGroup

    runner = Runner("cpu", torch.float32, graphs="NONE")
    builder, size = runner.builder, 16
    builder.support = AttentionCGSupport.ALWAYS
    builder.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    buffers = InputBuffers(ROWS, MOST_TOKENS, torch.device("cpu"))
    slots = torch.full((1, size), -1)
    state: Any = SimpleNamespace(max_model_len=LONGEST, supports_mm_inputs=False)
    prepare = DefaultModelState.prepare_attn
    state.prepare_attn = lambda *args, **options: prepare(state, *args, **options)
    tables: Any = SimpleNamespace(
        cp_size=1, cp_rank=0, cp_interleave=1,
        get_dummy_block_tables=lambda rows: (runner.table[:rows],),
        get_dummy_slot_mappings=lambda tokens: slots[:, :tokens],
    )  # fmt: skip
    group = AttentionGroup(
        PolyattnBackend, ["layer"], builder.kv_cache_spec, 0, metadata_builders=[builder]
    )
    config: Any = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["layer"], kv_cache_spec=None)]
    )
    made = gpu.prepare_inputs_to_capture(
        min(size, ROWS), size, state, buffers, tables, [[group]], config, True
    )
    (captured,) = made.attn_metadata["layer"].plans.values()
    assert captured.batch.max_query_len == size and captured.batch.max_seq_len == LONGEST
    planned, plan = noted(captured.group, monkeypatch)
    for queries, lens, tokens in STEPS:
        if tokens != size:
            continue
        rows, table = len(lens), random_table(len(lens))
        common = runner.ragged(queries, lens, ROWS, size, table)
        buffers.query_start_loc[: ROWS + 1] = common.query_start_loc
        buffers.seq_lens[:ROWS] = common.seq_lens
        batch = replace(
            InputBatch.make_dummy(rows, sum(queries), InputBuffers(ROWS, MOST_TOKENS, "cpu")),
            num_reqs_after_padding=ROWS, num_tokens_after_padding=size, max_query_len=None,
            num_scheduled_tokens=np.array(queries, np.int32), seq_lens=buffers.seq_lens[:ROWS],
            query_start_loc=buffers.query_start_loc[: ROWS + 1],
            query_start_loc_np=common.query_start_loc_cpu.numpy(),
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
        )  # fmt: skip
        options = batch, CUDAGraphMode.FULL, (runner.table[:ROWS],), slots, [[group]], config
        step = prepare(state, *options)["layer"]
        read, into = planned[-1]
        assert into is step.plans[captured.group] is captured
        assert read.seq_lens.data_ptr() == captured.batch.seq_lens.data_ptr()
        step.plans[captured.group] = plan(read)  # a CPU's kernels go by the host's lengths
        query = torch.randn(size, HEADS, SIZE)
        found = runner.attend(query, step)[: sum(queries)]
        expected = runner.expected(query, lens, table, queries)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_vllm_quantises_outputs_by_itself() -> None:
    """It asks before it compiles a model; an MLA layer's it quantises after our call."""
    impl = Runner("cpu", torch.float32, graphs="NONE").impl
    for key in (kFp8StaticTensorSym, kNvfp4Dynamic):
        assert not impl.fused_output_quant_supported(key)
    step = Step({}, {}, 0, 0, torch.zeros(0))
    assert step.prefill is None  # else vLLM would ask `forward_mha` for it
    for kind in (PolyattnImpl, PolyattnMLAImpl):
        assert not kind.supports_dcp and not kind.supports_pcp
