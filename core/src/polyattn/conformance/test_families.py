"""The suite for MLA and recurrent backends."""

from __future__ import annotations

import pytest
import torch

from polyattn.conformance.case import Case
from polyattn.conformance.family_harness import FamilyHarness
from polyattn.conformance.harness import Harness
from polyattn.runtime.batch import Batch
from polyattn.runtime.state_cache import StateCache


@pytest.fixture
def family(harness: Harness) -> FamilyHarness:
    """What builds and runs MLA and recurrent layers."""
    return FamilyHarness(harness)


@pytest.mark.conformance("latent")
def test_latent(case: Case, family: FamilyHarness) -> None:
    """Expanded prefill, absorbed decode and merged context agree with the plain definition."""
    layer = family.latent_layer(case.spec)
    family.latent_check(layer, family.latent_step(layer, case.batch))


@pytest.mark.conformance("latent_replan")
def test_latent_replan(case: Case, family: FamilyHarness) -> None:
    """Plans follow each other: a second batch, then the first again, with the same bits."""
    layer = family.latent_layer(case.spec)
    first = family.latent_step(layer, "decode")
    before = family.latent_check(layer, first, "first plan: ").clone()
    family.latent_check(layer, family.latent_step(layer, "mixed"), "second plan: ")
    after = family.latent_check(layer, first, "first plan again: ")
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)


@pytest.mark.conformance("latent_isolation")
def test_latent_isolation(case: Case, family: FamilyHarness) -> None:
    """Changing one request's cache never changes another's output, bit for bit."""
    layer = family.latent_layer(case.spec)
    step = family.latent_step(layer, case.batch)
    before = family.latent_check(layer, step).clone()
    batch, cache = step.batch, step.cache
    assert batch.block_table is not None
    victim = max(range(batch.num_seqs), key=lambda i: batch.lens[i])
    used = -(-batch.lens[victim] // cache.block_size)
    cache.key[batch.block_table[victim, :used].long()] = 3.0
    after, _ = family.latent_run(layer, step)
    same = torch.arange(len(before)) != victim
    assert torch.equal(after[same], before[same])
    assert not torch.equal(after[victim], before[victim]), "the victim's own output must change"


@pytest.mark.conformance("latent_graph")
def test_latent_graph(case: Case, family: FamilyHarness) -> None:
    """A captured decode, re-planned with other lengths, equals eager bit for bit."""
    layer = family.latent_layer(case.spec)
    step = family.latent_step(layer, case.batch)
    batch = step.batch
    assert batch.block_table is not None and batch.slot_mapping is not None
    held = Batch.on_buffers(
        batch.lens, batch.query_start_loc.clone(), batch.seq_lens.clone(),
        batch.block_table.clone(), batch.slot_mapping.clone(),
    )  # fmt: skip
    out = torch.empty_like(family.latent_run(layer, step)[0])
    topk = None if step.topk is None else step.topk.clone()

    def run() -> None:
        layer(step.query, step.latent, step.rope, step.cache, topk=topk, out=out)

    layer.plan(held)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert held.block_table is not None and held.slot_mapping is not None
    order = torch.arange(batch.num_seqs - 1, -1, -1, device=out.device)
    held.seq_lens.copy_(batch.seq_lens[order])
    held.block_table.copy_(batch.block_table[order])
    held.slot_mapping.copy_(batch.slot_mapping[order])
    if topk is not None and step.topk is not None:
        topk.copy_(step.topk[order])
        step.topk = topk
    lens = batch.lens[::-1]
    layer.plan(
        Batch.on_buffers(
            lens, held.query_start_loc, held.seq_lens, held.block_table, held.slot_mapping
        )
    )
    graph.replay()
    replayed = out.clone()
    run()
    assert torch.equal(out, replayed)
    # Not only the same as eager: right.
    step.batch = Batch(batch.starts, lens, batch.block_table[order], batch.slot_mapping[order])
    family.latent_check(layer, step)


@pytest.mark.conformance("recurrence")
def test_recurrence(case: Case, family: FamilyHarness) -> None:
    """Output and states follow the recurrence; other slots, all NaN, are neither read nor written."""
    layer = family.recurrent_layer(case.spec)
    family.recurrent_check(layer, family.recurrent_step(layer, case.batch))


@pytest.mark.conformance("pieces")
def test_pieces(case: Case, family: FamilyHarness) -> None:
    """One piece, pieces of any size and token by token give the same outputs and states."""
    layer, spec = family.recurrent_layer(case.spec), case.spec
    total = 90
    whole = family.recurrent_step(layer, [(total, total)])
    expected = family.recurrent_check(layer, whole).clone()
    state = whole.states.data[whole.used].clone()
    for sizes in ([64, 26], [1, 40, 1, 48], [17] * 5 + [5], [1] * total):
        states = StateCache(torch.full_like(whole.states.data, torch.nan))
        out, at = torch.full_like(expected, torch.nan), 0
        for size in sizes:
            rows = slice(at, at + size)
            batch = Batch.from_lens(
                [size], [at + size], state_slots=torch.tensor(whole.used).to(family.device),
                device=family.device,
            )  # fmt: skip
            out[rows] = layer(*(x[rows] for x in whole.inputs), states=states, batch=batch)
            at += size
        family.compare(spec, out, expected.cpu(), f"in pieces of {sizes[:3]}… ")
        found = states.data[whole.used].flatten(1)
        family.compare(spec, found, state.cpu().flatten(1), f"state after {sizes[:3]}… ")


@pytest.mark.conformance("state_isolation")
def test_state_isolation(case: Case, family: FamilyHarness) -> None:
    """Changing one sequence's state and tokens never changes another's, bit for bit."""
    layer = family.recurrent_layer(case.spec)
    step = family.recurrent_step(layer, case.batch)
    start = step.states.data.clone()
    before = family.recurrent_check(layer, step).clone()
    ended = step.states.data.clone()
    batch = step.batch
    assert batch.state_slots is not None
    victim = max(
        range(batch.num_seqs),
        key=lambda i: (batch.lens[i] > batch.query_lens[i], batch.query_lens[i]),
    )
    slot = int(batch.state_slots[victim])
    step.states.data.copy_(start)
    step.states.data[slot] = 2.0
    rows = slice(batch.starts[victim], batch.starts[victim + 1])
    step.inputs[0][rows] *= 1.5
    after = layer(*step.inputs, states=step.states, batch=batch)
    same = family.real_rows(batch)
    same[rows] = False
    assert torch.equal(after[same], before[same])
    others = [s for s in step.used if s != slot]
    assert torch.equal(step.states.data[others], ended[others])
    assert not torch.equal(after[rows], before[rows]), "the victim's own output must change"


@pytest.mark.conformance("recurrent_out")
def test_recurrent_out(case: Case, family: FamilyHarness) -> None:
    """`out=` may be a view into a larger tensor; its surroundings stay untouched."""
    layer = family.recurrent_layer(case.spec)
    step = family.recurrent_step(layer, case.batch)
    start = step.states.data.clone()
    expected = family.recurrent_check(layer, step).clone()
    step.states.data.copy_(start)
    wide = torch.full((expected.shape[0] + 2, *expected.shape[1:]), 7.0).to(expected)
    layer(*step.inputs, states=step.states, batch=step.batch, out=wide[1:-1])
    rows = family.real_rows(step.batch)
    assert torch.equal(wide[1:-1][rows], expected[rows])
    assert bool((wide[0] == 7).all()) and bool((wide[-1] == 7).all())


@pytest.mark.conformance("recurrent_strided")
def test_recurrent_strided(case: Case, family: FamilyHarness) -> None:
    """Inputs may be slices of one fused projection."""
    layer = family.recurrent_layer(case.spec)
    step = family.recurrent_step(layer, case.batch)
    wide = [torch.cat([x.flatten(1), x.flatten(1)], dim=1) for x in step.inputs]
    step.inputs = [
        w[:, : w.shape[1] // 2].unflatten(1, x.shape[1:])
        for w, x in zip(wide, step.inputs, strict=True)
    ]
    family.recurrent_check(layer, step)


@pytest.mark.conformance("recurrent_graph")
def test_recurrent_graph(case: Case, family: FamilyHarness) -> None:
    """A captured step over changed state slots and lengths equals eager bit for bit."""
    layer = family.recurrent_layer(case.spec)
    step = family.recurrent_step(layer, case.batch)
    start, batch = step.states.data.clone(), step.batch
    expected = family.recurrent_check(layer, step).clone()
    ended = step.states.data.clone()
    assert batch.state_slots is not None
    held = Batch(
        batch.starts, batch.seq_lens.clone(), state_slots=torch.full_like(batch.state_slots, -1)
    )
    held.seq_lens, lens = held.seq_lens.clone(), batch.seq_lens
    out = torch.empty_like(expected)
    layer.runtime.checks = False
    layer.plan(held)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(*step.inputs, states=step.states, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*step.inputs, states=step.states, out=out)
    assert held.state_slots is not None
    held.state_slots.copy_(batch.state_slots)
    held.seq_lens.copy_(lens)
    step.states.data.copy_(start)
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(step.states.data[step.used], ended[step.used])
