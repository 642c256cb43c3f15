"""Recurrences under speculation: a state for each draft, any number of which are accepted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from polyattn import Batch, LayerGroup, LayerSpec, Recurrent, select
from polyattn.errors import BatchError, SelectionError, SpecError
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.spec.recurrent import RecurrentSpec

SPECS = {
    "mamba2": LayerSpec(
        kind="mamba2", num_heads=4, num_kv_heads=2, head_size=8, dtype="float32",
        recurrent=RecurrentSpec(state_size=16),
    ),
    "short_conv": LayerSpec(
        kind="short_conv", num_heads=24, head_size=1, dtype="float32",
        recurrent=RecurrentSpec(conv_width=4, activation="silu"),
    ),
    "gdn": LayerSpec(
        kind="gdn", num_heads=4, num_kv_heads=2, head_size=16, dtype="float32",
        recurrent=RecurrentSpec(state_size=16, qk_norm=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["TORCH_SCAN", "VANILLA_SCAN"])
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_a_wide_convolution_state_forgets_rejected_drafts(backend: str, drafts: int) -> None:
    """One row a sequence: what the next lengths don't count was never there."""
    spec, dice = SPECS["short_conv"], torch.Generator().manual_seed(3)
    form = RecurrentSpec(conv_width=4, draft_tokens=drafts)
    layer = Recurrent(
        LayerGroup(select(spec.replace(recurrent=form), "cpu", backend=backend)),
        checks=True,
        **recurrent_params(spec, dice),
    )
    states, slots = layer.group.allocate_states(3), torch.tensor([2, 0])
    assert states.data.shape == (3, 24, 3 + drafts)
    states.data.fill_(torch.nan)
    weight, bias = layer.params["weight"][:, None], layer.params["bias"]
    streams, had = [torch.zeros(24, 3), torch.zeros(24, 3)], [0, 0]
    for turn in range(8):
        count = 1 + turn % (drafts + 1)
        (x,) = recurrent_inputs(spec, 2 * count, dice)
        batch = Batch.from_lens([count] * 2, [n + count for n in had], state_slots=slots)
        out = layer(x, states=states, plan=batch)
        for row in range(2):
            mine = slice(row * count, (row + 1) * count)
            whole = torch.cat([streams[row], x[mine].T], 1)
            wanted = torch.nn.functional.conv1d(whole[None], weight, bias, groups=24)[0]
            torch.testing.assert_close(out[mine], wanted[:, -count:].T, rtol=1e-5, atol=1e-5)
            had[row] += 1 + (turn + row) % count
            streams[row] = whole[:, : 3 + had[row]]


def test_who_has_no_wide_states_says_so() -> None:
    spec = SPECS["short_conv"].replace(recurrent=RecurrentSpec(conv_width=4, draft_tokens=3))
    with pytest.raises(SelectionError, match="a convolution's state with room for drafts"):
        select(spec, "h200", backend="CAUSAL_CONV1D")
    with pytest.raises(SpecError, match=r"draft_tokens=3: only a short convolution's state"):
        SPECS["gdn"].replace(recurrent=RecurrentSpec(state_size=16, draft_tokens=3))
    layer = Recurrent(LayerGroup(select(spec, "cpu")), **recurrent_params(spec, torch.Generator()))
    batch = Batch.from_lens(
        [2], [5], state_slots=torch.tensor([0]), state_targets=torch.tensor([[1, 2]])
    )
    with pytest.raises(BatchError, match="keeps drafts in its own state"):
        layer.group.plan(batch)


def test_two_sequences_go_on_from_one_prefix() -> None:
    spec, dice = SPECS["mamba2"], torch.Generator().manual_seed(1)
    layer = Recurrent(LayerGroup(select(spec, "cpu")), checks=True, **recurrent_params(spec, dice))
    states = layer.group.allocate_states(4)
    prefix, rest = recurrent_inputs(spec, 6, dice), recurrent_inputs(spec, 5, dice)
    layer(*prefix, states=states, plan=Batch.from_lens([6], [6], state_slots=torch.tensor([0])))
    kept = states.data[0].clone()
    batch = Batch.from_lens(
        [3, 2], [9, 8], state_slots=torch.tensor([0, 0]), state_targets=torch.tensor([1, 3])
    )
    found = layer(*rest, states=states, plan=batch)
    assert torch.equal(states.data[0], kept)
    for rows, slot in ((slice(0, 3), 1), (slice(3, 5), 3)):
        alone = layer.group.allocate_states(1)
        whole = [torch.cat([a, b[rows]]) for a, b in zip(prefix, rest, strict=True)]
        count = len(whole[0])
        out = layer(
            *whole,
            states=alone,
            plan=Batch.from_lens([count], [count], state_slots=torch.tensor([0])),
        )
        torch.testing.assert_close(found[rows], out[6:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states.data[slot], alone.data[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([[2, 3], [3, 4]], r"state_targets\[1, 0\]=3 is state_targets\[0, 1\] too"),
        ([[2, 30], [3, 4]], r"state_targets\[0, 1\]=30: there are 8 slots"),
        ([[2, -1], [3, 4]], r"state_targets\[0, 1\]=-1: there are 8 slots"),
        ([[2], [3]], "has room for 1 tokens of a sequence, and the longest query has 2"),
        ([[2, 3, 6], [4, 5, -1]], r"state_targets\[0, 2\]=6: .*entries after them are -1"),
        ([[2, 3, -1], [4, 5, -1]], ""),
        ([2, 2], r"state_targets\[1\]=2 is state_targets\[0\] too"),
    ],
)
def test_what_does_not_fit_is_refused(targets: list[int], said: str) -> None:
    spec, dice = SPECS["mamba2"], torch.Generator().manual_seed(2)
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SCAN"))
    layer = Recurrent(group, checks=True, **recurrent_params(spec, dice))
    states = layer.group.allocate_states(8)
    states.data.zero_()
    batch = Batch.from_lens(
        [2, 2], [5, 6], state_slots=torch.tensor([0, 1]), state_targets=torch.tensor(targets)
    )
    with pytest.raises(BatchError, match=said) if said else nullcontext():
        layer(*recurrent_inputs(spec, 4, dice), states=states, plan=batch)
    assert bool(states.data.any()) == (not said)


def test_a_shape_that_is_none_is_refused() -> None:
    with pytest.raises(BatchError, match=r"state_targets is torch.int64 of shape \(3,\)"):
        Batch.from_lens(
            [1, 1], [5, 6], state_slots=torch.tensor([0, 1]), state_targets=torch.tensor([2, 3, 4])
        )
