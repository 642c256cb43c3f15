"""Are captured steps right, and planned ones by bounds? Whatever rows, lengths and tables come later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.harness.base import Harness
from polyattn.families.attention.planning import AttentionStep
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.runtime.backend import PageStrides
from polyattn.runtime.graphs.cuda_graph import StepGraphs
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers, StepSize
from polyattn.runtime.group import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.workload.steps import batches

SIZE = StepSize(3, prompts=3, prompt_tokens=40)
STEPS = (
    [(1, 33), (7, 40), (1, 5), (22, 22), (1, 17), (11, 50)],
    [(3, 3), (36, 60), (1, 1), (1, 64)],
    [(1, 5), (1, 6), (1, 7), (1, 8), (0, 9), (2, 60)],
)
"""(query length, length) of each row: prompts between decodes, one that fills its room, a decode too
many beside a row without a query."""


def mixed_reuse(case: Case, harness: Harness) -> None:
    """What a captured mixed step reads is refilled: the first plan, run after others were planned."""
    for work, out, lse in mixed_refills(harness, harness.layer(case.spec)):
        work.compare(out, lse, "a mixed plan reused: ")


def mixed_refills(
    harness: Harness, layer: Any
) -> Iterator[tuple[AttentionWorkload, Tensor, Tensor | None]]:
    """Yield mixed steps with a captured plan's results, as `refills` does."""
    layer.checks = False  # the captured plan's lengths are the longest, not the step's
    form = layer.group.cache_format
    assert form is not None
    buffers = MixedBuffers(SIZE, 64, form.block_size, harness.torch_device)
    captured = layer.group.plan(buffers.longest())
    for lengths in STEPS:
        work = harness.step(layer, lengths)
        tokens = work.batch.num_tokens
        assert buffers.fits(work.batch)
        filled = buffers.fill(work.batch)
        layer.group.plan(filled, reuse=captured)
        places = buffers.places[:tokens]

        widened = {
            name: tensor.new_zeros(SIZE.tokens, *tensor.shape[1:]).index_copy_(0, places, tensor)
            for name, tensor in work.tensors().items()
        }
        step = work.remembered().but(batch=filled, **widened)
        step.run(captured)
        lse = None if step.lse is None else step.lse[places]
        yield work, step.out[places], lse


def mixed_graph(case: Case, harness: Harness) -> None:
    """A captured mixed step, replayed over other rows, lengths and tables, equals eager."""
    layer = harness.layer(case.spec)
    form = layer.group.cache_format
    assert form is not None
    first = harness.step(layer, STEPS[0])
    cache = layer.group.allocate_cache(64)

    def step(plans: Any, choice: Tensor | None = None, **inputs: Tensor) -> Any:
        chosen = {} if choice is None else {"choice": choice}
        return layer(*inputs.values(), cache, plans[layer.group], **chosen)

    graphs = StepGraphs([layer.group], step, [SIZE], 64)
    graphs.capture(first.tensors())
    for lengths in STEPS:
        work = harness.step(layer, lengths)
        assert work.cache is not None
        blocks = work.cache.num_blocks
        for stored, wanted in ((cache.key, work.cache.key), (cache.value, work.cache.value)):
            stored[:blocks] = wanted
        replayed = graphs.replay(work.remembered().batch, work.tensors()).clone()
        work.compare(replayed, None, "replayed: ")
        graph = graphs.find(work.batch)
        assert graph is not None
        filled = graph.buffers.fill(work.batch)
        eager = step({layer.group: filled}, **graph.inputs)
        rows = slice(0, len(replayed))
        if isinstance(graph.buffers, MixedBuffers):
            eager = eager[graph.buffers.places[rows]]
        assert torch.equal(eager[rows], replayed), (
            "a replay has other bits than the same step run eagerly"
        )


def graph(case: Case, harness: Harness) -> None:
    """A captured step, planned again with other lengths and block tables, equals eager bit for bit.

    It still does after the capture of a larger batch. The backend may have grown its workspace for
    that, and the first graph must not write to memory that has a new owner.
    """
    layer = harness.layer(case.spec)
    form = layer.group.cache_format
    assert form is not None
    first = harness.step(layer, captured_lengths(case, form.block_size))
    cache, count = first.cache, first.batch.num_seqs
    query_len, block = first.batch.max_query_len, form.block_size

    def step(plans, query, key, value):  # type: ignore[no-untyped-def]
        return layer(query, key, value, cache, plans[layer.group])

    graphs = StepGraphs([layer.group], step, [count, 8 * count], 8 * block, query_len)
    graphs.capture(first.tensors())
    others = [
        torch.full((size,), 7.0, device=harness.torch_device)
        for size in (1 << 13,) * 128 + (1 << 19,) * 32
    ]
    for reverse in (False, True):
        lengths = captured_lengths(case, block)
        work = harness.step(layer, lengths[::-1] if reverse else lengths)
        assert work.cache is not None and cache is not None
        cache.key[: work.cache.num_blocks] = work.cache.key
        cache.value[: work.cache.num_blocks] = work.cache.value
        eager = work.remembered().run()
        assert torch.equal(graphs.replay(work.batch, work.tensors()), eager)
        assert all(bool((other == 7).all()) for other in others), "it wrote beside its own memory"
        work.check()


def reuse(case: Case, harness: Harness) -> None:
    """What a captured graph reads is refilled: the first plan, run after another step was planned.

    A device that records no graphs can still tell whether the new step is in the old plan's buffers.
    """
    for work, out, lse in refills(case, harness, harness.layer(case.spec)):
        work.compare(out, lse, "a plan reused: ")


def refills(
    case: Case, harness: Harness, layer: Any
) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """Yield several steps, each with the results of one captured plan after planning the step into it."""
    layer.checks = False  # the captured plan's lengths are the longest, not the step's
    form = layer.group.cache_format
    assert form is not None
    lengths = captured_lengths(case, form.block_size)
    rows, query_len = len(lengths) + 2, max(query for query, _ in lengths)
    buffers = StepBuffers(
        rows,
        query_len,
        8 * form.block_size,
        form.block_size,
        harness.torch_device,
        padding_rows=layer.group.planner.padding_rows,
    )
    captured = layer.group.plan(buffers.longest())
    for chosen in (lengths, lengths[::-1], lengths[1:4]):
        work = harness.step(layer, chosen)
        tokens = work.batch.num_tokens
        filled = buffers.fill(work.batch)
        layer.group.plan(filled, reuse=captured)
        widened = {
            name: torch.cat([t, t.new_zeros(rows * query_len - tokens, *t.shape[1:])])
            for name, t in work.tensors().items()
        }
        step = work.remembered().but(batch=filled, **widened)
        step.run(captured)
        lse = None if step.lse is None else step.lse[:tokens]
        yield work, step.out[:tokens], lse


def bounds(case: Case, harness: Harness) -> None:
    """A plan by bounds serves all lengths on the device, padding rows included."""
    layer = harness.layer(case.spec)
    layer.checks = False  # the plan's lengths are bounds
    form = layer.group.cache_format
    assert form is not None
    lengths = batches(case.batch, form.block_size)
    work = harness.step(layer, [*lengths, *lengths[1:]] if case.batch == "decode" else lengths)
    batch = work.batch
    assert batch.block_table is not None
    longest = batch.block_table.shape[1] * form.block_size
    bounded = Batch.on_buffers(
        batch.starts,
        [longest] * batch.num_seqs,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.slot_mapping,
    )
    plan = layer.group.plan(bounded)
    work.check("planned by bounds: ", plan)
    # The same plan, after the device's lengths have changed.
    pairs = zip(batch.query_lens, batch.lens, strict=True)
    lens = [max(length // 2, min(length, query)) for query, length in pairs]
    if layer.group.planner.padding_rows:
        lens = [0 if i % 3 == 2 else n for i, n in enumerate(lens)]
    batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
    shorter = Batch(batch.starts, lens, batch.block_table)
    held = work.but(batch=shorter, key=None, value=None)
    held.check("shorter ones by the same plan: ", plan)
    _by_address(held, plan)


def _by_address(work: AttentionWorkload, plan: StepPlan) -> None:
    """Run a plan by bounds over pages by its tensors' addresses, where its backend has such a way."""
    cache = work.cache
    assert isinstance(plan, AttentionStep) and cache is not None
    if len(plan.calls) != 1 or plan.calls[0].block_size is not None:
        return
    (call,) = plan.calls
    of_query, of_key, of_value = work.query.stride(), cache.key.stride(), cache.value.stride()
    strides = PageStrides(of_query[:2], of_key[:3], of_value[:3])  # type: ignore[arg-type]
    run = call.backend.addressed_pages(call.plan, strides)
    if run is None:
        return
    out = torch.full(plan.out_shape, torch.nan, device=work.device).to(plan.out_dtype)
    lse = None
    if work.spec.needs_lse:
        lse = torch.full(plan.lse_shape, torch.nan, device=work.device)
    run(work.query[None], cache.key, cache.value, work.layer.params, out[None], lse)
    work.compare(out, lse, "over pages by addresses: ")


def captured_lengths(case: Case, block: int) -> list[tuple[int, int]]:
    """Return the rows of a case whose rows have as many query tokens each."""
    lengths = batches("decode", block)
    return [(3, length + 2) for _, length in lengths] if case.batch == "three each" else lengths
