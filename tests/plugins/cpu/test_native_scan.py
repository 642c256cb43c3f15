"""Do the native recurrences agree with float64, in every instruction set that this machine has?"""

from __future__ import annotations

import pytest
import torch
from polyattn import LayerGroup, LayerSpec, resolve_device, select
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.kernel import BatchError, RecurrentSpec
from polyattn.registry.discovery import discover
from polyattn.workload.base import workload
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
    "mamba2": ("mamba2", 4, 2, 24, RecurrentSpec(state_size=128)),
    "delta rule": ("gdn", 4, 2, 128, RecurrentSpec(qk_norm=True)),
}
BORDERS = [(126, 126), (3, 9), (1, 4), (127, 127), (0, 3), (131, 140), (128, 128), (125, 125)]
"""Sequences that begin 2 tokens before an item of 128, 1 behind one and where one begins."""


def drawn(layer, dtype, lengths, **how):
    """One layer's step by NATIVE_SCAN; the slots that no sequence has are NaN."""
    kind, heads, groups, size, form = LAYERS[layer]
    grouped = {} if kind in ("short_conv", "mamba1") else {"num_kv_heads": groups}
    spec = LayerSpec(
        kind=kind, num_heads=heads, head_size=size, dtype=dtype, recurrent=form, **grouped
    )
    group = LayerGroup(select(spec, "cpu", backend="NATIVE_SCAN"))
    return workload(group, lengths, step=how, checks=False)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


def test_cases_of_the_kit_pass(isa):
    """Every recurrence, in every dtype and odd sizes, and each draft's state in its slot."""
    device = resolve_device("cpu")
    for case in derive(discover().backend("NATIVE_SCAN"), device):
        if case.check in ("recurrence", "state_targets"):
            run_case(case, "NATIVE_SCAN", device, 1)


@pytest.mark.parametrize("layer", [name for name in LAYERS if LAYERS[name][0] == "short_conv"])
def test_convolutions_agree_where_items_meet(monkeypatch, layer):
    agrees(monkeypatch, layer, BORDERS, "bfloat16")


def agrees(monkeypatch, layer, lengths, dtype):
    expected = None  # the reference's, whatever instruction set runs
    for isa in ISAS:
        monkeypatch.setenv(library.ISA_VARIABLE, isa)
        work = drawn(layer, dtype, lengths)
        if expected is not None:
            work.expected = expected
        work.remembered().run()
        for what, error, allowed in work.errors():
            assert error <= allowed, (isa, what)
        work.check_memory()
        expected = work.expected


@pytest.mark.parametrize("layer", ["convolution", "mamba2", "delta rule"])
def test_threads_change_no_bit(isa, layer):
    work = drawn(layer, "bfloat16", [(1, 30)] * 20)
    before, start = torch.get_num_threads(), work.states.data.clone()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            work.states.data.copy_(start)
            found.append((work.run().clone(), work.states.data.nan_to_num()))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


DRAFTS = [(4, 9), (1, 1), (3, 40), (1, 0)]


@pytest.mark.parametrize(
    ("row", "token", "slot", "says"),
    [
        (0, 3, 99, r"state_targets\[0, 3\]=99: there are 14 slots"),
        (2, 1, -1, r"state_targets\[2, 1\]=-1: each of the sequence's 3 tokens needs a slot"),
    ],
)
def test_a_target_out_of_range_changes_nothing(row, token, slot, says):
    work = drawn("delta rule", "float32", DRAFTS, targets="tokens")
    work.batch.state_targets[row, token] = slot
    refused(work, says)


def test_a_slot_out_of_range_changes_nothing():
    """Neither a slot that the step names, nor one that is written there after the plan."""
    work = drawn("delta rule", "float32", [(3, 3), (1, 4), (1, 0)])
    _ = work.plan  # whose decodes are a part, from the second sequence on
    work.batch.state_slots[1] = 5
    refused(work, r"state_slots\[1\]=5: there are", work.group.plan(work.batch))
    refused(work, r"state_slots\[1\]=5 is out of range")


def refused(work, says, plan=None):
    before = work.states.data.clone()
    with pytest.raises(BatchError, match=says):
        work.run(plan)
    assert torch.equal(before.nan_to_num(), work.states.data.nan_to_num())
