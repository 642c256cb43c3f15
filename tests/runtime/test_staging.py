"""Do a captured step's numbers reach the device as they were put, however late the device copies them?"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from late_device import LateDevice
from polyattn import Attention, Batch, LayerGroup, LayerSpec
from polyattn.errors import BatchError
from polyattn.families.attention.sharing import Sharing
from polyattn.runtime.graphs import cuda_graph
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.runtime.step.staging import MOST_TOGETHER, SHEETS, Staging

CPU = torch.device("cpu")
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)


class Device(LateDevice):
    """To which numbers go in one launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        together, device = torch._foreach_copy_, self

        def late(goals: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            device.do(lambda: together(goals, sources))

        monkeypatch.setattr(torch, "_foreach_copy_", late)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of: None)

    def staging(self, size: int) -> Staging:
        staging = Staging(CPU, size)
        staging._event = self.event
        return staging


def test_numbers_on_their_way_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    staging, seen = device.staging(16), []
    room = staging.room(3)
    for step in range(6 * SHEETS):
        staging.put(room, np.array([step, step + 10, step + 20]))
        staging.send()
        device.do(lambda: seen.append(room.tolist()))
        if step == 2 * SHEETS:
            device.run(2 * SHEETS + 1)  # the first book's copies, some of the second's
    device.run()
    assert seen == [[step, step + 10, step + 20] for step in range(6 * SHEETS)]
    assert len(staging._books) == 4  # and the one in use: the first served again


def test_what_lies_side_by_side_goes_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    staging = device.staging(32)
    first, second, third = (staging.room(n) for n in (5, 1, 4))
    for room in (first, second, third):
        assert (room.data_ptr() - first.data_ptr()) % 16 == 0
        staging.put(room, np.full(len(room), len(room)))
    staging.send()
    assert len(device.queue) == 1
    device.run()
    staging.put(first, np.array([7]))
    staging.put(third, np.array([8, 9]))
    staging.send()
    assert len(device.queue) == 1  # the second room stays as it is
    device.run()
    assert first[:1].tolist() == [7] and second.tolist() == [1] and third[:2].tolist() == [8, 9]


def test_a_room_beyond_the_size_is_copied_to_apart() -> None:
    staging = Staging(CPU, 4)
    near, far = staging.room(4), staging.room(9)
    for room in (near, far):
        staging.put(room, np.arange(len(room)))
    staging.send()
    assert near.tolist() == [0, 1, 2, 3] and far.tolist() == list(range(9))


@pytest.mark.parametrize("sends", [False, True])
def test_rooms_may_come_after_numbers(sends: bool) -> None:
    staging = Staging(CPU, 64)
    first = staging.room(2)
    staging.put(first, np.array([1, 2]))
    if sends:
        staging.send()
    second = staging.room(20)
    staging.put(second, np.arange(20))
    staging.send()
    assert first.tolist() == [1, 2] and second.tolist() == list(range(20))


def graph_of(monkeypatch: pytest.MonkeyPatch, rows: int, groups: int = 1) -> cuda_graph.StepGraph:
    class Unlaunched:
        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Unlaunched)
    monkeypatch.setattr(LayerGroup, "check", lambda *_: None)  # a CPU's backends aren't captured
    layers = [Attention(LayerGroup(SPEC)) for _ in range(groups)]
    graph = cuda_graph.StepGraph(
        [layer.group for layer in layers], print, StepBuffers(rows, 1, 48, 16, CPU)
    )
    graph.plans = {g: g.plan(g.planner.own(graph.buffers.longest())) for g in graph.groups}
    _, graph.form = cuda_graph.tree_flatten(torch.zeros(1))
    graph.results = [torch.zeros(rows)]
    return graph


def test_replays_in_a_row_each_read_their_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer rows, other lengths and other tables' widths, while the device is steps behind."""
    graph = graph_of(monkeypatch, 4, groups=2)
    device = Device(monkeypatch)
    buffers, seen = graph.buffers, []
    buffers.staging._event, buffers.staging._book = device.event, None
    monkeypatch.setattr(
        graph.graph, "replay", lambda: device.do(lambda: seen.append(buffers.seq_lens.tolist()))
    )
    steps = [[9, 40, 3, 1], [10, 41], [48], [11, 42, 4, 2], [12], [1, 2, 3]]
    for lens in steps:
        width = -(-max(lens) // 16)
        table = torch.ones(len(lens), width, dtype=torch.int32)
        graph.replay(Batch(list(range(len(lens) + 1)), lens, table), {})
    assert not seen
    device.run()
    assert seen == [lens + [0] * (4 - len(lens)) for lens in steps]


@pytest.mark.parametrize("reads", [False, True])
def test_a_plan_that_reads_tensors_finds_its_step_there(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(monkeypatch, 2)
    graph.reads_tensors, buffers, seen = reads, graph.buffers, []
    monkeypatch.setattr(
        graph.groups[0].planner,
        "refill",
        lambda step, batch: seen.append((batch.seq_lens.tolist(), batch.block_table.tolist())),
    )
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    graph.replay(Batch([0, 1, 2], [8, 40], table), {})
    there = [8, 40], table.tolist()
    assert (seen == [there]) == reads
    assert (buffers.seq_lens.tolist(), buffers.block_table.tolist()) == there


def test_a_refused_step_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths, put and not sent, would overwrite those that the next one's device has."""
    graph = graph_of(monkeypatch, 2)
    table, buffers = torch.ones(2, 3, dtype=torch.int32), graph.buffers
    slots = torch.tensor([3, 4])
    graph.replay(Batch([0, 1, 2], [8, 6], table, slots), {})
    held = [t.clone() for t in (buffers.seq_lens, buffers.block_table, buffers.slots)]

    def refuse(*_: object) -> None:
        raise BatchError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(graph.groups[0].planner, "refill", refuse)
        with pytest.raises(BatchError, match="refused"):
            graph.replay(Batch([0, 1, 2], [9, 9], 2 * table, 2 * slots), {})
    now = buffers.seq_lens, buffers.block_table, buffers.slots
    assert all(torch.equal(new, old) for new, old in zip(now, held, strict=True))
    on_device = torch.tensor([5, 7], dtype=torch.int32)
    graph.replay(Batch([0, 1, 2], on_device, table), {})
    assert graph.buffers.seq_lens.tolist() == [5, 7]


def test_short_tensors_are_copied_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are and however they lie, goals hold what sources hold."""
    launches: list[int] = []
    together = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda a, b: (launches.append(len(a)), together(a, b))
    )
    buffers = StepBuffers(4, 1, 8 * 16, 16, CPU, axes=1)
    graph_reads = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.bfloat16)
    for rows, width, apart, expected in (
        (4, 8, False, [4, 1]),
        (1, 5, False, [4, 1]),  # one row lies as if it were whole
        (3, 5, False, [3, 1]),
        (2, 8, True, [3]),
    ):
        numbers = torch.arange(rows * 2 if apart else rows) + rows
        ids = numbers[::2] if apart else numbers
        hidden = torch.randn(3, rows).bfloat16().T if apart else torch.randn(rows, 3).bfloat16()
        table = torch.arange(rows * width, dtype=torch.int32).reshape(rows, width) + 1
        step = Batch(list(range(rows + 1)), [60] * rows, table, ids.clone(), positions=ids + 7)
        launches.clear()
        pairs = [
            (buffers.first(goal, rows), source)
            for goal, source in zip(graph_reads, (ids, hidden), strict=True)
        ]
        buffers.copy(step, pairs)
        assert launches == expected
        assert graph_reads[0][:rows].equal(ids) and graph_reads[1][:rows].equal(hidden)
        assert buffers.block_table[:rows, :width].equal(table)
        assert buffers.slot_mapping[:rows].equal(ids) and (buffers.slot_mapping[rows:] == -1).all()
        assert buffers.positions[:rows].equal(ids + 7)


@pytest.mark.parametrize("beyond", [-1, 0, 1, MOST_TOGETHER + 5])
def test_long_numbers_go_in_pieces(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another dtype, beside them, what is short goes in a launch of its own, what is long alone."""
    count, launches, together = MOST_TOGETHER + beyond, list[int](), torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda a, b: (launches.append(len(a)), together(a, b))
    )
    staging = Staging(CPU, 3 * MOST_TOGETHER)
    room = staging.room(count)
    for first in (5, 9):  # the second time, its views are known
        launches.clear()
        staging.put(room, np.arange(first, first + count))
        goal, source = torch.zeros(count), torch.randn(count)
        staging.send([(goal, source)])
        assert room.equal(torch.arange(first, first + count, dtype=torch.int32))
        assert goal.equal(source)
    assert launches == [1] * (beyond <= 0) + [-(-count // MOST_TOGETHER)]


def test_a_staged_step_s_prefixes_are_planned_before_its_table_is_there() -> None:
    """The buffers' table is the step's before: nothing is shared there."""
    buffers = StepBuffers(2, 1, 64, 16, CPU, sharing=True)
    buffers.fill(Batch([0, 1, 2], [40, 40], torch.tensor([[1, 2, 3], [4, 5, 6]]).int()))
    table = torch.tensor([[7, 8, 9], [7, 8, 10]], dtype=torch.int32)
    filled, planned = buffers.stage(Batch([0, 1, 2], [40, 44], table)), []
    backend = SimpleNamespace(plan=lambda batch, reuse: planned.append(batch.shared_prefix))
    Sharing.refill(
        SimpleNamespace(block_size=16), SimpleNamespace(backend=backend, plan=None), filled
    )
    ((level,),) = planned
    assert [(run.first, run.count, list(run.rows)) for run in level] == [(0, 2, [0, 1])]
