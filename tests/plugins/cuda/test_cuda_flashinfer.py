"""FlashInfer's adapter by value and by its wrappers, over a fake that binds signatures and computes."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import check_given, check_paged, drawn, run
from builds import CPU, HALF, SMALL
from polyattn import LayerSpec
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.kernel import BatchError, Frame, LayerParams
from polyattn.workload.base import workload
from polyattn.workload.compare import output_error

pytest.importorskip("triton")

FLASHINFER = {
    "causal": {},
    "window": {"sliding_window": 7},
    "non causal": {"causal": False},
    "soft cap": {"logit_soft_cap": 5.0},
    "ratio of 5": {"num_heads": 10},
    "ratio of 7": {"num_heads": 14},
    "one group": {"num_kv_heads": 6},
    "size 192": {"head_size": 192},
    "small scale": {"scale": 1e-6},
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

    for scale in (0.0, 6e-4, 1e-4):
        spec = SMALL.replace(kv_cache_dtype="fp8_e4m3", scale=scale)
        check_paged(FlashInferAttention, spec, 8, HALF)
    expanded = SMALL.replace(num_kv_heads=6, head_size=192, v_head_size=128)
    check_given(FlashInferAttention, expanded, HALF)


@pytest.mark.parametrize(("size", "split"), [(64, True), (128, True), (192, False), (320, False)])
def test_keys_are_split_only_where_the_library_merges_the_parts(size: int, split: bool) -> None:
    """Seen on an H200: of heads of 192 it merges none, and raises where it has split keys."""
    from polyattn_cuda.flashinfer import FlashInferAttention

    backend = FlashInferAttention(SMALL.replace(head_size=size), None, CPU)
    assert backend.options["disable_split_kv"] is not split


def flashinfer_over(work: AttentionWorkload, spec: LayerSpec = SMALL) -> Any:
    from polyattn_cuda.flashinfer import FlashInferAttention

    return FlashInferAttention(spec, work.group.cache_format, CPU)


def decodes(*lens: int) -> AttentionWorkload:
    return drawn(SMALL, [(1, n) for n in lens], 8)


@pytest.mark.parametrize(
    ("queries", "kernel"), [([4, 5], "fa2"), ([4, 17], "auto")], ids=["short rows", "a prompt"]
)
def test_rows_of_a_few_tokens_have_the_kernel_that_splits_keys(
    queries: list[int], kernel: str, fakes: None
) -> None:
    work = drawn(SMALL, list(zip(queries, [17, 30], strict=True)), 16)
    wrapper = flashinfer_over(work).plan(work.batch).lease.wrapper
    assert wrapper.made["backend"] == kernel and wrapper.planned["causal"] is True


@pytest.mark.parametrize(
    ("kv_heads", "window", "kernel"),
    [(4, None, "decode"), (1, None, "prefill by fa2"), (4, 64, "prefill by fa2")],
)
def test_decodes_on_cuda_cores_read_what_a_window_hides(
    kv_heads: int, window: int | None, kernel: str, fakes: None
) -> None:
    spec = LayerSpec(
        num_heads=4, num_kv_heads=kv_heads, head_size=64, dtype="bfloat16", sliding_window=window
    )
    work = drawn(spec, [(1, 9)])
    plan = flashinfer_over(work, spec).plan(work.batch)
    assert plan.lease.wrapper.kernel() == kernel


def test_fp8_is_read_from_pages_by_the_fa2_kernel(fakes: None) -> None:
    """A prompt's own keys, too: the cache's are the rounded ones."""
    spec = SMALL.replace(kv_cache_dtype="fp8_e4m3")
    work = drawn(spec, [(4, 4), (20, 20)], 16)
    wrapper = flashinfer_over(work, spec).plan(work.batch).lease.wrapper
    assert wrapper.made["backend"] == "fa2" and "Paged" in type(wrapper).__name__
    assert wrapper.planned["kv_data_type"] == torch.float8_e4m3fn


def test_a_prompt_without_context_is_attended_to_as_it_comes(
    fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step's second layer finds it planned."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper as Ragged

    calls: list[tuple[str, dict[str, Any]]] = []
    bind = Ragged.bind

    def spy(wrapper: Any, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
        calls.append((method, bind(wrapper, method, args, kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(Ragged, "bind", spy)
    work = drawn(SMALL, [(20, 20)], 16)
    backend = flashinfer_over(work)
    plan = backend.plan(work.batch)
    for _ in range(2):
        assert run(work, backend, plan)[0] < HALF
    assert [method for method, _ in calls] == ["__init__", "plan", "run", "run"]
    assert work.key is not None and work.value is not None
    places = work.key.data_ptr(), work.value.data_ptr()
    assert all((a["k"].data_ptr(), a["v"].data_ptr()) == places for _, a in calls[2:])


def test_keys_that_were_stored_before_are_read_from_their_pages(fakes: None) -> None:
    """A prompt's: nothing is copied out of the cache, in this layer and in the plan's next."""
    work = drawn(SMALL, [(53, 53)], 8)
    backend = flashinfer_over(work)
    plan = backend.plan(work.batch)
    assert plan.keys is not None
    for layer in (work, workload(work.layer, work.lengths, 1, step={"like": work}).remembered()):
        assert run(layer, backend, plan, given=False)[0] < HALF
        assert "Paged" in type(plan.lease.wrapper).__name__


def test_an_output_may_be_some_heads_of_a_wider_tensor(fakes: None) -> None:
    """An H100 wrote wrong rows and beside them: the library takes an address, not strides."""
    work = decodes(9, 30)
    backend, query, held = flashinfer_over(work), work.query, work.held
    wide = torch.full((4, SMALL.num_heads + 3, 64), 7.0).half()
    out = wide[1:-1, 1:-2]
    backend.run(backend.plan(work.batch), Frame(query, None, None, held, LayerParams(), out, None))
    assert output_error(out, work.expected[0]) < HALF
    out.fill_(7.0)
    assert bool((wide == 7).all())


def test_a_wrapper_comes_back_with_its_plan(fakes: None) -> None:
    work = decodes(9, 4)
    backend = flashinfer_over(work)
    first, second = backend.plan(work.batch), backend.plan(work.batch.copy())
    assert first.lease.wrapper is not second.lease.wrapper and not backend.pool.idle
    before = first.lease.wrapper
    del first
    gc.collect()
    assert [lease.wrapper for _, lease in backend.pool.idle] == [before]
    third = backend.plan(work.batch.copy())
    assert third.lease.wrapper is before and third.lease.wrapper is not second.lease.wrapper
    backend.prepare(("decode",))  # one token, and a row of two
    backend.prepare(("prefill",))
    gc.collect()
    assert {kind for kind, _ in backend.pool.idle} == {"decode", "short", "paged"}


def test_a_wrapper_in_flight_is_left_alone(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is copied from page-locked memory when the device gets there, not the current one."""
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    work = decodes(9)
    backend = flashinfer_over(work)
    plan = backend.plan(work.batch)
    before, waits, streams = plan.lease.wrapper, [], []
    plan.lease.copied = SimpleNamespace(
        query=lambda: False, synchronize=lambda: waits.append(1), record=streams.append
    )
    again = backend.plan(plan.batch, plan)  # a captured graph's: it has no other buffers
    assert again.lease.wrapper is before and waits and streams == [str(backend.torch_device)]
    lease = plan.lease
    del plan, again
    gc.collect()
    other = backend.plan(work.batch.copy())
    assert other.lease is not lease and backend.pool.idle[0][1] is lease


def test_a_captured_steps_buffers_are_refilled(fakes: None) -> None:
    longest, step, longer = decodes(64, 64), decodes(9, 30).batch, decodes(64, 65).batch
    backend = flashinfer_over(longest, SMALL.replace(graph_capture="single_token_decode"))
    captured = backend.plan(longest.batch)
    made = captured.lease.wrapper.made
    assert made["use_cuda_graph"] and len(made["paged_kv_indices_buffer"]) == 16
    replayed = backend.plan(step, captured)
    assert replayed.lease is captured.lease
    planned = captured.lease.wrapper.planned
    assert planned["last_page_len"].tolist() == [1, 6]
    # Pages are gathered where the capture's were: a replay allocates none.
    table = step.block_table
    assert planned["indices"].tolist() == [*table[0, :2].tolist(), *table[1, :4].tolist()]
    assert captured.lease.room.pages[:6].tolist() == planned["indices"].tolist()
    with pytest.raises(BatchError, match="17 pages, its captured graph room for 16"):
        backend.plan(longer, captured)
    aside = backend.plan(step)  # an eager step of this size beside it
    assert aside.lease is not captured.lease


@pytest.mark.parametrize(
    "case", ["causal", "window", "soft cap", "ratio of 5", "one group", "captured"]
)
def test_no_step_is_planned_for_what_was_not_compiled_before(case: str, fakes: None) -> None:
    """Each kernel's first plan compiles for minutes: all are planned for when the group is built."""
    import flashinfer
    from polyattn_cuda.flashinfer import FlashInferAttention

    spec = SMALL.replace(**FLASHINFER[case])
    backend = FlashInferAttention(spec, drawn(spec, [(1, 1)], 8).group.cache_format, CPU)
    flashinfer.MODULES.clear()
    backend.prepare(("decode", "prefill"))
    compiled = set(flashinfer.MODULES)
    steps = [
        [(20, 20), (30, 30)], [(20, 20), (30, 60)], [(1, 9), (40, 40)], [(1, 9), (1, 33)],
        [(4, 9), (2, 33)], [(3, 3)], [(17, 64)],
    ]  # fmt: skip
    for lengths in steps:
        batch = drawn(spec, lengths, 8).batch
        backend.plan(batch)
        if spec.sliding_window is None:
            backend.plan(batch.over_context())
    assert compiled and set(flashinfer.MODULES) == compiled


def test_scratch_holds_the_parts_of_large_groups(
    monkeypatch: pytest.MonkeyPatch, fakes: None
) -> None:
    """An H200 refused rows of several tokens in groups of 16: 276,824,064 bytes of 128 MiB."""
    import torch
    from polyattn_cuda.flashinfer import scratch_bytes
    from polyattn_cuda.flashinfer_wrappers import WORKSPACE_BYTES

    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    device = torch.device("cuda", 0)
    spec = LayerSpec(num_heads=32, num_kv_heads=2, head_size=128)
    assert 276_824_064 + 132 * 2 * 128 * 16 * 4 < scratch_bytes(spec, device) < 400 << 20
    assert scratch_bytes(spec.replace(num_kv_heads=8), device) == WORKSPACE_BYTES
