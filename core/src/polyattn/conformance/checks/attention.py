"""What must an attention backend do? Each check takes a case and a harness, and asserts."""

from __future__ import annotations

import pytest
import torch

from polyattn.conformance.case import Case
from polyattn.conformance.harness.base import Harness, block_size
from polyattn.errors import SelectionError
from polyattn.families.attention.planning import AttentionStep
from polyattn.runtime.backend import AttentionBackend, PackedStrides
from polyattn.runtime.cache.scales import used_scales
from polyattn.runtime.merge import AttentionState
from polyattn.runtime.program import Frame
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.block_tables import without_first
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.workload.compare import output_error
from polyattn.workload.pages import copied, spoiled
from polyattn.workload.steps import Lengths, batches


def numeric(case: Case, harness: Harness) -> None:
    """Output and LSE agree with the float64 reference; unused cache is NaN throughout."""
    harness.work(case, numbers=case.inputs).check()


def refusal(case: Case, harness: Harness) -> None:
    """An unclaimed feature is refused, with a rejection that names it and the reason."""
    with pytest.raises(SelectionError) as caught:
        harness.select(case.spec)
    assert "wanted" in str(caught.value) and "supported" in str(caught.value)


def layout(case: Case, harness: Harness) -> None:
    """Every claimed physical layout works, with every feature. The label begins with its name."""
    name = case.label.split()[0]
    inputs = harness.work(case, layout=name)
    assert inputs.cache is not None and inputs.cache.layout == name
    inputs.check()


def packed(case: Case, harness: Harness) -> None:
    """K and V may be views into one storage, packed per block."""
    harness.work(case, packed=True).check()


def shared(case: Case, harness: Harness) -> None:
    """Sequences may have their first blocks in common, as those with one prefix do."""
    layer = harness.layer(case.spec)
    lengths = batches("shared", block_size(layer))
    if case.batch == "decode":
        lengths = [(1, length) for _, length in lengths]
    everybody = SharedRun(tuple(range(len(lengths))), 0, 2)
    harness.step(layer, lengths, shared=((everybody,),)).check()


def skipped(case: Case, harness: Harness) -> None:
    """Slot -1 stores nothing: the cache has those tokens' keys already, and they count."""
    harness.work(case, skipped=True).check()


def stale(case: Case, harness: Harness) -> None:
    """No backend reads entries of a block table past a sequence's length."""
    inputs = harness.work(case)
    before = inputs.check().clone()
    assert inputs.cache is not None
    for batch in with_stale_tables(inputs.batch, inputs.cache.block_size):
        after = inputs.but(batch=batch).check("stale table entries: ")
        assert torch.equal(after, before), "entries past a sequence's length changed the result"


def with_stale_tables(batch: Batch, block_size: int) -> list[Batch]:
    """Return the batch with another sequence's block past each length; on the CPU also no block at all.

    An accelerator's illegal access would end the process, and with it the report.
    """
    table = batch.block_table
    assert table is not None
    fills = [int(table[0, 0])]
    if table.device.type == "cpu":
        fills += [-1, 1 << 30]
    others = []
    for fill in fills:
        other = torch.cat([table, table], dim=1)
        for row, length in enumerate(batch.lens):
            other[row, -(-length // block_size) :] = fill
        others.append(Batch(batch.starts, batch.lens, other, batch.slot_mapping))
    return others


def out(case: Case, harness: Harness) -> None:
    """`out=` may be a view into a larger tensor; its surroundings stay untouched."""
    inputs = harness.work(case)
    expected = inputs.check().clone()
    wide = torch.full((expected.shape[0] + 2, *expected.shape[1:]), 7.0).to(expected)
    result = inputs.layer(*inputs.inputs, inputs.batch, out=wide[1:-1])
    assert result.data_ptr() == wide[1:-1].data_ptr(), "out= was given, and another came back"
    assert output_error(wide[1:-1], expected) <= 1e-2
    assert bool((wide[0] == 7).all()) and bool((wide[-1] == 7).all())


def strided(case: Case, harness: Harness) -> None:
    """Query, key and value may be slices of one fused projection."""
    inputs = harness.work(case)
    fused = []
    for name in ("query", "key", "value"):
        tensor = getattr(inputs, name)
        wide = torch.cat([tensor, tensor, tensor], dim=1)
        fused.append(wide[:, tensor.shape[1] : 2 * tensor.shape[1]])
    inputs = inputs.but(query=fused[0], key=fused[1], value=fused[2])
    assert not inputs.query.is_contiguous()
    inputs.check()


def plans(case: Case, harness: Harness) -> None:
    """Several plans are alive at once: all are built, each runs in turn, then the first again.

    Some have equal lengths and other tables, or other lengths in the same table.
    """
    layer = harness.layer(case.spec)
    few = batches(case.batch, block_size(layer))[::-1][:4]
    lengths: list[Lengths | str] = [case.batch, few]
    if case.spec.cached:
        lengths += [few, batches_of_ones(few)]
    lengths.append(case.batch)
    steps = [harness.step(layer, length) for length in lengths]
    plans = [layer.plan(step.batch) for step in steps]
    first = steps[0].check("first of several plans: ", plans[0]).clone()
    for index in (*range(len(steps) - 1, 0, -1), 1):
        label = f"plan {index + 1} of several, interleaved: "
        steps[index].check(label, plans[index])
    again = steps[0].check("first plan again: ", plans[0])
    assert output_error(again, first) <= 1e-2, (
        "the first plan gives other results after the others ran"
    )


def batches_of_ones(lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a decode batch of as many sequences."""
    return [(1, length + 1) for _, length in lengths]


def layers(case: Case, harness: Harness) -> None:
    """Layers of one group share a plan; each has its own cache, parameters and scales.

    K and V of the last one's cache are views into one storage.
    """
    group = harness.group(case.spec)
    several = [harness.layer(case.spec, group=group) for _ in range(3)]
    first = harness.step(several[0], case.batch)
    views = {"packed": True} if case.spec.cached else {}
    second, third = several[1:]
    steps = [first, harness.step(second, case.batch, like=first)]
    steps.append(harness.step(third, case.batch, like=first, **views))
    plan = group.plan(first.batch)
    for turn in (1, 2):
        for number, step in enumerate(steps, 1):
            step.check(f"layer {number} under one plan, turn {turn}: ", plan)


def context(case: Case, harness: Harness) -> None:
    """One object attends to a prompt's own keys under the mask, and to its context without; they merge.

    Both plans are made before either runs.
    """
    layer = harness.layer(case.spec)
    group, form = layer.group, layer.group.cache_format
    lengths = batches(case.batch, block_size(layer))
    if form is not None:  # rows of one token are decodes, which another backend may serve
        lengths = [pair for pair in lengths if pair[0] > 1]
    inputs = harness.step(layer, lengths)
    like = inputs.check()  # the cache holds the new tokens now
    walked = group.kernel_format(group.selection.backend("prefill"))
    backend = group.backend("prefill", AttentionBackend, cache=walked)
    parts = taken_apart(inputs.batch, form.block_size if form else 1)
    key, value = (inputs.key, inputs.value) if form is None else (None, None)
    states = []
    for plan in [backend.plan(part) for part in parts]:
        out = torch.full_like(like, torch.nan)
        lse = torch.full(out.shape[:2], torch.nan, device=out.device)
        backend.run(plan, Frame(inputs.query, key, value, inputs.cache, layer.params, out, lse))
        states.append(AttentionState(out, lse))
    whole = states[0].merge(states[1])
    inputs.compare(whole.output, whole.lse, "own keys and context, merged: ")


def taken_apart(batch: Batch, block_size: int) -> tuple[Batch, Batch]:
    """Return a batch over its new keys, from a block's start on, and over the context before them."""
    lengths = zip(batch.query_lens, batch.lens, strict=True)
    counts = [max(length - query, 0) // block_size for query, length in lengths]
    before = [count * block_size for count in counts]
    rest = [length - first for length, first in zip(batch.lens, before, strict=True)]
    table = batch.block_table
    if table is not None:
        own = Batch(batch.starts, rest, without_first(table, counts))
        return own, Batch(batch.starts, before, table).over_context()
    firsts = batch.key_starts
    starts = [sum(pair) for pair in zip(firsts, before, strict=True)]
    own = Batch(batch.starts, rest, key_starts=starts, device=batch.device)
    context = Batch(batch.starts, before, key_starts=firsts, device=batch.device)
    return own, context.over_context()


def rescaled(case: Case, harness: Harness) -> None:
    """What is written into a scale's tensor counts for the next step, under one plan, too."""
    inputs = harness.work(case)
    plan = inputs.layer.plan(inputs.batch)
    for factor in (1.0, 1.75, 0.5):
        for name in sorted(used_scales(case.spec)):  # what scales nothing stays 1
            inputs.layer.scales.tensors[name].weight.tensor.mul_(factor)
        inputs.but().check(f"scales times {factor}: ", plan)


def isolation(case: Case, harness: Harness) -> None:
    """Whatever one request's keys, values and queries hold never reaches another, bit for bit."""
    inputs = harness.work(case)
    batch, form = inputs.batch, inputs.layer.group.cache_format
    before = inputs.check().clone()
    longest = max(range(batch.num_seqs), key=lambda i: (batch.query_lens[i] > 0, batch.lens[i]))
    new = max(range(batch.num_seqs), key=lambda i: (batch.query_lens[i], batch.lens[i]))
    for victim in dict.fromkeys((longest, new)):
        rows = slice(batch.starts[victim], batch.starts[victim + 1])
        for part in ("key", "value", "query"):
            held = inputs.cache if inputs.cache is None else copied(inputs.cache)
            own = rows
            if form is None and part != "query":
                start = batch.key_starts[victim]
                own = slice(start, start + batch.lens[victim])
            changed = inputs.but(cache=held)
            if getattr(inputs, part) is not None:
                changed = changed.spoil(case.label, (part,), own)
            if part != "query" and held is not None and batch.block_table is not None:
                stored = getattr(held, part)
                used = -(-batch.lens[victim] // stored.shape[1])
                blocks = batch.block_table[victim, :used].long()
                stored[blocks] = spoiled(stored[blocks], case.label)
            after = changed.run()
            others = torch.ones(len(before), dtype=torch.bool)
            others[rows] = False
            what = f"sequence {victim}'s {part} ({case.label})"
            assert torch.equal(after[others], before[others]), f"{what} reached another sequence"
            assert not torch.equal(after[rows], before[rows]), f"{what} must change its own output"


def deterministic(case: Case, harness: Harness) -> None:
    """The same inputs give the same bits."""
    inputs = harness.work(case)
    first = inputs.check().clone()
    for _ in range(3):
        assert torch.equal(inputs.run(), first)


def addressed(case: Case, harness: Harness) -> None:
    """Short steps run by their tensors' addresses, in every shape."""
    work = harness.work(case)
    step = work.layer.group.plan(work.batch)
    assert isinstance(step, AttentionStep) and work.key is not None and work.value is not None
    if not step.calls:
        return
    tensors = work.query, work.key, work.value
    of_query, of_key, of_value = ((t.stride(0), t.stride(1)) for t in tensors)
    (call,) = step.calls
    strides = PackedStrides(of_query, of_key, of_value, work.key.shape[0])
    run = call.backend.addressed(call.plan, strides)
    if run is None:
        assert work.batch.max_seq_len > 64, "it claims by_address, and a short step has no such way"
        return
    out = torch.full(step.out_shape, torch.nan, device=harness.torch_device).to(step.out_dtype)
    lse = None
    if case.spec.needs_lse:
        lse = torch.full(step.lse_shape, torch.nan, device=harness.torch_device)
    run(*(t.view(1, *t.shape) for t in tensors), work.layer.params, out.view(1, *out.shape), lse)
    work.compare(out, lse, "by addresses: ")
