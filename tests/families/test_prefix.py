"""Decodes that share blocks, by each way to read those once, against the whole in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from interpreting import interpreted
from polyattn import (
    Attention,
    BackendInfo,
    Batch,
    GraphCapture,
    LayerGroup,
    LayerSpec,
    Role,
    SharedRun,
    discover,
    register,
    select,
    unregister,
)
from polyattn.errors import BatchError
from polyattn.families.attention import sharing
from polyattn.families.attention.prefix import PrefixDecode, PrefixPlan
from polyattn.families.attention.sharing import Sharing, why_not
from polyattn.kernel import AttentionBackend, Levels, Plan
from polyattn.registry.hooks import hookimpl
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.spec.rope import RopeSpec
from polyattn.workload.base import workload
from polyattn_cpu.sdpa import TorchSDPA

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=16)
LENS = [100, 70, 68, 90, 33]
GIVEN: Levels = ((SharedRun((0, 1, 2, 3), 0, 2),), (SharedRun((0, 3), 2, 2),))
"""Two levels of blocks that rows have in common; the last row has its own alone."""


def work_of(group: LayerGroup, queries: list[int] | None = None) -> Any:
    """The decode of each sequence's last token, or so many tokens of each."""
    lengths = list(zip(queries or [1] * len(LENS), LENS, strict=True))
    return workload(group, lengths, step={"shared": GIVEN}).remembered()


def step(group: LayerGroup) -> tuple[Any, Batch]:
    """A cache that holds every sequence, and the decode without new keys."""
    work = work_of(group)
    return work.held, Batch(work.batch.starts, LENS, work.batch.block_table)


INCLUDED = [
    {}, {"learned_sinks": True}, {"logit_soft_cap": 3.0}, {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2", "learned_sinks": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", INCLUDED)
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_shared_prefixes_are_attended_to_once(
    backend: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    compare(backend, changes)


def compare(backend: str, changes: dict[str, Any], way: str = "calls") -> None:
    """Two levels of shared blocks and a row of its own, read once, against the whole."""
    spec = SPEC.replace(needs_lse=True, **changes)
    group = LayerGroup(select(spec, "cpu", backend=backend))
    work = work_of(group)
    if way == "calls":
        group.planner.sharing = Sharing(group, None, PrefixDecode.of(group))  # type: ignore[attr-defined]
    plan = group.plan(work.batch)
    (call,) = plan.calls
    assert call.saved_bytes == (3 * 2 + 2) * 16 * group.cache_format.bytes_per_token
    assert isinstance(call.plan, PrefixPlan) == (way == "calls")
    assert call.plan.batch.shared_prefix is not None or way == "calls"
    work.check(plan=plan)


@pytest.mark.slow
def test_the_interpreted_kernels_serve_both_ways() -> None:
    pytest.importorskip("triton")
    interpreted(__file__)


ROPE = RopeSpec(rotary_size=16, positions="cache")


def on_device_alone(batch: Batch) -> Batch:
    """The same batch, as if its block table weren't the host's."""
    batch = batch.copy()
    batch.__dict__["host_block_table"] = None
    return batch


def test_a_plan_says_what_is_shared_or_why_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines were the same, 141.6 us beside 1,050 on an H200."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    _, batch = step(group)
    assert group.cache_format is not None
    megabytes = (3 * 2 + 2) * 16 * group.cache_format.bytes_per_token / 1e6
    too_little = f"no shared prefix: it would save {megabytes:.3g} MB, too little"
    assert too_little in group.plan(batch).explain()
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    shared = group.plan(batch).explain()
    assert f"reads 2 shared prefixes once, which saves {megabytes:.3g} MB a layer" in shared
    unseen = group.plan(on_device_alone(batch)).explain()
    assert "unknown, because the block table is on the device only" in unseen
    apart = torch.arange(4 * 2, dtype=torch.int32).view(4, 2)
    lens = [20, 30, 9, 17]
    assert "rows share no blocks" in group.plan(Batch([0, 1, 2, 3, 4], lens, apart)).explain()
    one = Batch([0, 1], [20], apart[:1])
    assert "shared" not in group.plan(one).explain()


@pytest.mark.parametrize("name", ["a sliding window", "a bitwise batch-invariant"])
def test_a_plan_says_why_its_layers_share_nothing(name: str) -> None:
    group = LayerGroup(select(SPEC.replace(**REFUSED[name]), "cpu", backend="TORCH_SDPA"))
    assert f"no shared prefix: {name}" in group.plan(step(group)[1]).explain()


def test_a_layer_that_is_given_the_batch_finds_what_the_callers_table_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer plans a copy of its batch, which lost the caller's table."""
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    _, batch = step(group)
    host = batch.host_block_table
    told = on_device_alone(batch)
    assert not group.plan_for(told).calls[0].saved_bytes
    told = on_device_alone(batch)
    told.__dict__["host_block_table"] = host  # what the constructor does with it
    assert group.plan_for(told).calls[0].saved_bytes


REFUSED = {
    "a sliding window": {"sliding_window": 40}, "chunks": {"chunk_size": 32},
    "ALiBi": {"alibi": True}, "a bitwise batch-invariant": {"batch_invariant": True},
    "positions within the cache": {"rope": ROPE, "sliding_window": 1000},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name_is_served_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over shared blocks that aren't taken apart are right all the same."""
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    spec = SPEC.replace(**REFUSED[name])
    reason = why_not(spec)
    assert reason is not None and (name in reason or spec.rope is not None)
    work = work_of(LayerGroup(select(spec, "cpu", backend="TORCH_SDPA")))
    assert not any(isinstance(call.plan, PrefixPlan) for call in work.plan.calls)
    work.check()


def test_other_layers_are_refused_by_name() -> None:
    encoder = LayerSpec(num_heads=4, head_size=16, role=Role.ENCODER_ONLY, causal=False)
    assert "only a causal decoder" in str(why_not(encoder))


def test_looking_costs_next_to_nothing_where_nothing_is_shared() -> None:
    """256 sequences of 2,048 blocks, within a plan. The bar is 20 us; the best of many is taken."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    table = torch.randperm(256 * 2048).int().view(256, 2048)
    batch, sharing = Batch(list(range(257)), [2048 * 16] * 256, table), Sharing.of(group)
    assert sharing is not None
    best = float("inf")
    for _ in range(300):
        started = time.perf_counter()
        assert sharing.call(batch, None) is None
        best = min(best, time.perf_counter() - started)
    assert best < 20e-6, f"{best * 1e6:.1f} us"


def test_prefixes_and_rests_are_one_object() -> None:
    """The parts over shared blocks are calls over context, not a layer of their own."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    runner = PrefixDecode.of(group)
    assert runner is not None and runner.shared is runner.own


def given(batch: Batch, levels: Levels | None) -> Batch:
    """The same step as an engine gives it that has no table on the host."""
    told = Batch(batch.starts, batch.lens, batch.block_table, shared_prefix=levels)
    told.__dict__["host_block_table"] = None
    return told


def test_what_an_engine_knows_is_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Batch(shared_prefix=)` says the same as the table on the host; without either nobody looks."""
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    layer, (cache, batch) = Attention(group), step(group)
    query = torch.randn(len(LENS), 4, 16)
    found = {name: given(batch, levels) for name, levels in (("told", GIVEN), ("not", None))}
    calls = {name: group.plan(one).calls[0] for name, one in found.items()}
    assert calls["told"].saved_bytes == group.plan(batch).calls[0].saved_bytes > 0
    assert calls["not"].saved_bytes == 0 and not isinstance(calls["not"].plan, PrefixPlan)
    outs = [layer(query, None, None, cache, one) for one in (batch, found["told"])]
    assert torch.equal(*outs)


def test_a_step_of_both_phases_shares_among_its_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of one token, wherever they stand, share what is left of the runs that were given."""
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    work = work_of(group, [1, 5, 1, 1, 1])
    work.batch = work.batch.with_shared_prefix(GIVEN)
    decode = next(call for call in work.plan.calls if call.phase == "decode")
    assert decode.saved_bytes == (2 * 2 + 2) * 16 * group.cache_format.bytes_per_token
    work.check()


def test_a_run_may_not_hold_a_rows_last_token() -> None:
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    _, batch = step(group)
    with pytest.raises(BatchError, match=r"64 tokens of row 1, whose length is 64; .* own"):
        group.plan(
            Batch(
                batch.starts, [100, 64, 68, 90, 33], batch.block_table,
                shared_prefix=((SharedRun((0, 1), 0, 4),),),
            )
        )  # fmt: skip


@pytest.mark.parametrize("cost", [0.0, 1e9], ids=["shares", "shares nothing"])
def test_runs_that_the_table_contradicts_are_refused(
    cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": cost})
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    _, batch = step(group)
    table = batch.block_table.clone()
    table[GIVEN[0][0].rows[1], 0] += 1
    with pytest.raises(BatchError, match="share block 0, where block_table has"):
        group.plan(Batch(batch.starts, batch.lens, table, shared_prefix=GIVEN))


class Once(TorchSDPA):
    """Claims to read shared blocks in its own launch, and writes down what it was told."""

    name = "ONCE"
    told: ClassVar[list[Levels | None]] = []

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        self.told.append(batch.shared_prefix)
        return super().plan(batch, reuse)


@pytest.fixture
def once() -> Iterator[type[Once]]:
    """ONCE beside the others, for one test."""
    info = discover().backends["TORCH_SDPA"]
    caps = replace(
        info.capabilities, shared_prefix=True, graph_capture=GraphCapture.SINGLE_TOKEN_DECODE
    )
    mine = replace(info, name="ONCE", path="test_prefix:Once", capabilities=caps)

    class Plugin:
        @hookimpl
        def polyattn_api_versions(self) -> tuple[int, int]:
            return (1, 1)

        @hookimpl
        def polyattn_backends(self) -> list[BackendInfo]:
            return [mine]

    Once.told = []
    register(Plugin(), "once")
    yield Once
    unregister("once")


def test_a_backend_is_told_only_where_it_shall_read_once(
    once: type[Once], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own launch before calls and merges; nothing where too little is saved, or it is refused."""
    for changes, launch_us, told in (
        ({}, 0.0, GIVEN), ({}, 1e9, None), ({"sliding_window": 40}, 0.0, None),
        ({"alibi": True}, 0.0, None),
    ):  # fmt: skip
        monkeypatch.setattr("polyattn.families.attention.sharing.LAUNCH_US", {"cpu": launch_us})
        group = LayerGroup(select(SPEC.replace(**changes), "cpu", backend="ONCE"))
        _, batch = step(group)
        for one in (batch, given(batch, GIVEN)):
            group.plan(one)
            assert once.told.pop() == told, (changes, launch_us)


def sharing_of(spec: LayerSpec, matmul: float = 0.0) -> Sharing:
    """Sharing by a backend's own launch, on a device of so many TFLOP/s."""
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SDPA"))
    group.device = replace(group.device, matmul=matmul)
    native = group.backend("decode", AttentionBackend)
    return Sharing(group, native, None, appends=True)


def test_rows_of_several_tokens_share_what_lies_before_all_of_them() -> None:
    """Row 1 has its second shared block's last tokens new: the run ends where all rows' contexts do."""
    sharing = sharing_of(SPEC)
    form = sharing.group.cache_format
    assert form is not None
    batch = work_of(sharing.group, [1, 39, 4, 7, 1]).batch
    call = sharing.call(batch, None)
    assert call is not None
    levels = (
        (SharedRun((0, 1, 2, 3), 0, 1),),
        (SharedRun((0, 2, 3), 1, 1),),
        (SharedRun((0, 3), 2, 2),),
    )
    assert call.plan.batch.shared_prefix == levels
    assert call.saved_bytes == (3 + 2 + 2) * 16 * form.bytes_per_token
    sharing.appends = False
    assert sharing.call(batch, None) is None
    with pytest.raises(
        BatchError, match="row 1, whose length is 70; a row's new tokens are its own"
    ):
        batch.with_shared_prefix(GIVEN).find_shared_prefix(16)


@pytest.mark.parametrize(("matmul", "shares"), [(1e3, True), (1e-6, False)])
def test_rows_of_several_tokens_share_only_where_bytes_take_longer_than_products(
    matmul: float, shares: bool
) -> None:
    sharing = sharing_of(SPEC, matmul)
    batch = work_of(sharing.group, [4, 4, 4, 4, 4]).batch
    assert (sharing.call(batch, None) is not None) is shares


def test_a_window_saves_what_lies_within_it() -> None:
    """Rows of 100, 70, 68 and 90 tokens see 40: of blocks 0 and 1, rows 1 and 2 the second alone."""
    sharing = sharing_of(SPEC.replace(sliding_window=40))
    form = sharing.group.cache_format
    assert form is not None
    call = sharing.call(step(sharing.group)[1], None)
    assert call is not None
    # Of blocks 2 and 3, which rows 0 and 3 share, both see the second alone.
    assert call.saved_bytes == (1 + 1) * 16 * form.bytes_per_token


class Device:
    """A step whose table lies as if on a device: says how often it was read back."""

    def __init__(self, batch: Batch, monkeypatch: pytest.MonkeyPatch):
        self.batch, self.count = batch, 0
        read = Batch.read_block_table

        def counted(step: Batch) -> None:
            self.count += 1
            read(step)

        monkeypatch.setattr(Batch, "read_block_table", counted)
        monkeypatch.setattr(sharing, "CALL_US", {"cpu": 0.0})
        monkeypatch.setattr(sharing, "READ_BACK_US", {"cpu": 0.0})

    def steps(self, group: LayerGroup, count: int = 1, batch: Batch | None = None) -> list[bool]:
        """Plan so many steps; return for each whether its table was read."""
        read = []
        for _ in range(count):
            before = self.count
            group.plan(on_device_alone(batch or self.batch))
            read.append(self.count > before)
        return read


def test_a_table_on_the_device_is_read_back_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 x (32k shared + 512) took 1,050 us on an H200, 141.6 where the caller gave the table."""
    groups = [LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA")) for _ in range(2)]
    (cache, batch), told = step(groups[0]), step(groups[0])[1]
    device = Device(batch, monkeypatch)
    unread = on_device_alone(batch)
    plans = [group.plan_for(unread) for group in groups]
    assert device.count == 1
    assert [plan.explain() for plan in plans] == [groups[0].plan(told).explain()] * 2
    assert "reads 2 shared prefixes once" in plans[0].explain()
    query = torch.randn(len(LENS), 4, 16)
    layer = Attention(groups[0])
    assert torch.equal(*(layer(query, None, None, cache, one) for one in (plans[0], told)))
    starts = [0, 1, 6, 7, 8, 9]  # a step of both phases
    mixed = groups[0].plan(on_device_alone(Batch(starts, LENS, batch.block_table)))
    assert sum(call.saved_bytes for call in mixed.calls) and device.count == 2


def test_after_tables_of_distinct_blocks_steps_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    _, batch = step(group)
    device = Device(batch, monkeypatch)
    apart = Batch(batch.starts, LENS, torch.arange(35, dtype=torch.int32).view(5, 7))
    read = device.steps(group, 200, apart)
    assert [i for i, each in enumerate(read) if each] == [0, 2, 5, 10, 19, 36, 69, 134, 199]
    assert device.steps(group, 65)[-1] and all(device.steps(group, 5))
    always = LayerGroup(select(SPEC.replace(deterministic=True), "cpu", backend="TORCH_SDPA"))
    assert all(device.steps(always, 5, apart))  # steps don't depend on those before them


@pytest.mark.parametrize("why", ["short", "told", "bounds", "captured", "capturing", "elsewhere"])
def test_what_could_not_pay_or_may_not_wait_is_not_read_back(
    why: str, once: type[Once], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the caller said not to: an empty `shared_prefix`, or torch's own setting on CUDA."""
    changes = {"graph_capture": "single_token_decode"} if why == "captured" else {}
    group = LayerGroup(select(SPEC.replace(**changes), "cpu", backend="ONCE"))
    _, batch = step(group)
    device = Device(batch, monkeypatch)
    unread = on_device_alone(batch)
    assert why == "captured" or device.steps(group) == [True]
    if why == "short":  # two rows whose shorter one has no block but its own token's
        unread = on_device_alone(Batch([0, 1, 2], [16, 90], batch.block_table[:2]))
    if why == "told":
        unread = unread.with_shared_prefix(())
    if why == "bounds":
        unread.lens_are_bounds = True
    if why == "capturing":
        monkeypatch.setattr(sharing, "capturing", lambda tensor: True)
    if why == "elsewhere":
        monkeypatch.setattr(sharing, "READ_BACK_US", {"cuda": 0.0})
    assert device.steps(group, 1, unread) == [False]


def test_captured_steps_share_where_they_were_captured_to(once: type[Once]) -> None:
    """A plan that was captured without stays without; one with gets each step's forest, deep or none."""
    spec = SPEC.replace(graph_capture="single_token_decode")
    group = LayerGroup(select(spec, "cpu", backend="ONCE"))
    _, batch = step(group)
    for shares, told in ((False, None), (True, GIVEN)):
        buffers = StepBuffers(8, 1, 112, 16, "cpu", sharing=shares)
        captured = group.plan(buffers.batch([112] * 8))
        assert once.told.pop() == (() if shares else None)
        for one in (batch, given(batch, GIVEN)):
            plan = group.plan(buffers.fill(one), reuse=captured)
            assert once.told.pop() == told and plan.calls[0].backend is captured.calls[0].backend
        group.plan(buffers.fill(given(batch, None)), reuse=captured)
        assert once.told.pop() == (() if shares else None)
    nothing = torch.zeros(2, 0, dtype=torch.int32)
    (call,) = group.plan(Batch([0, 1, 2], [0, 0], nothing, shared_prefix=())).calls
    assert call.backend.name == "ONCE" and call.plan.batch.block_table.shape == (2, 1)


if __name__ == "__main__":
    sharing.CALL_US = sharing.LAUNCH_US = {"cpu": 0.0}
    SPEC = SPEC.replace(head_size=32)
    for features in (
        {},
        {"learned_sinks": True, "logit_soft_cap": 3.0},
        {"kv_cache_dtype": "int8"},
    ):
        for chosen in ("calls", "own launch"):
            compare("TRITON_ATTN", features, chosen)
