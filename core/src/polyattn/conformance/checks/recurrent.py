"""What must a recurrent backend do?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.cases.recurrent import EACH, LAST, PUBLISHED
from polyattn.conformance.checks.captured import in_rows
from polyattn.conformance.harness.base import Harness
from polyattn.families.recurrent.layer import Recurrent
from polyattn.families.recurrent.workload import RecurrentWorkload, recurrent_state
from polyattn.registry.capabilities import check
from polyattn.runtime.cache.state_cache import StateCache
from polyattn.runtime.graphs.cuda_graph import StepGraphs
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers, StepSize
from polyattn.runtime.group import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.workload.pages import bits, spoiled
from polyattn.workload.steps import RECURRENT, Lengths

Refilled = tuple[RecurrentWorkload, Tensor, StateCache]
"""A step, and what a captured plan left of it: output and states."""


def recurrence(case: Case, harness: Harness) -> None:
    """Output and states follow the recurrence; other slots, all NaN, are neither read nor written."""
    layer = harness.layer(case.spec, numbers=case.inputs)
    harness.step(layer, case.batch, numbers=case.inputs).check()
    form = case.spec.recurrent
    if case.batch != "continued" or form is None or form.draft_tokens:
        return
    caps = harness.info.capabilities
    for name, fields in PUBLISHED.get(case.spec.kind, {}).items():
        spec = case.spec.replace(**fields)
        if not check(caps, spec, harness.device):
            for lengths in (case.batch, [(37, 90)]):
                harness.step(harness.layer(spec), lengths).check(f"{name}: ")


def pieces(case: Case, harness: Harness) -> None:
    """One piece, pieces of any size and token by token give the same outputs and states."""
    layer, total = harness.layer(case.spec), 90
    whole = harness.step(layer, [(total, total)])
    expected = whole.check().clone()
    state = whole.states.data[whole.used].clone()
    slots = whole.batch.state_slots
    for sizes in ([64, 26], [1, 40, 1, 48], [17] * 5 + [5], [1] * total):
        states = StateCache(torch.full_like(whole.states.data, torch.nan))
        out, at = torch.full_like(expected, torch.nan), 0
        for size in sizes:
            rows = slice(at, at + size)
            batch = Batch.from_lens(
                [size], [at + size], state_slots=slots, device=harness.torch_device
            )
            out[rows] = layer(*(x[rows] for x in whole.tokens), states=states, plan=batch)
            at += size
        whole.agree(out, expected, f"the output in pieces of {sizes[:3]}…")
        whole.agree(states.data[whole.used], state, f"the state after pieces of {sizes[:3]}…")


def state_isolation(case: Case, harness: Harness) -> None:
    """Whatever one sequence's state and tokens hold never reaches another, bit for bit."""
    step, how = harness.work(case), case.label.split()[-1]
    start = step.states.data.clone()
    before = step.check().clone()
    ended, batch = step.states.data.clone(), step.batch
    assert batch.state_slots is not None
    victim = max(
        range(batch.num_seqs),
        key=lambda i: (batch.lens[i] > batch.query_lens[i], batch.query_lens[i]),
    )
    slot, rows = int(batch.state_slots[victim]), slice(*batch.starts[victim : victim + 2])
    for part in range(-1, len(step.tokens)):
        states = start.clone()
        tokens = [tensor.clone() for tensor in step.tokens]
        if part < 0:
            states[slot] = spoiled(states[slot], how)
        else:
            tokens[part][rows] = spoiled(tokens[part][rows], how)
        after = step.but(states=StateCache(states), tokens=tokens).run()
        same = step.real_rows()
        same[rows] = False
        what = "state" if part < 0 else list(step.layer.form.inputs)[part]
        what = f"sequence {victim}'s {what} ({how})"
        assert torch.equal(after[same], before[same]), f"{what} reached another sequence's output"
        others = [s for s in step.used if s != slot]
        assert torch.equal(states[others], ended[others]), f"{what} reached another's state"
        assert not torch.equal(after[rows], before[rows]), f"{what} must change its own output"


def state_targets(case: Case, harness: Harness) -> None:
    """States end where the step says, for each sequence or each token; any of them can continue."""
    layer, how = harness.layer(case.spec), case.label.split()[-1]
    if how == "sequences":
        harness.step(layer, case.batch, targets="sequences").check()
        return
    drafts = [(4, 9), (1, 1), (3, 3), (1, 0), (2, 70), (0, 5), (4, 4)]
    step = harness.step(layer, drafts, targets="tokens")
    step.check()
    if how == "tokens":
        return
    slots, targets = step.batch.state_slots, step.batch.state_targets
    assert slots is not None and targets is not None
    queries, lens = step.batch.query_lens, step.batch.lens
    counts = [max(1, query - 1 - index % 2) for index, query in enumerate(queries)]
    numbers = torch.tensor(counts, device=harness.torch_device)
    alive = [
        i for i, (query, length) in enumerate(zip(queries, lens, strict=True)) if query and length
    ]
    start = StateCache.accepted(targets, numbers)[alive]
    after = [lens[i] - queries[i] + counts[i] for i in alive]
    batch = step.step([(1, length + 1) for length in after], start)
    more = step.but(batch=batch, tokens=step.more(len(alive)), used=start.tolist())
    more.check("accepted: ")


def rejected_drafts(case: Case, harness: Harness) -> None:
    """After drafts, a sequence continues from the accepted ones, as if there had been no others."""
    layer, form = harness.layer(case.spec), case.spec.recurrent
    assert form is not None
    plain = case.spec.replace(recurrent=replace(form, draft_tokens=0))
    group, most = harness.group(plain), form.draft_tokens + 1
    params: dict[str, Any] = {name: tensor.clone() for name, tensor in layer.params.items()}
    alone = type(layer)(group, **params)
    step = harness.step(layer, [(5, 5), (1, 1), (40, 40)])
    slots, lens = step.batch.state_slots, list(step.batch.lens)
    step.check("prompts: ")
    states = group.allocate_states(step.states.num_slots)
    alone(*step.tokens, states=states, plan=step.batch)
    for turn in range(6):
        counts = harness.dice.integers(1, most + 1, 3)
        tokens = step.more(3 * most)
        drafts = step.but(batch=step.step([(most, n + most) for n in lens], slots), tokens=tokens)
        label = f"drafts, step {turn}: "
        result = drafts.check(label)
        rows = torch.tensor([i * most + t for i in range(3) for t in range(counts[i])])
        rows = rows.to(harness.torch_device)
        lens = [n + count for n, count in zip(lens, counts, strict=True)]
        batch = Batch.from_lens(counts, lens, state_slots=slots, device=harness.torch_device)
        expected = alone(*(x[rows] for x in tokens), states=states, plan=batch)
        step.agree(result[rows], expected, f"{label}the accepted output")


def recurrent_out(case: Case, harness: Harness) -> None:
    """`out=` may be a view into a larger tensor; without it an output is its caller's alone."""
    step = harness.work(case)
    start = step.states.data.clone()
    expected = step.check().clone()
    step.states.data.copy_(start)
    wide = torch.full((expected.shape[0] + 2, *expected.shape[1:]), 7.0).to(expected)
    step.layer(*step.tokens, states=step.states, plan=step.batch, out=wide[1:-1])
    rows = step.real_rows()
    assert torch.equal(wide[1:-1][rows], expected[rows])
    step.states.data.copy_(start)
    new = step.layer(*step.tokens, states=step.states, plan=step.batch)
    step.layer(*step.tokens, states=step.states, plan=step.batch)  # from other states
    assert torch.equal(new[rows], expected[rows]), f"{step.who} wrote an earlier call's output"
    assert bool((wide[0] == 7).all()) and bool((wide[-1] == 7).all())


def recurrent_strided(case: Case, harness: Harness) -> None:
    """Inputs may be slices of one fused projection, and may have gaps between neighbours."""
    step = harness.work(case)
    whole, start = step.tokens, step.states.data.clone()
    wide = [torch.cat([x.flatten(1), x.flatten(1)], dim=1) for x in whole]
    step.tokens = [
        w[:, : w.shape[1] // 2].unflatten(1, x.shape[1:]) for w, x in zip(wide, whole, strict=True)
    ]
    step.check()
    step.states.data.copy_(start)
    step.tokens = [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in whole]
    step.check("with gaps: ")


def recurrent_plans(case: Case, harness: Harness) -> None:
    """Plans and layers in turn: each plan's own sequences, each layer's own parameters and states."""
    few: Lengths = [(1, 9), (3, 3), (1, 1), (7, 20)]
    steps, plans = harness.interleaved(case.spec, (case.batch, few, few, "tokens"))
    for index in (0, 1, 2, 3, 1, 0):
        for number, step in enumerate(steps[index], 1):
            states = step.states.data
            states[step.used] = recurrent_state(
                case.spec, (len(step.used), *states.shape[1:]), harness.dice.generator
            ).to(states)
            step.check(f"plan {index + 1}, layer {number}, interleaved: ", plans[index])


def recurrent_graph(case: Case, harness: Harness) -> None:
    """A captured step over other slots and lengths equals eager bit for bit."""
    layer = harness.layer(case.spec)
    first = _to_capture(case, harness, layer, RECURRENT[case.batch])
    states = layer.group.allocate_states(first.states.num_slots)

    def step(plans, **inputs):  # type: ignore[no-untyped-def]
        return layer(*inputs.values(), states=states, plan=plans[layer.group])

    size, longest = _room(first.batch, 1)
    graphs = StepGraphs([layer.group], step, [size], longest)
    graphs.capture(first.tensors())
    for chosen in (RECURRENT[case.batch], RECURRENT[case.batch][::-1]):
        work = _to_capture(case, harness, layer, chosen)
        states.data.copy_(work.states.data)
        replayed = graphs.replay(work.batch, work.tensors())
        expected = work.check()
        if case.inputs != LAST:  # which eager steps move by a copy before another kernel
            assert torch.equal(replayed, expected)
            assert torch.equal(states.data[work.used], work.states.data[work.used])
        _same(work, replayed, expected, states)


def recurrent_reuse(case: Case, harness: Harness) -> None:
    """What a captured graph reads is refilled: the first plan, run after another step was planned."""
    for work, result, states in recurrent_refills(case, harness, harness.layer(case.spec)):
        _same(work, result, work.check(), states)


def recurrent_refills(case: Case, harness: Harness, layer: Recurrent) -> Iterator[Refilled]:
    """Return several steps, each as one captured plan ran it."""
    lengths = RECURRENT[case.batch]
    size, longest = _room(_to_capture(case, harness, layer, lengths).batch, 2)
    pads = layer.group.planner.padding_rows
    rows = size.rows, size.query_len, longest, None
    buffers = StepBuffers(*rows, harness.torch_device, 0, False, pads, size.state_targets)
    steps = (lengths, lengths[::-1], lengths[1:])
    works = (_to_capture(case, harness, layer, chosen) for chosen in steps)
    captured = layer.group.plan(buffers.batch([longest] * size.rows))
    return _refills(works, buffers, captured)


def _refills(
    works: Iterable[RecurrentWorkload], buffers: StepBuffers, captured: StepPlan
) -> Iterator[Refilled]:
    """Yield each step with a captured plan's output and states after it was planned into that."""
    for work in works:
        start = work.states.data
        assert buffers.fits(work.batch)
        work.group.plan(buffers.fill(work.batch), reuse=captured)
        rows = buffers.rows(work.batch)
        wide = [in_rows(t, rows, buffers.num_tokens, torch.nan) for t in work.tokens]
        states = StateCache(start.clone())
        result = work.but(tokens=wide, states=states).run(captured)
        others = [slot for slot in range(len(start)) if slot not in work.used]
        assert torch.equal(bits(states.data[others]), bits(start[others])), (
            "a stranger's slot was written"
        )
        yield work, result[rows], states


PROMPTS: tuple[tuple[StepSize, tuple[Lengths, ...]], ...] = (
    (
        StepSize(3, prompts=3, prompt_tokens=96),
        (
            [(1, 33), (33, 33), (1, 5), (47, 52), (1, 17), (16, 50)],
            [(3, 3), (92, 260), (1, 1), (1, 64), (1, 8), (1, 7)],
            [(17, 22), (65, 65), (14, 90)],
        ),
    ),
    (
        StepSize(2, 3, prompts=2, prompt_tokens=9),
        ([(3, 9), (1, 1), (3, 3), (8, 30)], [(2, 8), (0, 9)]),
    ),
)
"""Captured mixed steps, and the (query length, length) of later steps' rows. They have prompts
between decodes, one that fills its room, as many tiles as there can be, a decode too many, several tokens
each."""
LONGEST = 300


def recurrent_mixed_reuse(case: Case, harness: Harness) -> None:
    """What a captured step with prompts reads is refilled: the first plan, after others were planned."""
    layer = harness.layer(case.spec)
    for size, steps in PROMPTS:
        buffers = MixedBuffers(size, LONGEST, None, harness.torch_device)
        works = (harness.step(layer, lengths) for lengths in steps)
        captured = layer.group.plan(buffers.longest())
        for work, result, states in _refills(works, buffers, captured):
            _same(work, result, work.check(), states)


def recurrent_mixed_graph(case: Case, harness: Harness) -> None:
    """A captured step with prompts, replayed over other rows and lengths, equals eager."""
    layer = harness.layer(case.spec)
    first = harness.step(layer, PROMPTS[0][1][0])
    states = layer.group.allocate_states(64)

    def step(plans, **inputs):  # type: ignore[no-untyped-def]
        return layer(*inputs.values(), states=states, plan=plans[layer.group])

    for size, steps in PROMPTS:
        graphs = StepGraphs([layer.group], step, [size], LONGEST)
        graphs.capture(first.tensors())
        for lengths in steps:
            work = harness.step(layer, lengths)
            states.data[: work.states.num_slots] = work.states.data
            replayed = graphs.replay(work.batch, work.tensors()).clone()
            _same(work, replayed, work.check(), states)


def _room(batch: Batch, padding: int) -> tuple[StepSize, int]:
    """Return a captured step's capacity, and its longest row: a batch and rows of padding."""
    moves = batch.state_targets is not None
    size = StepSize(batch.num_seqs + padding, batch.max_query_len, state_targets=moves)
    return size, batch.max_seq_len


def _to_capture(
    case: Case, harness: Harness, layer: Recurrent, lengths: Lengths
) -> RecurrentWorkload:
    """Return a step for a captured one, its states where the case wants them."""
    targets = {EACH: "tokens", LAST: "sequences"}.get(case.inputs, "")
    step: RecurrentWorkload = harness.step(layer, lengths, targets=targets)
    return step


def _same(work: RecurrentWorkload, result: Tensor, expected: Tensor, states: StateCache) -> None:
    """Assert that a captured step's output and states are the eager one's."""
    work.agree(result, expected, "a plan reused: the output")
    work.agree(states.data[work.used], work.states.data[work.used], "a plan reused: the state")
