"""FlashAttention's builds, xFormers and cuDNN by value, over fakes that bind signatures and compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import check_given, check_paged, drawn, run
from builds import (
    CPU,
    HALF,
    MASKS,
    SMALL,
    fake_varlen,
    later_keys_seen,
    vllm_flash_3,
    vllm_operators,
)
from polyattn import Batch, LayerSpec, select
from polyattn.kernel import Frame, LayerParams, window_sizes
from polyattn.workload.compare import output_error

pytest.importorskip("triton")


def test_flash_attention_3_splits_no_keys_where_bits_must_not_follow_from_the_batch(
    fakes: None,
) -> None:
    """Beside captured steps, whose splits otherwise are the capture's."""
    from polyattn_cuda.flash_attn_v3 import UpstreamFlashAttention3

    work = drawn(SMALL, [(1, 30), (1, 9), (1, 25)], 16)
    batch, form = work.batch, work.group.cache_format
    for capture in ("none", "any"):
        free = SMALL.replace(graph_capture=capture)
        assert UpstreamFlashAttention3(free, form, CPU).plan(batch).splits != 1
        for level in ("batch", "steps", "calls"):
            spec = free.replace(batch_invariant=level)
            assert UpstreamFlashAttention3(spec, form, CPU).plan(batch).splits == 1


def test_flash_attns_captured_steps_split_as_their_eager_ones(
    fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step's block table is the widest there is: no split may follow from it."""
    from polyattn_cuda import flash_attn
    from polyattn_cuda.splits import captured_splits

    asked: list[int] = []
    spec = SMALL.replace(graph_capture="uniform")
    work = drawn(spec, [(1, 30), (1, 9), (1, 25)], 256)
    backend = flash_attn.UpstreamFlashAttention2(spec, work.group.cache_format, CPU)
    real = backend.kvcache_func

    def spy(*args: Any, **options: Any) -> Any:
        asked.append(options["num_splits"])
        return real(*args, **options)

    backend.kvcache_func = spy
    step = work.batch
    wide = torch.cat([step.block_table, step.block_table], 1)
    for batch in (step, Batch(step.starts, step.lens, wide)):
        assert run(work, backend, backend.plan(batch), False)[0] < HALF
    programs = 3 * spec.num_kv_heads
    assert asked == [132 // programs] * 2
    assert [captured_splits(132, n) for n in (0, 1, 4, 5, 66, 67, 133)] == [32, 32, 32, 26, 2, 1, 1]


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


def test_vllms_flash_attn_3_reads_sinks_of_up_to_64_heads(
    fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more heads they join after its call, which gets none: vLLM's raises, the fake asserts it."""
    from polyattn_cuda.flash_attn_v3 import VllmFlashAttention3

    vllm_operators(monkeypatch)
    spec = SMALL.replace(num_heads=66, learned_sinks=True, dtype="bfloat16")
    check_paged(VllmFlashAttention3, spec, 8, 1.5e-2)
    check_given(VllmFlashAttention3, spec, 1.5e-2)


@pytest.mark.parametrize("sides", [{}, {"causal": False}])
@pytest.mark.parametrize("window", [256, 257, 300])
def test_vllms_flash_attn_3_masks_all_blocks_of_a_window(
    window: int, sides: dict[str, Any], fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the lengths themselves it shows rows later keys, where blocks of keys don't divide a window."""
    from polyattn_cuda.flash_attn_v3 import VllmFlashAttention3

    vllm_operators(monkeypatch)
    told: list[torch.Tensor] = []
    schedules: list[Any] = []

    def fwd(*args: Any) -> list[Any]:
        told.append(args[36])
        schedules.append(args[29])
        return vllm_flash_3(*args)

    monkeypatch.setattr(torch.ops._vllm_fa3_C, "fwd", fwd)
    spec = SMALL.replace(num_heads=2, num_kv_heads=1, sliding_window=window, **sides)
    queries, lens = [256, 2 * window, 9, 40], [512, 2 * window, 3 * window, 40]
    work = drawn(spec, list(zip(queries, lens, strict=True)), 8)
    batch, form = work.batch, work.group.cache_format
    backend = VllmFlashAttention3(spec, form, CPU)
    out, lse = torch.empty_like(work.query), torch.empty(work.query.shape[:2])
    frame = Frame(work.query, None, None, work.held, work.layer.params, out, lse)
    plan = backend.plan(batch)
    backend.run(plan, frame)
    left, right = window_sizes(spec)
    steps = list(zip(queries, lens, told[0].tolist(), strict=True))
    tiles = [(128, 64), (128, 96), (128, 128), (192, 128), (128, 192)]
    assert not spec.causal or any(
        later_keys_seen(query, length, 2, left, right, length, tile)
        for query, length, _ in steps
        for tile in tiles
    )
    for query, length, bound in steps:
        for tile in tiles:
            assert not later_keys_seen(query, length, 2, left, right, bound, tile)
    # Made once a step; in each call where a graph is captured, or lengths are the device's alone.
    backend.run(plan, frame)
    assert told[1] is told[0]
    batch.seq_lens.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr("polyattn_cuda.flash_attn_v3.capturing", lambda: True)
        backend.run(plan, frame)
    bounded = VllmFlashAttention3(spec.replace(length_bounds=True), form, CPU)
    bounded.run(plan, frame)
    assert torch.equal(told[2], told[3]) and not torch.equal(told[2], told[0])
    batch.seq_lens.sub_(1)
    backend.run(plan, frame)
    assert told[4] is told[0]
    assert [schedule is None for schedule in schedules] == [False, False, True, True, False]


def test_flash_attn_3_scales_each_requests_queries_by_themselves(fakes: None) -> None:
    """Over an e4m3 cache: what another request asks, a thousand times as loud or NaN, changes no bit."""
    from polyattn_cuda.flash_attn_v3 import UpstreamFlashAttention3

    spec = SMALL.replace(
        dtype="bfloat16", kv_cache_dtype="fp8_e4m3", fp8_compute=True, num_heads=8, num_kv_heads=2
    )
    check_paged(UpstreamFlashAttention3, spec, 8, 0.1, lse_tight=0.1)
    for queries in ([1, 1, 1], [3, 1, 20]):
        work = drawn(spec, list(zip(queries, [30, 9, 25], strict=True)), 8)
        backend = UpstreamFlashAttention3(spec, work.group.cache_format, CPU)

        def attend(query: torch.Tensor, work: Any = work, backend: Any = backend) -> torch.Tensor:
            out = torch.empty_like(work.query)
            plan = backend.plan(work.batch)
            backend.run(plan, Frame(query, None, None, work.held, work.layer.params, out, None))
            return out

        calm = attend(work.query)
        for factor in (1000.0, torch.nan):
            loud = work.query.clone()
            rows = slice(queries[0], queries[0] + queries[1])
            loud[rows] *= factor
            changed = attend(loud)
            kept = torch.ones(len(loud), dtype=torch.bool)
            kept[rows] = False
            assert torch.equal(changed[kept], calm[kept])
        loud = work.query.clone()
        loud[:, 4:] *= 1000.0  # the second KV head's group
        assert torch.equal(attend(loud)[:, :4], calm[:, :4])


@pytest.mark.parametrize("mask", [*MASKS])
def test_torchs_build_and_flash_attn_4(
    mask: str, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyattn_cuda.flash_attn import TorchFlashAttention2
    from polyattn_cuda.flash_attn_v4 import FlashAttention4

    spec = SMALL.replace(**MASKS[mask])
    if spec.logit_soft_cap is None:  # torch's has none
        fake_varlen(monkeypatch, "torch", None)
        check_paged(TorchFlashAttention2, spec, 256, HALF)
        check_given(TorchFlashAttention2, spec, HALF)
    fake_varlen(monkeypatch, "fa4", None)
    check_paged(FlashAttention4, spec, 8, HALF)
    check_given(FlashAttention4, spec, HALF)


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn(causal: bool, fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel's causal mask is aligned to the top left; sequences of a call are of one length."""
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
        calls.append(len(q))
        each = [
            reference.attend(spec, *(t[i].transpose(0, 1) for t in (q, k, v))) for i in range(len(q))
        ]  # fmt: skip
        out = torch.stack([o.to(q.dtype).transpose(0, 1) for o, _ in each])
        return out, torch.stack([n.T.float() for _, n in each])[..., None]

    calls: list[int] = []
    aten = SimpleNamespace(_scaled_dot_product_cudnn_attention=attend)
    spec = SMALL.replace(causal=causal)
    monkeypatch.setattr("polyattn_cuda.cudnn.torch.ops", SimpleNamespace(aten=aten))
    check_paged(CudnnAttention, spec, 8, HALF)
    check_given(CudnnAttention, spec, HALF)
    # Images of one size are one call, what stands between them another.
    batch = Batch.from_lens([6, 6, 6, 4, 4, 0, 4], [6, 6, 6, 4, 4, 0, 4])
    query, key, value = (torch.randn(30, n, 64).half() for n in (6, 2, 2))
    backend, out = CudnnAttention(spec, None, CPU), torch.empty(30, 6, 64).half()
    calls.clear()
    backend.run(backend.plan(batch), Frame(query, key, value, None, LayerParams(), out, None))
    assert calls == [3, 2, 1]
    wanted, _ = reference.forward(spec, query, key, value, None, batch, LayerParams())
    assert output_error(out, wanted) < HALF


@pytest.mark.parametrize("name", ["FLASH_ATTN_V3", "FLASHINFER"])
def test_an_output_in_e4m3_is_stored_after_the_kernel(name: str, fakes: None) -> None:
    """Decodes and a prompt over a cache, and an empty step: `out / out_scale`, rounded once more."""
    from polyattn_cuda.flash_attn_v3 import UpstreamFlashAttention3
    from polyattn_cuda.flashinfer import FlashInferAttention

    kind = {"FLASH_ATTN_V3": UpstreamFlashAttention3, "FLASHINFER": FlashInferAttention}[name]
    spec = SMALL.replace(out_dtype="fp8_e4m3", needs_lse=True)
    for lengths in ([(1, 17), (1, 40), (1, 1)], [(20, 20), (3, 30)], [(0, 3)]):
        work = drawn(spec, lengths, 16)
        backend, batch = kind(spec, work.group.cache_format, CPU), work.batch
        out = {}
        for dtype, scale in ((torch.float8_e4m3fn, 0.25), (work.query.dtype, 1.0)):
            got = torch.zeros(batch.num_tokens, spec.num_heads, 64).to(dtype)
            lse = torch.full(got.shape[:2], torch.nan)
            params = LayerParams(out_scale=scale)
            frame = Frame(work.query, work.key, work.value, work.held, params, got, lse)
            backend.run(backend.plan(batch), frame)
            assert lse.isfinite().all()
            out[scale] = got
        assert torch.equal(
            out[0.25].float(), (out[1.0].float() / 0.25).to(torch.float8_e4m3fn).float()
        )


@pytest.mark.parametrize("backend", ["FLASH_ATTN_V3", "FLASHINFER"])
def test_who_stores_e4m3_after_its_kernel_is_selected_by_name(backend: str) -> None:
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, out_dtype="fp8_e4m3")
    chosen = select(spec, "h100-sxm", backend=backend).decision.chosen
    assert dict(chosen)["decode"] == backend
