"""The adapters' calls, bound against the signatures recorded from the real packages."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from inspect import Parameter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from polyattn import Batch, Device, LayerSpec
from polyattn.kernel import CacheFormat, Frame, KVCache, LayerParams

pytest.importorskip("triton")
RECORDS = {
    p.stem: json.loads(p.read_text()) for p in Path(__file__).parent.glob("signatures/*.json")
}


def signature(package: str, function: str) -> inspect.Signature:
    """Rebuild a recorded signature."""
    record = RECORDS[package]["functions"][function]
    names = record["positional"]
    required = len(names) - record["defaults"]
    parameters = [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if index < required else None,
        )
        for index, name in enumerate(names)
    ]
    if record["varargs"]:
        parameters.append(Parameter(record["varargs"], Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None if optional else Parameter.empty)
        for name, optional in record["keyword"].items()
    ]
    return inspect.Signature(parameters)


def bind(package: str, function: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Bind a call; on a mismatch fail with the package, its version and the argument."""
    try:
        return dict(signature(package, function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        where = f"{RECORDS[package]['package']} {RECORDS[package]['version']}: {function}"
        pytest.fail(f"{where}: {error}")


def test_a_changed_signature_fails_with_the_argument() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"flashinfer-python 0\.6\.13.*'surprise'"):
        bind(
            "flashinfer", "BatchDecodeWithPagedKVCacheWrapper.plan", 1, 2, 3, 4, 5, 6, 7, surprise=1
        )


def fake_flashinfer(calls: list[tuple[str, dict[str, Any]]]) -> ModuleType:
    """A module whose wrappers bind every call as the real ones would."""

    def wrapper(name: str) -> type:
        class Wrapper:
            def __init__(self, *args: Any, **kwargs: Any):
                calls.append(("init", bind("flashinfer", f"{name}.__init__", *args, **kwargs)))

            def plan(self, *args: Any, **kwargs: Any) -> None:
                calls.append(("plan", bind("flashinfer", f"{name}.plan", *args, **kwargs)))

            def run(self, *args: Any, **kwargs: Any) -> None:
                found = bind("flashinfer", f"{name}.run", *args, **kwargs)
                calls.append(("run", found))
                found["out"].zero_()
                if found.get("lse") is not None:
                    found["lse"].fill_(2.0)

        return Wrapper

    module = ModuleType("flashinfer")
    for name in (
        "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ):  # fmt: skip
        setattr(module, name, wrapper(name))
    return module


SPEC = LayerSpec(
    num_heads=8, num_kv_heads=2, head_size=64, dtype="float16", sliding_window=9, needs_lse=True,
    logit_soft_cap=30.0,
)  # fmt: skip
CPU = Device("cuda", "sm_90", torch_device="cpu")


FORM = CacheFormat(block_size=16, num_kv_heads=2, head_size=64, v_head_size=64, dtype="float16")


def step(lens: list[int], queries: list[int]) -> tuple[Batch, KVCache, torch.Tensor]:
    table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)[: len(lens)]
    batch = Batch.from_lens(queries, lens, table, 16)
    query = torch.zeros(batch.num_tokens, 8, 64, dtype=torch.float16)
    return batch, KVCache.allocate(FORM, 8), query


Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What FlashInfer's wrappers are asked."""
    found: Calls = []
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer(found))
    return found


def test_flashinfer_decode_calls(calls: Calls) -> None:
    from polyattn_cuda.flashinfer import FlashInferAttention

    backend = FlashInferAttention(SPEC, FORM, CPU)
    batch, cache, query = step([17, 5], [1, 1])
    step_plan = backend.plan(batch)
    assert [name for name, _ in calls] == ["init", "plan"]  # nothing is left for the first run
    lse = torch.zeros(2, 8)
    backend.run(step_plan, Frame(query, None, None, cache, LayerParams(), query.clone(), lse))
    assert [name for name, _ in calls] == ["init", "plan", "run"]
    plan = calls[1][1]
    assert plan["indptr"].tolist() == [0, 2, 3] and plan["indices"].tolist() == [3, 1, 5]
    assert plan["last_page_len"].tolist() == [1, 5]
    assert plan["window_left"] == 8  # theirs doesn't count the query itself
    assert plan["logits_soft_cap"] == 30.0 and plan["sm_scale"] == 64**-0.5
    assert lse.allclose(torch.tensor(2.0 * 0.6931472))  # their LSE is in base 2


@pytest.mark.parametrize(
    ("queries", "kernel"), [([4, 5], "fa2"), ([4, 17], "auto")], ids=["short rows", "a prompt"]
)
def test_flashinfer_prefill_calls(queries: list[int], kernel: str, calls: Calls) -> None:
    """Rows of a few tokens after a long context are for the kernel that splits its keys."""
    from polyattn_cuda.flashinfer import FlashInferAttention

    backend = FlashInferAttention(SPEC.replace(sliding_window=None), FORM, CPU)
    batch, cache, query = step([17, 30], queries)
    plan = backend.plan(batch)
    backend.run(plan, Frame(query, None, None, cache, LayerParams(), query.clone(), None))
    assert [name for name, _ in calls] == ["init", "plan", "run"]
    (_, init), (_, plan), (_, run) = calls
    assert init["backend"] == kernel
    assert plan["causal"] is True and plan["qo_indptr"].tolist() == [0, queries[0], sum(queries)]
    assert plan["window_left"] == -1 and run["return_lse"] is False


def test_flashinfer_reads_fp8_by_its_fa2_kernel(calls: Calls) -> None:
    from polyattn_cuda.flashinfer import FlashInferAttention

    form = dataclasses.replace(FORM, dtype="fp8_e4m3")
    backend = FlashInferAttention(SPEC.replace(kv_cache_dtype="fp8_e4m3"), form, CPU)
    batch, _, query = step([4, 20], [4, 20])  # from pages: the cache's are the rounded ones
    plan = backend.plan(batch)
    cache = KVCache.allocate(form, 8)
    new = query[:, :2]
    backend.run(plan, Frame(query, new, new, cache, LayerParams(k_scale=2.0), query.clone(), None))
    assert calls[0][1]["backend"] == "fa2" and "paged_kv_indptr" in calls[1][1]
    assert calls[1][1]["kv_data_type"] == torch.float8_e4m3fn and calls[2][1]["k_scale"] == 2.0


def test_flashinfer_attends_to_a_prompt_without_context_as_it_comes(calls: Calls) -> None:
    from polyattn_cuda.flashinfer import FlashInferAttention

    backend = FlashInferAttention(SPEC, FORM, CPU)
    batch, cache, query = step([20], [20])
    key, value = query[:, :2] + 1, query[:, :2] + 2
    step_plan = backend.plan(batch)
    for _ in range(2):  # the second layer of a step finds it planned
        backend.run(step_plan, Frame(query, key, value, cache, LayerParams(), query.clone(), None))
    assert [name for name, _ in calls] == ["init", "plan", "run", "run"]
    plan, run = calls[1][1], calls[2][1]
    assert plan["qo_indptr"].tolist() == plan["kv_indptr"].tolist() == [0, 20]
    assert plan["causal"] is True and plan["window_left"] == 8
    assert run["k"].data_ptr() == key.data_ptr() and run["v"].data_ptr() == value.data_ptr()


def test_flashinfer_trtllm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def decode(*args: Any, **kwargs: Any) -> None:
        found = bind("flashinfer", "trtllm_batch_decode_with_kv_cache", *args, **kwargs)
        calls.append(found)
        assert found["query"].is_contiguous() and found["out"].is_contiguous()
        assert found["block_tables"].is_contiguous()
        found["out"].fill_(3.0)

    module = ModuleType("flashinfer.decode")
    module.trtllm_batch_decode_with_kv_cache = decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    from polyattn_cuda.flashinfer_trtllm import FlashInferTrtllm

    spec = SPEC.replace(needs_lse=False, logit_soft_cap=None, learned_sinks=True)
    backend = FlashInferTrtllm(spec, FORM, CPU)
    batch, cache, query = step([17, 0], [1, 1])
    plan = backend.plan(batch)
    sinks, out = torch.zeros(8), torch.full((2, 8, 128), torch.nan, dtype=torch.float16)[..., :64]
    backend.run(plan, Frame(query, None, None, cache, LayerParams(sinks=sinks), out, None))
    call = calls[0]
    assert call["window_left"] == 8 and call["sinks"] is sinks and call["max_seq_len"] == 17
    assert call["bmm1_scale"] == 64**-0.5
    assert call["kv_layout"] == "NHD" and call["seq_lens"].tolist() == [17, 0]
    assert (out[0] == 3).all() and (out[1] == 0).all()  # a row without keys is zero


def test_flashinfer_xqa_calls_over_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's own kernel isn't right beside NaN in unused slots: the general one is asked for."""
    made: list[tuple[Any, ...]] = []
    calls: list[dict[str, Any]] = []

    def xqa(
        run_sm90_fp8_mha: bool, sm_count: int, num_kv_heads: int, sliding_win_size: int,
        q_scale: float, output: torch.Tensor, rcp_out_scale: float, q: torch.Tensor, sinks: Any,
        k_cache: torch.Tensor, v_cache: torch.Tensor, k_sf_cache: None, v_sf_cache: None,
        page_table: torch.Tensor, max_seq_len: int, seq_lens: torch.Tensor, batch_size: int,
        kv_scale: float, semaphores: torch.Tensor, workspace_buffer: torch.Tensor, enable_pdl: bool,
        q_seq_len: int, mask: None,
    ) -> None:  # fmt: skip
        calls.append(locals())
        output.fill_(3.0)

    def get_xqa_module(*args: Any, **kwargs: Any) -> Any:
        made.append(tuple(bind("flashinfer", "get_xqa_module", *args, **kwargs).values()))
        return SimpleNamespace(xqa=xqa)

    module = ModuleType("flashinfer.xqa")
    module.get_xqa_module = get_xqa_module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    from polyattn_cuda.flashinfer_trtllm import FlashInferTrtllm

    spec = SPEC.replace(needs_lse=False, logit_soft_cap=None, kv_cache_dtype="fp8_e4m3")
    form = dataclasses.replace(FORM, dtype="fp8_e4m3")
    backend = FlashInferTrtllm(spec, form, CPU)
    backend.prepare("decode")
    half, byte = torch.float16, torch.float8_e4m3fn
    assert made == [(half, byte, form.block_size, 64, 4, True, half, 1)]
    batch, _, query = step([17, 0], [1, 1])
    cache = KVCache.allocate(form, 8, torch.device("cpu"))
    out = torch.full((2, 8, 64), torch.nan, dtype=half)
    params = LayerParams(k_scale=0.5, v_scale=0.25)
    backend.run(backend.plan(batch), Frame(query, None, None, cache, params, out, None))
    call = calls[0]
    assert call["run_sm90_fp8_mha"] is False and call["sm_count"] == 132
    assert call["sliding_win_size"] == 9 and call["num_kv_heads"] == 2
    # logits: q_scale * kv_scale / sqrt(head_size); outputs: kv_scale
    assert call["q_scale"] * call["kv_scale"] / 8 == pytest.approx(spec.scale * 0.5)
    assert call["kv_scale"] == 0.25 and call["rcp_out_scale"] == 1.0
    assert call["q"].shape == call["output"].shape == (2, 1, 8, 64)
    assert call["seq_lens"].tolist() == [[17], [0]] and call["batch_size"] == 2
    assert call["max_seq_len"] == call["page_table"].shape[1] * form.block_size
    assert call["k_cache"].dtype is byte and not call["semaphores"].any()
    assert (out[0] == 3).all() and (out[1] == 0).all()


def test_flash_attn_4_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def varlen(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = bind("flash_attn_4", "flash_attn_varlen_func", *args, **kwargs)
        calls.append(found)
        return torch.zeros_like(found["q"]), torch.full((8, len(found["q"])), 1.5)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    from polyattn_cuda.flash_attn_v4 import FlashAttention4

    backend = FlashAttention4(SPEC, FORM, CPU)
    batch, cache, query = step([17, 5], [4, 5])
    plan, lse = backend.plan(batch), torch.zeros(9, 8)
    backend.run(plan, Frame(query, None, None, cache, LayerParams(), query.clone(), lse))
    assert calls[0]["cu_seqlens_k"].tolist() == [0, 17, 22] and calls[0]["k"].shape == (22, 2, 64)
    assert calls[0]["window_size"] == (8, 0) and bool((lse == 1.5).all())


def test_torch_varlen_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is here itself, so its own signature is what the call is bound to."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn)
    calls: list[dict[str, Any]] = []

    def varlen_attn(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = dict(real.bind(*args, **kwargs).arguments)
        calls.append(found)
        return torch.ones_like(found["query"]), torch.full((8, len(found["query"])), 1.5)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    from polyattn_cuda.flash_attn import TorchFlashAttention2

    form = dataclasses.replace(FORM, block_size=256)
    backend = TorchFlashAttention2(SPEC.replace(logit_soft_cap=None), form, CPU)
    batch, cache, query = step([17, 5], [4, 5])
    out, lse = query.clone(), torch.zeros(9, 8)
    backend.run(backend.plan(batch), Frame(query, None, None, cache, LayerParams(), out, lse))
    assert bool((lse == 1.5).all()) and bool((out == 1).all())
    assert calls[0]["seqused_k"].tolist() == [17, 5] and calls[0]["window_size"] == (8, 0)
    assert calls[0]["block_table"] is batch.block_table and calls[0]["enable_gqa"] is True
