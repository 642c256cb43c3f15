"""Does a replay refuse what its eager step refuses? Its buffers hold an earlier step's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    CustomMask,
    LayerGroup,
    LayerSpec,
    Recurrent,
    RecurrentSpec,
    StepSize,
)
from polyattn.errors import BatchError
from polyattn.runtime.graphs.cuda_graph import StepGraph, StepGraphs
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
TABLE = torch.arange(6, dtype=torch.int32).view(2, 3)
INPUTS = {
    "query": torch.zeros(2, 4, 32),
    "key": torch.zeros(2, 2, 32),
    "value": torch.zeros(2, 2, 32),
}


class Recording:
    """Stands for a CUDA graph, whose replay a refused step must not reach."""

    def replay(self) -> None:
        pytest.fail("the step was replayed")


def captured(
    monkeypatch: pytest.MonkeyPatch, layer: Any, inputs: dict[str, torch.Tensor]
) -> StepGraph:
    """A graph of one layer, of four rows, as a capture leaves it."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    form = layer.group.cache_format
    graph = StepGraph([layer.group], print, StepBuffers(4, 1, 48, form and 16, "cpu"))
    graph.inputs = {name: t.new_zeros(4, *t.shape[1:]) for name, t in inputs.items()}
    return graph


def of(table: torch.Tensor | None = TABLE, lens: tuple[int, int] = (9, 40), **more: Any) -> Batch:
    return Batch([0, 1, 2], lens, table, **more)


@pytest.mark.parametrize(
    ("batch", "inputs", "says"),
    [
        (of(None), INPUTS, "the batch has no block_table"),
        (of(TABLE[:, :2].contiguous()), INPUTS, "block_table has 2 blocks of 16 a sequence"),
        (Batch.from_lens([1, 1], [3, 4], TABLE, 8), INPUTS, "block_size=8"),
        (of(mask=CustomMask.tree([[-1], [-1]])), INPUTS, "a mask of kind 'custom'"),
        (of(inputs={"bias": torch.ones(2)}), INPUTS, "inputs can't be replayed"),
        (of(key_starts=[1, 2]), INPUTS, "key_starts are for keys that are passed whole"),
        (of(), {"query": INPUTS["query"]}, r"inputs are \['query'\]"),
        (of(), INPUTS | {"bias": torch.zeros(2)}, r"the captured step takes \['key', 'query'"),
        (of(), INPUTS | {"query": torch.zeros(1, 4, 32)}, r"query is \(1, 4, 32\)"),
        (of(), INPUTS | {"key": torch.zeros(2, 1, 32)}, r"key is \(2, 1, 32\)"),
        (of(), INPUTS | {"value": INPUTS["value"].double()}, "value is .* of torch.float64"),
    ],
)
def test_a_replay_refuses_what_eager_steps_refuse(
    monkeypatch: pytest.MonkeyPatch, batch: Batch, inputs: dict[str, torch.Tensor], says: str
) -> None:
    graph = captured(monkeypatch, Attention(LayerGroup(SPEC)), INPUTS)
    with pytest.raises(BatchError, match=says):
        graph.replay(batch, inputs)


def test_a_replayed_recurrence_needs_its_slots_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = RecurrentSpec(conv_width=4)
    spec = LayerSpec(kind="short_conv", num_heads=8, head_size=1, dtype="float32", recurrent=conv)
    inputs = {"x": torch.zeros(2, 8)}
    graph = captured(monkeypatch, Recurrent(spec, weight=torch.ones(8, 4)), inputs)
    with pytest.raises(BatchError, match="has no state_slots"):
        graph.replay(of(None), inputs)
    graph.buffers = StepBuffers(1, 2, 48, None, "cpu", state_targets=True)
    slots, targets = torch.tensor([0]), torch.tensor([[1]])  # one for two tokens
    step = Batch([0, 2], [9], state_slots=slots, state_targets=targets)
    with pytest.raises(BatchError, match="state_targets has room for 1 tokens"):
        graph.replay(step, inputs)


def test_a_step_goes_where_its_kind_was_captured() -> None:
    """As many rows and tokens may be other prompts and decodes, which the captured calls don't take."""
    group, table = LayerGroup(SPEC), torch.arange(6, dtype=torch.int32).view(2, 3)
    captured, other = (Batch([0, 3, 4], [5, 9], table) for _ in range(2))
    captured.num_contexts, other.num_contexts = 1, 2
    plan = group.plan(captured)
    assert [call.phase for call in plan.calls] == ["decode", "prefill"]
    with pytest.raises(BatchError, match="has none for decode, where <Batch: 1 .*> was captured"):
        group.plan(other, reuse=plan)


@pytest.mark.parametrize("positions", [None, torch.tensor([7, 3])])
def test_mixed_buffers_have_text_positions_on_every_axis(positions: torch.Tensor | None) -> None:
    buffers = MixedBuffers(StepSize(rows=2, prompts=1, prompt_tokens=4), 48, 16, "cpu", axes=3)
    step = buffers.fill(of(positions=positions))
    wanted = [8, 39] if positions is None else positions.tolist()
    assert step.positions is not None
    assert step.positions[:, -2:].tolist() == [wanted] * 3


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_buffers_hold_one_step_whatever_the_last_one_had(query_len: int, on_device: bool) -> None:
    buffers = StepBuffers(4, query_len, 48, 16, "cpu", axes=1)
    padding = 0 if query_len == 1 else query_len
    copied = torch.zeros(2)
    for lens, stores in (
        ([9, 40, 5, 7], "both"), ([33, 12], "both"), ([8, 2, 30], "both"), ([8, 2, 30], "slots"),
        ([8, 2, 30], "states"), ([8, 2, 30, 4], "neither"), ([3, 3], "neither"),
    ):  # fmt: skip
        count, room = len(lens), 4 - len(lens)
        starts, table = list(range(0, count * query_len + 1, query_len)), torch.ones(count, 3).int()
        given = torch.tensor(lens, dtype=torch.int32) if on_device else lens
        slots = torch.arange(count * query_len) if stores in ("both", "slots") else None
        states = torch.arange(count) if stores in ("both", "states") else None
        batch = Batch(starts, given, table, slots, state_slots=states)
        step = buffers.fill(batch, [(copied, torch.tensor([len(lens), 1.0]))])
        assert step.lens == step.host_lens.tolist() == step.seq_lens.tolist()
        assert step.lens == lens + [padding] * room
        assert step.seq_lens.data_ptr() == buffers.seq_lens.data_ptr()
        assert step.max_seq_len == max(lens)
        assert step.block_table is not None
        assert step.block_table.sum(1).tolist() == [3] * count + [0] * room
        for held, wanted, each in (
            (step.slot_mapping, slots, query_len),
            (step.state_slots, states, 1),
        ):
            assert held is not None
            numbers = [-1] * (count * each) if wanted is None else wanted.tolist()
            assert held.tolist() == numbers + [-1] * (room * each)
        assert copied.tolist() == [len(lens), 1]


def test_graphs_are_captured_on_their_groups_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own stream of captures is of the device that the process captured on first."""
    group, said, current = LayerGroup(SPEC), [], ["cuda:0"]
    group.torch_device = torch.device("cuda", 1)

    @contextmanager
    def entered(what: object, *more: object) -> Iterator[None]:
        said.append((current[0], what, *more))
        before, current[0] = current[0], str(what) if isinstance(what, torch.device) else current[0]
        yield
        current[0] = before

    def new_stream() -> object:
        said.append((current[0], "stream"))
        return stream

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "CUDAGraph": Recording, "graph_pool_handle": lambda: "pool", "device": entered,
        "Stream": new_stream, "stream": entered,
        "current_stream": lambda: stream, "graph": entered,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = StepGraphs([group], lambda plans: None, [], 48)
    graphs.graphs = [StepGraph([], lambda plans: None, StepBuffers(4, 1, 48, 16, "cpu"))] * 2
    graphs.capture({})
    one = [("cuda:1", stream), ("cuda:1", graphs.graphs[0].graph, "pool", stream)]
    assert said == [("cuda:0", group.torch_device), ("cuda:1", "stream"), *one, *one]
