"""FLASHINFER_TRTLLM's calls, bound against the signatures recorded from FlashInfer."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from builds import CPU
from fake_libraries.polyattn_fakes import bind
from polyattn import Batch, LayerSpec
from polyattn.kernel import CacheFormat, Frame, KVCache, LayerParams

pytest.importorskip("triton")
SPEC = LayerSpec(
    num_heads=8, num_kv_heads=2, head_size=64, dtype="float16", sliding_window=9,
)  # fmt: skip
FORM = CacheFormat(block_size=16, num_kv_heads=2, head_size=64, v_head_size=64, dtype="float16")
TABLE = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
STEP = Batch.from_lens([1, 1], [17, 0], TABLE, 16)
QUERY = torch.zeros(2, 8, 64, dtype=torch.float16)


def test_a_changed_signature_fails_with_the_argument() -> None:
    with pytest.raises(AssertionError, match=r"flashinfer-python 0\.6\.13.*'surprise'"):
        name = "BatchDecodeWithPagedKVCacheWrapper.plan"
        bind("flashinfer", name, (1, 2, 3, 4, 5, 6, 7), {"surprise": 1})


def test_decode_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def decode(*args: Any, **kwargs: Any) -> None:
        call = bind("flashinfer", "trtllm_batch_decode_with_kv_cache", args, kwargs)
        calls.append(call)
        assert call["query"].is_contiguous() and call["out"].is_contiguous()
        assert call["block_tables"].is_contiguous()
        call["out"].fill_(3.0)

    module = ModuleType("flashinfer.decode")
    module.trtllm_batch_decode_with_kv_cache = decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    from polyattn_cuda.flashinfer_trtllm import FlashInferTrtllm

    backend = FlashInferTrtllm(SPEC.replace(learned_sinks=True), FORM, CPU)
    sinks, out = torch.zeros(8), torch.full((2, 8, 128), torch.nan, dtype=torch.float16)[..., :64]
    frame = Frame(QUERY, None, None, KVCache.allocate(FORM, 8), LayerParams(sinks=sinks), out, None)
    backend.run(backend.plan(STEP), frame)
    call = calls[0]
    assert call["window_left"] == 8 and call["sinks"] is sinks and call["max_seq_len"] == 17
    assert call["bmm1_scale"] == 64**-0.5
    assert call["kv_layout"] == "NHD" and call["seq_lens"].tolist() == [17, 0]
    assert (out[0] == 3).all() and (out[1] == 0).all()  # a row without keys is zero
    some = Batch.from_lens([1, 0, 1], [17, 3, 20], torch.cat([TABLE, TABLE[:1]]), 16)
    backend.run(backend.plan(some), frame)
    call = calls[1]
    assert call["seq_lens"].tolist() == [17, 20]  # a token's by its place
    assert call["block_tables"].tolist() == [[3, 1], [3, 1]]


def test_xqa_calls_over_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's own kernel isn't right beside NaN in unused slots: the general one is asked for."""
    modules: list[tuple[Any, ...]] = []
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
        modules.append(tuple(bind("flashinfer", "get_xqa_module", args, kwargs).values()))
        return SimpleNamespace(xqa=xqa)

    module = ModuleType("flashinfer.xqa")
    module.get_xqa_module = get_xqa_module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    from polyattn_cuda.flashinfer_trtllm import FlashInferTrtllm

    spec = SPEC.replace(kv_cache_dtype="fp8_e4m3")
    form = dataclasses.replace(FORM, dtype="fp8_e4m3")
    backend = FlashInferTrtllm(spec, form, CPU)
    backend.prepare("decode")
    half, byte = torch.float16, torch.float8_e4m3fn
    assert modules == [(half, byte, form.block_size, 64, 4, True, half, 1)]
    cache = KVCache.allocate(form, 8, torch.device("cpu"))
    out = torch.full((2, 8, 64), torch.nan, dtype=half)
    params = LayerParams(sinks=torch.arange(8.0), k_scale=0.5, v_scale=0.25)
    backend.run(backend.plan(STEP), Frame(QUERY, None, None, cache, params, out, None))
    call = calls[0]
    assert call["sinks"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # by KV heads
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
