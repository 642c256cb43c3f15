"""Plans are values: how many are made, what they hold, and that nothing else remembers a step."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import polyattn.runtime.group
import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    register,
    select,
    unregister,
)
from polyattn.errors import BatchError
from polyattn.families.mla.workload import latent_weights
from polyattn.kernel import Frame, Plan
from polyattn.plugin import BackendInfo, Capabilities, declare
from polyattn.runtime.group import StepPlan, plan_of
from polyattn.spec.latent import LatentSpec
from polyattn.workload.base import Workload, workload
from polyattn_cpu.sdpa import TorchSDPA

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
MLA = LayerSpec(
    kind="mla", num_heads=4, head_size=24, v_head_size=16, dtype="float32",
    latent=LatentSpec(rank=32, rope_head_size=8),
)  # fmt: skip


class Counting(TorchSDPA):
    """Counts its plans and remembers who was asked to run what."""

    plans: ClassVar[int] = 0
    ran: ClassVar[list[list[int]]] = []

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        Counting.plans += 1
        return super().plan(batch, reuse)

    def run(self, plan: Plan, frame: Frame) -> None:
        Counting.ran.append(plan.batch.query_lens)
        super().run(plan, frame)


CLAIMS = Capabilities(platforms={"cpu": ()}, dtypes=frozenset({"float32"}))
COUNTING = BackendInfo(name="COUNTING", summary="", path="test_plans:Counting", capabilities=CLAIMS)
declare(__name__, api_versions=(1, 1), backends=[COUNTING])


@pytest.fixture
def group() -> Iterator[LayerGroup]:
    register(sys.modules[__name__], "counting")
    Counting.plans, Counting.ran = 0, []
    yield LayerGroup(select(SPEC, "cpu", backend="COUNTING"))
    unregister("counting")


def drawn(group: LayerGroup, lengths: list[tuple[int, int]]) -> Workload:
    """A step, and what it must give."""
    return workload(group, lengths).remembered()


def check(work: Workload, layer: Attention, plan: Any) -> None:
    work.compare(layer(*work.inputs, plan), None)


def test_two_batches_in_turn_over_four_layers_cost_two_plans(group: LayerGroup) -> None:
    layers = [Attention(group) for _ in range(4)]
    steps = [drawn(group, [(1, 20), (1, 33)]), drawn(group, [(1, 5), (1, 50), (1, 17)])]
    for layer in layers:
        for step in steps:
            check(step, layer, step.batch)  # the batch keeps its plan
    assert Counting.plans == 2


def test_a_plan_runs_as_often_as_one_likes(group: LayerGroup) -> None:
    layers = [Attention(group) for _ in range(4)]
    steps = [drawn(group, [(1, 20), (1, 33)]), drawn(group, [(3, 20), (5, 5)])]
    plans = [group.plan(step.batch) for step in steps]
    made = Counting.plans
    for _ in range(3):
        for layer in layers:
            for step, plan in zip(steps, plans, strict=True):
                check(step, layer, plan)
    assert Counting.plans == made == 2


def test_one_token_rows_reach_decode_wherever_they_stand(group: LayerGroup) -> None:
    layer = Attention(group)
    step = drawn(group, [(5, 9), (1, 30), (7, 7), (0, 4), (1, 2), (1, 17)])
    plan = group.plan(step.batch)
    calls = {call.phase: call.plan.batch for call in plan.calls}
    assert calls["decode"].all_decode and calls["decode"].lens == [30, 2, 17]
    assert calls["prefill"].query_lens == [5, 7]
    check(step, layer, plan)
    assert sorted(Counting.ran) == [[1, 1, 1], [5, 7]]


def test_a_long_mla_prefill_builds_each_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    real = polyattn.runtime.group.load_backend

    def counted(info: Any, *args: Any) -> Any:
        built.append(info.name)
        return real(info, *args)

    monkeypatch.setattr(polyattn.runtime.group, "load_backend", counted)
    monkeypatch.setattr("polyattn.families.mla.planning.EXPANDED_BYTES", 1 << 20)
    layer = LatentAttention(select(MLA, "cpu"), *latent_weights(MLA, torch.Generator()))
    size = layer.group.cache_format.block_size  # type: ignore[union-attr]
    length = 128 << 10
    table = torch.arange(length // size, dtype=torch.int32)[None]
    for _ in range(3):
        plan = layer.plan(Batch.from_lens([64], [length], table, size))
        assert len(plan.calls) > 50, "the context comes in pieces"
        causal = [call.plan.batch.causal for call in plan.calls]
        assert causal[0] and not any(causal[1:]), "the step's own tokens alone are under the mask"
        assert len({id(call.backend) for call in plan.calls}) == 1
    assert len(built) == len({"decode", "prefill", "store", "merge"})


def test_an_mla_step_of_padding_alone_needs_no_block() -> None:
    layer = LatentAttention(select(MLA, "cpu"), *latent_weights(MLA, torch.Generator()))
    none = torch.zeros(2, 0, dtype=torch.int32)
    for queries, lens in (([1, 1], [0, 0]), ([0, 0], [0, 0])):
        starts = [0, queries[0], sum(queries)]
        slots = torch.full((sum(queries),), -1)
        batch = Batch(starts, lens, none, slots)
        query = torch.randn(sum(queries), 4, 24)
        latent, rope = torch.randn(sum(queries), 32), torch.randn(sum(queries), 8)
        out = layer(query, latent, rope, layer.group.allocate_cache(1), batch)
        assert isinstance(out, torch.Tensor) and not out.any()


def test_a_sequence_without_blocks_is_named() -> None:
    layer = LatentAttention(select(MLA, "cpu"), *latent_weights(MLA, torch.Generator()))
    with pytest.raises(BatchError, match="block_table has 0 blocks of .* length 5 needs 1"):
        layer.plan(Batch([0, 5], [5], torch.zeros(1, 0, dtype=torch.int32)))


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA", "HPU_ATTN"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda batch: pickle.loads(pickle.dumps(batch))]
)
def test_a_batch_that_ran_is_copied_and_pickled_without_its_plans(
    copied: Callable[[Batch], Batch], backend: str
) -> None:
    """As an engine sends a step to its workers: plans hold a kernel's own memory."""
    layer = Attention(select(SPEC, "cpu", backend=backend))
    cache = layer.group.allocate_cache(3)
    cache.key.normal_(), cache.value.normal_()
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    batch = Batch.from_lens([3], [20], table, 16)
    rows = [torch.randn(3, heads, 32) for heads in (4, 2, 2)]
    expected = layer(*rows, cache, batch)
    assert batch.plans
    other = copied(batch)
    assert not other.plans and other.lens == batch.lens
    assert torch.equal(layer(*rows, cache, other), expected)


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copied_plan_is_another_plan_of_the_step(
    copied: Callable[[StepPlan], StepPlan], backend: str
) -> None:
    """Whose handle a compiled graph finds, when the first plan is gone."""
    layer = Attention(select(SPEC, "cpu", backend=backend))
    cache, table = layer.group.allocate_cache(3), torch.tensor([[2, 0]], dtype=torch.int32)
    rows = [torch.randn(3, heads, 32) for heads in (4, 2, 2)]
    plan = layer.plan(Batch.from_lens([3], [3], table, 16))
    expected, other = layer(*rows, cache, plan), copied(plan)
    assert int(other.handle) != int(plan.handle) and plan_of(other.handle) is other
    read = pickle.loads(pickle.dumps(plan))
    del plan
    assert torch.equal(layer(*rows, cache, other), expected)
    assert torch.equal(Attention(read.group)(*rows, cache, read), expected)


@pytest.mark.parametrize(
    ("queries", "lens", "table", "phase"),
    [
        ([3], [3], [[0, 1]], "c--"),
        ([1], [20], [[0, 1]], "--u"),
        ([3], [20], [[0, 1]], "cs-"),
        ([1, 3], [40, 40], [[0, 1, 2], [0, 1, 3]], "csu"),
    ],
)
def test_a_plan_tells_gaudis_phase(
    queries: list[int], lens: list[int], table: list[list[int]], phase: str
) -> None:
    group = LayerGroup(select(SPEC.replace(block_size=16), "cpu", backend="HPU_ATTN"))
    blocks = torch.tensor(table, dtype=torch.int32)
    plan = group.plan(Batch.from_lens(queries, lens, blocks, 16))
    assert f"HPU_ATTN (phase {phase})" in plan.explain()


def test_copies_and_parts_of_a_frame_have_every_field() -> None:
    names = [field.name for field in dataclasses.fields(Frame) if field.name != "fresh"]
    values: list[Any] = [torch.full((2, 3, 4), float(index)) for index in range(len(names))]
    frame = Frame(*values, fresh=True)
    other, first = frame.but(lse=None), frame.part(slice(0, 1))
    assert not other.fresh and not first.fresh  # the output is the frame's
    for name, value in zip(names, values, strict=True):
        assert getattr(other, name) is (None if name == "lse" else value)
        assert torch.equal(getattr(first, name)[:1], value[:1])
