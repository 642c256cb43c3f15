"""The CUDA adapters by value: the kit, and by hand, over fakes that bind signatures and compute."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import FAKES, LIBRARIES, Step, check_given, check_paged, paged_batch, use_fakes
from polyattn import Batch, Device, LayerSpec, discover
from polyattn.api import select
from polyattn.checking.tolerance import FP8_COMPUTE, TOLERANCES, tolerance_of
from polyattn.errors import SelectionError, SpecError
from polyattn.kernel import CacheFormat, KVCache, LayerParams
from polyattn.registry.capabilities import check

pytest.importorskip("triton")
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
QUANTISED = SPEC.replace(kv_cache_dtype="fp8_e4m3")
SMALL = LayerSpec(num_heads=6, num_kv_heads=2, head_size=64, dtype="float16", needs_lse=True)
CPU = Device("cuda", "sm_90", torch_device="cpu")
HALF = 3e-3
"""What float16 rounds away."""


@pytest.mark.parametrize(
    ("backend", "profile"),
    [
        ("FLASH_ATTN", "a100"),
        ("FLASH_ATTN_V3", "h100-sxm"),
        ("FLASHINFER", "h100-sxm"),
        ("XFORMERS", "a100"),
    ],
)
def test_conforms_over_the_fake(backend: str, profile: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "polyattn_on_cpu",
         "--pyargs", "polyattn.conformance", "--polyattn-backend", backend, "--polyattn-as", profile,
         "--polyattn-device", "cpu", "--polyattn-report", str(report), "-x"],
        cwd="/", env=os.environ | {"PYTHONPATH": str(FAKES), "POLYATTN_DISABLE_PLUGINS": "triton"},
        capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    counts = json.loads(report.read_text())
    assert counts["failed"] == counts["skipped"] == 0, ran.stdout[-3000:]
    assert counts["passed"] >= 40


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' fakes, whose empty rows are zeros, and a chip of 132 multiprocessors."""
    use_fakes(monkeypatch, 0.0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in LIBRARIES]:
        del sys.modules[name]


MASKS = {
    "causal": {},
    "window": {"sliding_window": 7},
    "non causal": {"causal": False},
    "window of two sides": {"causal": False, "sliding_window": 7},
    "soft cap": {"logit_soft_cap": 5.0},
    "one group": {"num_kv_heads": 6},
}


@pytest.mark.parametrize("mask", MASKS)
def test_flash_attn(mask: str, fakes: None) -> None:
    from polyattn_cuda.flash_attn import UpstreamFlashAttention2

    spec = SMALL.replace(**MASKS[mask])
    check_paged(UpstreamFlashAttention2, spec, 256, HALF)
    check_given(UpstreamFlashAttention2, spec, HALF)


def test_flash_attn_with_alibi(fakes: None) -> None:
    from polyattn_cuda.flash_attn import UpstreamFlashAttention2

    spec = SMALL.replace(alibi=True, needs_lse=False)
    check_paged(UpstreamFlashAttention2, spec, 256, HALF)
    check_given(UpstreamFlashAttention2, spec, HALF)


def vllm_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's operators, as torch prints their schemas, on top of the other builds' fakes."""
    import flash_attn_interface as fa3
    from flash_attn import flash_attn_interface as fa2
    from polyattn_fakes import attend_paged

    def varlen_fwd(
        q: Any, k: Any, v: Any, out: Any, cu_q: Any, cu_k: Any, used: Any, leftpad: Any, table: Any,
        slopes: Any, max_q: int, max_k: int, dropout: float, scale: float, zero: bool, causal: bool,
        left: int, right: int, cap: float, softmax: bool, splits: int, generator: Any,
    ) -> list[Any]:  # fmt: skip
        if table is None:
            assert used is None
            found, lse, _ = fa2.flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal,
                window_size=(left, right), softcap=cap, alibi_slopes=slopes, return_attn_probs=True,
            )  # fmt: skip
        else:
            assert max_q >= max(cu_q.diff()) and max_k == max(used) and k.shape[1] % 16 == 0
            found, lse = attend_paged(
                q, k, v, cu_q.tolist(), used.tolist(), table, scale=scale, soft_cap=cap,
                window=(left, 0) if causal else (left, right), slopes=slopes,
            )  # fmt: skip
        out.copy_(found)
        return [out, lse]

    def fwd_kvcache(
        q: Any, k: Any, v: Any, new_k: None, new_v: None, used: Any, cos: None, sin: None,
        index: None, leftpad: None, table: Any, slopes: Any, out: Any, scale: float, causal: bool,
        left: int, right: int, cap: float, interleaved: bool, splits: int,
    ) -> list[Any]:  # fmt: skip
        count, width = q.shape[:2]
        found, lse = attend_paged(
            q.flatten(0, 1), k, v, list(range(0, count * width + 1, width)), used.tolist(), table,
            scale=scale, window=(left, 0) if causal else (left, right), soft_cap=cap, slopes=slopes,
        )  # fmt: skip
        out.copy_(found.unflatten(0, (count, width)))
        return [out, lse.unflatten(1, (count, width)).transpose(0, 1)]

    def fwd(
        q: Any, k: Any, v: Any, new_k: None, new_v: None, q_v: None, out: Any, cu_q: Any, cu_k: Any,
        cu_new: None, used_q: None, used_k: Any, max_q: int, max_k: int, table: Any, batch: None,
        leftpad: None, cos: None, sin: None, lengths: None, q_descale: Any, k_descale: Any,
        v_descale: Any, scale: float, causal: bool, left: int, right: int, cap: float,
        interleaved: bool, schedule: None, splits: int, pack: None, margin: int, sinks: Any,
        world: int, rank: int, total: None,
    ) -> list[Any]:  # fmt: skip
        options = {
            "max_seqlen_q": max_q, "softmax_scale": scale, "causal": causal, "softcap": cap,
            "window_size": (left, right),
        }  # fmt: skip
        assert (world, rank, sinks) == (1, 0, None)
        if table is None:
            assert used_k is None
            found, lse = fa3.flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, max_seqlen_k=max_k, return_attn_probs=True, **options
            )
        else:
            assert cu_k is None
            found, lse, *_ = fa3.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=used_k, page_table=table, cu_seqlens_q=cu_q,
                q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=splits,
                return_softmax_lse=True, **options,
            )  # fmt: skip
        out.copy_(found)
        return [out, lse]

    fa2_ops = SimpleNamespace(varlen_fwd=varlen_fwd, fwd_kvcache=fwd_kvcache)
    monkeypatch.setattr(torch.ops, "_vllm_fa2_C", fa2_ops, raising=False)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=fwd), raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)


@pytest.mark.parametrize("mask", MASKS)
def test_vllms_builds(mask: str, fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn_cuda.flash_attn import VllmFlashAttention2
    from polyattn_cuda.flash_attn_v3 import VllmFlashAttention3

    vllm_operators(monkeypatch)
    spec = SMALL.replace(**MASKS[mask])
    check_paged(VllmFlashAttention2, spec, 16, HALF)
    check_given(VllmFlashAttention2, spec, HALF)
    check_paged(VllmFlashAttention3, spec, 8, HALF)
    check_given(VllmFlashAttention3, spec, HALF)


@pytest.mark.parametrize("mask", MASKS)
def test_flash_attn_3(mask: str, fakes: None) -> None:
    from polyattn_cuda.flash_attn_v3 import UpstreamFlashAttention3

    spec = SMALL.replace(**MASKS[mask])
    check_paged(UpstreamFlashAttention3, spec, 8, HALF)
    check_given(UpstreamFlashAttention3, spec, HALF)
    captured = spec.replace(graph_capture="single_token_decode")
    check_paged(UpstreamFlashAttention3, captured, 8, HALF, kinds=("decodes", "padding"))


def test_flash_attn_3_makes_an_mla_layers_prefill(fakes: None) -> None:
    from polyattn_cuda.flash_attn_v3 import UpstreamFlashAttention3

    spec = SMALL.replace(num_kv_heads=6, head_size=192, v_head_size=128)
    check_given(UpstreamFlashAttention3, spec, HALF)


def test_flash_attn_3_scales_each_requests_queries_by_themselves(fakes: None) -> None:
    """Over an e4m3 cache: what another request asks, a thousand times as loud or NaN, changes no bit."""
    from polyattn_cuda.flash_attn_v3 import UpstreamFlashAttention3

    spec = SMALL.replace(
        dtype="bfloat16", kv_cache_dtype="fp8_e4m3", fp8_compute=True, num_heads=8, num_kv_heads=2
    )
    check_paged(UpstreamFlashAttention3, spec, 8, 0.1, lse_tight=0.1)
    form = CacheFormat(
        block_size=8, num_kv_heads=2, head_size=64, v_head_size=64, dtype="fp8_e4m3"
    )  # fmt: skip
    backend = UpstreamFlashAttention3(spec, form, CPU)
    for queries in ([1, 1, 1], [3, 1, 20]):
        lens = [30, 9, 25]
        cache = KVCache.allocate(form, 12)
        batch = paged_batch(form, lens, lens, list(range(12)))
        params = LayerParams(k_scale=0.5, v_scale=0.25)
        Step(spec, cache, batch, params, 1)
        batch = Batch.from_lens(queries, lens, batch.block_table, 8)
        step = Step(spec, cache, batch, params, 2)

        def attend(query: torch.Tensor, step: Step = step) -> torch.Tensor:
            out = torch.empty_like(step.query)
            plan = backend.plan(step.batch)
            backend.run(plan, query, None, None, step.cache, step.params, out, None)
            return out

        calm = attend(step.query)
        for factor in (1000.0, torch.nan):
            loud = step.query.clone()
            rows = slice(queries[0], queries[0] + queries[1])
            loud[rows] *= factor
            changed = attend(loud)
            kept = torch.ones(len(loud), dtype=torch.bool)
            kept[rows] = False
            assert torch.equal(changed[kept], calm[kept])
        loud = step.query.clone()
        loud[:, 4:] *= 1000.0  # the second KV head's group
        assert torch.equal(attend(loud)[:, :4], calm[:, :4])


@pytest.mark.parametrize("mask", ["causal", "window", "non causal", "one group"])
def test_xformers(mask: str, fakes: None) -> None:
    from polyattn_cuda.xformers import XFormersAttention

    spec = SMALL.replace(**MASKS[mask])
    check_paged(XFormersAttention, spec, 8, HALF)
    check_given(XFormersAttention, spec, HALF)
    check_given(XFormersAttention, SMALL.replace(v_head_size=32), HALF)


def fake_varlen(monkeypatch: pytest.MonkeyPatch, module: str, package: str | None) -> None:
    """flash-attn 4's function, or torch's: both compute over packed keys."""
    import inspect

    import polyattn_fakes

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn)

    def fa4(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        a = polyattn_fakes.bind("flash_attn_4", "flash_attn_varlen_func", args, kwargs)
        left, right = (-1 if w is None else w for w in a["window_size"])
        assert not a["k"].isnan().any(), "it multiplies what it masks"
        out, lse = polyattn_fakes.attend_packed(
            a["q"], a["k"], a["v"], a["cu_seqlens_q"].tolist(), a["cu_seqlens_k"].tolist(),
            scale=a["softmax_scale"], window=(left, 0) if a["causal"] else (left, right),
            soft_cap=a["softcap"],
        )  # fmt: skip
        return out, lse if a["return_lse"] else None

    def torchs(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound = real.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        assert a["enable_gqa"] or a["query"].shape[1] == a["key"].shape[-2]
        starts = a["cu_seq_q"].tolist()
        options = {
            "scale": a["scale"], "window": a["window_size"], "soft_cap": 0.0, "slopes": None,
        }  # fmt: skip
        if a["block_table"] is None:
            return polyattn_fakes.attend_packed(
                a["query"], a["key"], a["value"], starts, a["cu_seq_k"].tolist(), **options
            )
        assert a["cu_seq_k"] is None
        return polyattn_fakes.attend_paged(
            a["query"], a["key"], a["value"], starts, a["seqused_k"].tolist(), a["block_table"],
            **options,
        )  # fmt: skip

    if module == "torch":
        monkeypatch.setattr(varlen, "varlen_attn", torchs)
        return
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = fa4  # type: ignore[attr-defined]


@pytest.mark.parametrize("mask", ["causal", "window", "non causal", "window of two sides"])
def test_torchs_build_and_flash_attn_4(
    mask: str, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyattn_cuda.flash_attn import TorchFlashAttention2
    from polyattn_cuda.flash_attn_v4 import FlashAttention4

    spec = SMALL.replace(**MASKS[mask])
    fake_varlen(monkeypatch, "torch", None)
    check_paged(TorchFlashAttention2, spec, 256, HALF)
    check_given(TorchFlashAttention2, spec, HALF)
    fake_varlen(monkeypatch, "fa4", None)
    check_paged(FlashAttention4, spec, 8, HALF)
    check_given(FlashAttention4, spec, HALF)


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn(causal: bool, fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel's causal mask is aligned to the top left, and it takes one sequence."""
    from polyattn.families.attention import reference
    from polyattn_cuda.cudnn import CudnnAttention

    def attend(
        q: Any, k: Any, v: Any, bias: None, lse: bool, dropout: float, causal: bool, debug: bool,
        *, scale: float,
    ) -> tuple[Any, Any]:  # fmt: skip
        assert not causal or q.shape[2] == k.shape[2], "elsewhere top left isn't bottom right"
        spec = LayerSpec(
            num_heads=q.shape[1], num_kv_heads=k.shape[1], head_size=q.shape[3], scale=scale,
            causal=causal,
        )  # fmt: skip
        out, found = reference.attend(spec, *(t[0].transpose(0, 1) for t in (q, k, v)))
        return out.to(q.dtype).transpose(0, 1)[None], found.T.float()[None, :, :, None]

    aten = SimpleNamespace(_scaled_dot_product_cudnn_attention=attend)
    spec = SMALL.replace(causal=causal)
    monkeypatch.setattr("polyattn_cuda.cudnn.torch.ops", SimpleNamespace(aten=aten))
    check_paged(CudnnAttention, spec, 8, HALF)
    check_given(CudnnAttention, spec, HALF)


FLASHINFER = {
    "causal": {},
    "window": {"sliding_window": 7},
    "non causal": {"causal": False},
    "soft cap": {"logit_soft_cap": 5.0},
    "ratio of 5": {"num_heads": 10},
    "ratio of 7": {"num_heads": 14},
    "one group": {"num_kv_heads": 6},
    "size 192": {"head_size": 192},
    "captured": {"graph_capture": "single_token_decode"},
}


@pytest.mark.parametrize("case", FLASHINFER)
def test_flashinfer(case: str, fakes: None) -> None:
    """Planned one after another, each plan has a wrapper of its own."""
    from polyattn_cuda.flashinfer import FlashInferAttention

    spec = SMALL.replace(**FLASHINFER[case])
    check_paged(FlashInferAttention, spec, 8, HALF, lse_tight=3e-3)
    check_given(FlashInferAttention, spec, HALF, lse_tight=3e-3)


def test_flashinfer_over_fp8_and_an_mla_layers_prefill(fakes: None) -> None:
    from polyattn_cuda.flashinfer import FlashInferAttention

    check_paged(FlashInferAttention, SMALL.replace(kv_cache_dtype="fp8_e4m3"), 8, HALF)
    expanded = SMALL.replace(num_kv_heads=6, head_size=192, v_head_size=128)
    check_given(FlashInferAttention, expanded, HALF)


def flashinfer_decode(spec: LayerSpec) -> tuple[Any, Any]:
    from polyattn_cuda.flashinfer import FlashInferAttention

    form = CacheFormat(
        block_size=8, num_kv_heads=2, head_size=64, v_head_size=64, dtype="float16"
    )  # fmt: skip
    return FlashInferAttention(spec, form, CPU), form


def test_a_wrapper_comes_back_with_its_plan(fakes: None) -> None:
    backend, form = flashinfer_decode(SMALL)

    def batch() -> Batch:
        return paged_batch(form, [1, 1], [9, 4], list(range(8)))

    first, second = backend.plan(batch()), backend.plan(batch())
    assert first.lease.wrapper is not second.lease.wrapper and not backend.pool.idle
    before = first.lease.wrapper
    del first
    gc.collect()
    assert [lease.wrapper for _, lease in backend.pool.idle] == [before]
    third = backend.plan(batch())
    assert third.lease.wrapper is before and third.lease.wrapper is not second.lease.wrapper
    backend.prepare("decode")  # one token, and a row of two
    backend.prepare("prefill")
    gc.collect()
    assert {kind for kind, _ in backend.pool.idle} == {"decode", "short", "paged"}


def test_a_wrapper_in_flight_is_left_alone(fakes: None) -> None:
    """Its plan is copied from page-locked memory when the device gets there."""
    backend, form = flashinfer_decode(SMALL)
    plan = backend.plan(paged_batch(form, [1], [9], list(range(8))))
    before, waits = plan.lease.wrapper, []
    plan.lease.copied = SimpleNamespace(
        query=lambda: False, synchronize=lambda: waits.append(1), record=lambda: None
    )
    again = backend.plan(plan.batch, plan)  # a captured graph's: it has no other buffers
    assert again.lease.wrapper is before and waits
    lease = plan.lease
    del plan, again
    gc.collect()
    other = backend.plan(paged_batch(form, [1], [9], list(range(8))))
    assert other.lease is not lease and backend.pool.idle[0][1] is lease


def test_a_captured_steps_buffers_are_refilled(fakes: None) -> None:
    backend, form = flashinfer_decode(SMALL.replace(graph_capture="single_token_decode"))
    longest = paged_batch(form, [1, 1], [64, 64], list(range(16)))
    captured = backend.plan(longest)
    made = captured.lease.wrapper.made
    assert made["use_cuda_graph"] and len(made["paged_kv_indices_buffer"]) == 16
    step = paged_batch(form, [1, 1], [9, 30], list(range(16)))
    replayed = backend.plan(step, captured)
    assert replayed.lease is captured.lease
    assert captured.lease.wrapper.planned["last_page_len"].tolist() == [1, 6]
    aside = backend.plan(step)  # an eager step of this size beside it
    assert aside.lease is not captured.lease


def test_fp8_products_are_asked_for() -> None:
    """A kernel that rounds the query too serves only those who said that it may."""
    with pytest.raises(SelectionError, match="set fp8_compute=True"):
        select(QUANTISED, "h100-sxm", backend="FLASH_ATTN_V3")
    with pytest.raises(SpecError, match="fp8_compute=True goes with kv_cache_dtype='fp8_e4m3'"):
        SPEC.replace(fp8_compute=True)
    assert "fp8_compute" not in str(select(QUANTISED.replace(fp8_compute=True), "h100-sxm"))
    assert tolerance_of(QUANTISED) is TOLERANCES["bfloat16"]
    assert tolerance_of(QUANTISED.replace(fp8_compute=True)) is FP8_COMPUTE


def test_bf16_begins_with_ampere() -> None:
    turing = Device("cuda", "sm_75")
    info = discover().backends["XFORMERS"].capabilities
    assert not check(info, SPEC.replace(dtype="float16"), turing)
    assert "bf16 products begin with sm_80" in str(check(info, SPEC, turing)[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_size": 96}, "head_size: wanted 96"),
        ({"head_size": 192, "kv_cache_dtype": "fp8_e4m3"}, "multiples of 128"),
        ({"head_size": 192, "v_head_size": 128}, "one size for keys and values"),
    ],
)
def test_what_flashinfer_refuses(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SelectionError, match=why):
        select(SPEC.replace(**changes), "h100-sxm", backend="FLASHINFER")
    taken = SPEC.replace(num_heads=56, head_size=192)
    assert select(taken, "h100-sxm", backend="FLASHINFER").decision.decode == "FLASHINFER"


def test_mla_prefills_on_hopper() -> None:
    spec = LayerSpec.from_hf_config(
        {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": 128,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "hidden_size": 7168, "torch_dtype": "bfloat16"}
    )[0]  # fmt: skip
    for backend in ("FLASH_ATTN_V3", "FLASHINFER", "XFORMERS"):
        chosen = select(spec, "h200", backend=f"prefill={backend}").decision
        assert chosen.prefill == backend
