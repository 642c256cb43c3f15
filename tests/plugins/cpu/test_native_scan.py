"""Do the native recurrences agree with float64, in every instruction set that this machine has?"""

from __future__ import annotations

import pytest
import torch
from polyattn import Batch, LayerGroup, LayerSpec, Recurrent, select
from polyattn.families.recurrent.reference import forward
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params, recurrent_state
from polyattn.kernel import AttentionKind, BatchError, RecurrentSpec
from polyattn.workload.tolerance import tolerance_of
from polyattn_cpu.native import library

pytestmark = pytest.mark.skipif(
    library.why_not() is not None, reason=f"native kernels: {library.why_not()}"
)
ISAS = library.isas() if library.why_not() is None else ("none",)

LAYERS = {  # kind, heads, key heads, head size, form
    "convolution": ("short_conv", 100, 1, 1, RecurrentSpec(conv_width=4, activation="silu")),
    "many channels": ("short_conv", 1100, 1, 1, RecurrentSpec(conv_width=4, activation="silu")),
    "more channels": ("short_conv", 2100, 1, 1, RecurrentSpec(conv_width=4)),
    "width 3": ("short_conv", 577, 1, 1, RecurrentSpec(conv_width=3)),
    "width 5": ("short_conv", 100, 1, 1, RecurrentSpec(conv_width=5)),
    "width 2": ("short_conv", 64, 1, 1, RecurrentSpec(conv_width=2)),
    "convolution, drafts": ("short_conv", 100, 1, 1, RecurrentSpec(conv_width=4, draft_tokens=3)),
    "width 2, drafts": ("short_conv", 33, 1, 1, RecurrentSpec(conv_width=2, draft_tokens=30)),
    "mamba1, gated": ("mamba1", 130, 1, 1, RecurrentSpec(state_size=16, gated=True)),
    "mamba2, gated, B and C in float32": (
        "mamba2",
        4,
        2,
        24,
        RecurrentSpec(state_size=40, gated=True, bc_in_float32=True),
    ),
    "mamba1": ("mamba1", 130, 1, 1, RecurrentSpec(state_size=16)),
    "mamba1, odd state": ("mamba1", 40, 1, 1, RecurrentSpec(state_size=7)),
    "mamba2": ("mamba2", 4, 2, 24, RecurrentSpec(state_size=128)),
    "mamba2, large head": ("mamba2", 2, 1, 200, RecurrentSpec(state_size=64)),
    "mamba2, odd state": ("mamba2", 4, 2, 9, RecurrentSpec(state_size=10)),
    "mamba2, odd head": ("mamba2", 4, 2, 9, RecurrentSpec(state_size=16)),
    "linear": ("linear", 4, 2, 40, RecurrentSpec()),
    "delta rule": ("gdn", 4, 2, 128, RecurrentSpec(qk_norm=True)),
    "delta rule, odd head": ("gdn", 2, 2, 21, RecurrentSpec()),
    "delta rule by channels": ("kda", 3, 3, 48, RecurrentSpec(qk_norm=True)),
    "bonus": ("rwkv6", 3, 3, 64, RecurrentSpec()),
    "low rank": ("rwkv7", 3, 3, 64, RecurrentSpec()),
}
STEPS = {  # query lengths, sequence lengths
    "decode": ([1, 1, 1], [5, 1, 90]),
    "mixed": ([70, 1, 16, 0], [70, 4, 50, 9]),
}
BORDERS = ([126, 3, 1, 127, 0, 131, 128, 125], [126, 9, 4, 127, 3, 140, 128, 125])
"""Sequences that begin 2 tokens before an item of 128, 1 behind one and where one begins."""


class Step:
    """One layer's step; the slots that no sequence has are NaN, and one row is padding."""

    def __init__(self, layer, dtype, queries, lens):
        kind, heads, groups, size, form = layer
        grouped = {} if kind in ("short_conv", "mamba1") else {"num_kv_heads": groups}
        self.spec = LayerSpec(
            kind=kind, num_heads=heads, head_size=size, dtype=dtype, recurrent=form, **grouped
        )
        random = torch.Generator().manual_seed(0)
        self.group = LayerGroup(select(self.spec, "cpu", backend="NATIVE_SCAN"))
        self.layer = Recurrent(self.group, **recurrent_params(self.spec, random))
        self.states = self.group.allocate_states(len(lens) + 2)
        shape = tuple(self.states.data.shape)
        self.states.data.copy_(recurrent_state(self.spec, shape, random))
        self.slots = torch.randperm(len(lens) + 2, generator=random)[: len(lens)]
        self.unused = [i for i in range(len(lens) + 2) if i not in self.slots]
        self.states.data[self.unused] = torch.nan
        self.inputs = recurrent_inputs(self.spec, sum(queries) + 1, random)
        slots = torch.cat([self.slots, torch.tensor([-1])])
        self.batch = Batch.from_lens([*queries, 1], [*lens, 1], state_slots=slots)

    def run(self):
        """Return the output of all but the padding row, and the states afterwards."""
        before = self.states.data.clone()
        out = self.layer(*self.inputs, states=self.states, plan=self.group.plan(self.batch))
        after = self.states.data.clone()
        self.states.data.copy_(before)
        return out[:-1], after


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_recurrence_agrees_with_float64(monkeypatch, layer, step, dtype):
    agrees(monkeypatch, layer, STEPS[step], dtype)


@pytest.mark.parametrize("layer", [name for name in LAYERS if LAYERS[name][0] == "short_conv"])
def test_convolutions_agree_where_items_meet(monkeypatch, layer):
    agrees(monkeypatch, layer, BORDERS, "bfloat16")


def agrees(monkeypatch, layer, step, dtype):
    wanted = None  # the reference, whatever instruction set runs
    for isa in ISAS:
        monkeypatch.setenv(library.ISA_VARIABLE, isa)
        made = Step(LAYERS[layer], dtype, *step)
        given = dict(zip(made.layer.form.inputs, made.inputs, strict=True))
        wanted = wanted or forward(
            made.spec, given, made.layer.params, made.states.data, made.batch
        )
        want, after = wanted
        out, states = made.run()
        allowed, used = tolerance_of(made.spec).output, made.slots
        error = (out.double() - want[:-1]).abs().max() / want[:-1].abs().max()
        assert float(error) <= allowed, isa
        if made.spec.kind is not AttentionKind.SHORT_CONV:
            allowed = 1e-5
        error = (states.double() - after)[used].abs().max() / after[used].abs().max()
        assert float(error) <= allowed, isa
        assert bool(states[made.unused].isnan().all()), isa


@pytest.mark.parametrize("layer", ["convolution", "mamba2", "delta rule"])
def test_threads_change_no_bit(isa, layer):
    made = Step(LAYERS[layer], "bfloat16", [1] * 20, [30] * 20)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out, states = made.run()
        torch.set_num_threads(3)
        again, states_again = made.run()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, again)
    assert torch.equal(states.nan_to_num(), states_again.nan_to_num())


TARGETS = torch.tensor([[7, 8, 9, 10], [11, -1, -1, -1], [1, 12, 13, -1], [-1, -1, -1, -1]])
"""Where the states of drafts of 4, 1 and 3 tokens go, the third's first to its own slot."""


def drafted(layer, dtype, targets=TARGETS):
    """Return a step whose tokens' states go to slots of their own, and its batch."""
    made = Step(LAYERS[layer], dtype, [4, 1, 3], [9, 1, 40])
    slots = torch.tensor([0, 3, 1, -1])
    wide = made.group.allocate_states(14)
    wide.data.copy_(recurrent_state(made.spec, tuple(wide.data.shape), torch.Generator()))
    made.states = wide
    made.batch = Batch.from_lens(
        [4, 1, 3, 1], [9, 1, 40, 0], state_slots=slots, state_targets=targets
    )
    return made


@pytest.mark.parametrize("layer", [name for name in LAYERS if LAYERS[name][4].draft_tokens == 0])
def test_each_drafts_state_goes_to_its_slot(isa, layer):
    made = drafted(layer, "float32")
    assert [call.phase for call in made.group.plan(made.batch).calls] == ["decode"]
    given = dict(zip(made.layer.form.inputs, made.inputs, strict=True))
    want, after = forward(made.spec, given, made.layer.params, made.states.data, made.batch)
    out, states = made.run()
    assert float((out.double() - want[:-1]).abs().max() / want.abs().max()) <= 2e-5
    assert float((states.double() - after).abs().max() / after.abs().max()) <= 1e-5
    kept = [0, 2, 3, 4, 5, 6]
    assert torch.equal(states[kept], made.states.data[kept])


@pytest.mark.parametrize(
    ("row", "token", "slot", "says"),
    [
        (0, 3, 14, "state_targets goes up to 14: there are 14 slots"),
        (2, 1, -1, r"state_targets\[2, 1\]=-1: each of the sequence's 3 tokens needs a slot"),
    ],
)
def test_a_target_out_of_range_changes_nothing(row, token, slot, says):
    targets = TARGETS.clone()
    targets[row, token] = slot
    made = drafted("delta rule", "float32", targets)
    before = made.states.data.clone()
    with pytest.raises(BatchError, match=says):
        made.layer(*made.inputs, states=made.states, plan=made.group.plan(made.batch))
    assert torch.equal(before, made.states.data)


def test_a_slot_out_of_range_changes_nothing():
    made = Step(LAYERS["delta rule"], "float32", [1, 1], [3, 4])
    slots = torch.tensor([0, made.states.num_slots, -1])
    batch = Batch.from_lens([1, 1, 1], [3, 4, 1], state_slots=slots)
    before = made.states.data.clone()
    with pytest.raises(BatchError, match=r"state_slots\[1\]=4 is out of range"):
        made.layer(*made.inputs, states=made.states, plan=made.group.plan(batch))
    assert torch.equal(before.nan_to_num(), made.states.data.nan_to_num())
