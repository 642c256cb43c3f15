"""Captured steps of recurrences whose states go elsewhere: buffers, refusals, and the interpreted kit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kits import conforms
from polyattn import Batch, Device, LayerGroup, LayerSpec, StepSize, discover, select
from polyattn.errors import BatchError
from polyattn.registry.capabilities import check
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.spec.recurrent import RecurrentSpec

GDN = LayerSpec(
    kind="gdn", num_heads=2, num_kv_heads=2, head_size=16, dtype="float32",
    recurrent=RecurrentSpec(state_size=16),
)  # fmt: skip
RING = LayerSpec(
    kind="short_conv", num_heads=8, head_size=1, dtype="float32",
    recurrent=RecurrentSpec(conv_width=4, draft_tokens=2),
)  # fmt: skip


def drafted(targets: list[Any]) -> Batch:
    return Batch.from_lens(
        [2, 2], [9, 2], state_slots=torch.tensor([5, 6]), state_targets=torch.tensor(targets)
    )


def test_buffers_hold_each_tokens_target_and_nowhere_behind() -> None:
    buffers = StepBuffers(3, 2, 64, None, "cpu", padding_rows=True, state_targets=True)
    assert buffers.state_targets is not None
    filled = buffers.fill(drafted([[0, 1], [2, 6]]))
    assert filled.state_targets is buffers.state_targets
    assert buffers.state_targets.tolist() == [[0, 1], [2, 6], [-1, -1]]
    buffers.fill(drafted([7, 8]))  # each sequence's: after its last token
    assert buffers.state_targets.tolist() == [[-1, 7], [-1, 8], [-1, -1]]
    assert filled.lens == [9, 2, 0] and buffers.state_slots.tolist() == [5, 6, -1]


def test_a_graph_serves_steps_with_targets_or_without() -> None:
    plain = Batch.from_lens([2, 2], [9, 2], state_slots=torch.tensor([5, 6]))
    for with_targets in (True, False):
        buffers = StepBuffers(3, 2, 64, None, "cpu", state_targets=with_targets)
        assert buffers.fits(drafted([[0, 1], [2, 6]])) is with_targets
        assert buffers.fits(plain) is not with_targets


def test_who_cannot_says_so() -> None:
    size = StepSize(4, 2, state_targets=True)
    slow = LayerGroup(select(GDN, "cpu", backend="TORCH_SCAN")).planner.size_problem(size)
    assert slow is not None and "TORCH_SCAN" in slow and "takes no state_targets" in slow
    planner = LayerGroup(select(GDN, "cpu", backend="NATIVE_SCAN")).planner
    assert planner.size_problem(size) is None and planner.padding_rows
    assert planner.size_problem(StepSize(4, 2)) is None


def test_a_state_with_room_for_drafts_has_no_targets_of_tokens() -> None:
    """In one graph with layers that have: its own plan goes without, and a moved state is refused."""
    group = LayerGroup(select(RING, "cpu", backend="TORCH_SCAN"))
    planner, by_token = group.planner, drafted([[0, 1], [2, 6]])
    assert planner.size_problem(StepSize(4, 2, state_targets=True)) is None
    assert planner.own(by_token).state_targets is None and by_token.state_targets is not None
    assert planner.replay_problem(by_token) is None
    assert "doesn't move" in str(planner.replay_problem(drafted([7, 8])))


def test_a_captured_plan_is_of_its_own_kind() -> None:
    group = LayerGroup(select(GDN, "cpu", backend="NATIVE_SCAN"))
    plain = Batch.from_lens([2, 2], [9, 2], state_slots=torch.tensor([5, 6]))
    with pytest.raises(BatchError, match="the step has state_targets, the captured one none"):
        group.plan(drafted([[0, 1], [2, 6]]), reuse=group.plan(plain))
    with pytest.raises(BatchError, match="the step has no state_targets, the captured one has"):
        group.plan(plain, reuse=group.plan(drafted([[0, 1], [2, 6]])))


@pytest.mark.parametrize(
    ("backend", "chosen", "least"),
    [
        pytest.param(
            "TRITON_SCAN", "reuse and linear and three and target", 2, marks=pytest.mark.slow
        ),
        pytest.param("TRITON_TOKEN_SCAN", "reuse and rg_lru and target", 4, marks=pytest.mark.slow),
        pytest.param("TRITON_SCAN", "reuse", 40, marks=pytest.mark.sweep),
        pytest.param("TRITON_TOKEN_SCAN", "reuse", 12, marks=pytest.mark.sweep),
    ],
)
def test_captured_plans_are_refilled(backend: str, chosen: str, least: int) -> None:
    conforms(backend, least, "-k", chosen, TRITON_INTERPRET="1")


def test_a_captured_plan_s_tiles_are_read_again() -> None:
    """Rows of several tokens without targets: a replay lists no tiles that its graph wouldn't read."""
    pytest.importorskip("triton")
    from polyattn_triton.scan import TritonScan

    backend = TritonScan(RING, None, Device(platform="cuda", arch="sm_90", torch_device="cpu"))
    slots = torch.tensor([5, 6])
    first, second, longer = (
        Batch.from_lens(queries, lens, state_slots=slots)
        for queries, lens in (([2, 2], [9, 2]), ([2, 2], [30, 0]), ([3, 2], [9, 9]))
    )
    captured = backend.plan(first)
    again = backend.plan(second, captured)
    assert again.pieces is captured.pieces is not None
    assert again.seq_lens.tolist() == [30, 0]
    assert backend.plan(longer, captured).pieces is not captured.pieces


@pytest.mark.parametrize("tokens", [15, 16, 17, 33, 64])
@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_a_captured_step_has_tiles_for_any_prompts(tokens: int, prompts: int) -> None:
    """As many as the worst lengths need, no more, and those left over are the row's without a slot."""
    pytest.importorskip("triton")
    from polyattn_triton.selective import Pieces

    size = 16
    buffers = MixedBuffers(StepSize(1, prompts=prompts, prompt_tokens=tokens), 64, None, "cpu")
    first = buffers.longest().part(slice(0, prompts + 1)).copy()
    first.num_contexts = prompts + 1
    pieces, most = Pieces(first, size), 0
    for lengths in itertools.product(range(tokens + 1), repeat=prompts):
        if sum(lengths) > tokens:
            continue
        wanted = [(i, at) for i, n in enumerate(lengths) for at in range(0, n, size)]
        most = max(most, len(wanted))
        if sum(lengths) % 7 == 0 or len(wanted) == pieces.count:
            batch = Batch(
                [0, *itertools.accumulate([*lengths, tokens - sum(lengths)])],
                [64] * len(first.lens),
            )
            batch.num_contexts = prompts + 1
            pieces.fill(batch)
            rest = [(prompts, 0)] * (pieces.count - len(wanted))
            assert (
                list(zip(pieces.seq.tolist(), pieces.start.tolist(), strict=True)) == wanted + rest
            )
    assert pieces.count == most


def test_mixed_buffers_hold_each_sequence_s_slot() -> None:
    buffers = MixedBuffers(StepSize(2, prompts=2, prompt_tokens=9), 64, None, "cpu")
    for queries, slots, filled in (
        ([1, 4, 1, 2], [7, 5, 3, 1], [5, 1, -1, 7, 3]),
        ([3, 1], [2, 4], [2, -1, -1, 4, -1]),
        ([1, 1, 1], [6, 5, 4], [4, -1, -1, 6, 5]),
    ):
        batch = Batch.from_lens(queries, [20] * len(queries), state_slots=torch.tensor(slots))
        assert buffers.fill(batch).state_slots is buffers.state_slots
        assert buffers.state_slots.tolist() == filled


def test_bits_of_a_batch_are_not_promised_in_captured_prompts() -> None:
    """There a row of one token may run by the prompts' kernel, and eagerly by the decodes'."""
    pytest.importorskip("triton")
    claims = discover().backend("TRITON_SCAN").capabilities
    device = Device(platform="cuda", arch="sm_90", torch_device="cpu")
    asked = GDN.replace(graph_capture="any")
    assert not check(claims, asked, device)
    assert not check(claims, GDN.replace(graph_capture="uniform", batch_invariant="batch"), device)
    (problem,) = check(claims, asked.replace(batch_invariant="batch"), device)
    assert "one token" in str(problem)
