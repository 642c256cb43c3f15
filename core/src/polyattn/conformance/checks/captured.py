"""Are captured steps right, and planned ones by bounds? Whatever rows, lengths and tables come later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.harness.base import Harness, block_size
from polyattn.families.attention.planning import AttentionStep
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.runtime.backend import PageStrides
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.graphs.cuda_graph import Step, StepGraphs
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers, StepSize
from polyattn.runtime.group import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.workload.steps import Lengths, batches

Refilled = tuple[Any, Tensor, Tensor | None]
"""A step, and what a captured plan gave for it: output and LSE."""

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


def mixed_refills(harness: Harness, layer: Any) -> Iterator[Refilled]:
    """Return mixed steps with a captured plan's results."""
    buffers = MixedBuffers(SIZE, 64, block_size(layer), harness.torch_device)
    return _refills(harness, layer, buffers, STEPS)


def mixed_graph(case: Case, harness: Harness) -> None:
    """A captured mixed step, replayed over other rows, lengths and tables, equals eager."""
    layer = harness.layer(case.spec)
    cache = layer.group.allocate_cache(64)
    graphs = StepGraphs([layer.group], _over(layer, cache), [SIZE], 64)
    graphs.capture(harness.step(layer, STEPS[0]).tensors())
    for lengths in STEPS:
        work = harness.step(layer, lengths)
        _hold(cache, work.cache)
        replayed = graphs.replay(work.remembered().batch, work.tensors()).clone()
        work.compare(replayed, None, "replayed: ")
        graph = graphs.find(work.batch)
        assert graph is not None
        filled = graph.buffers.fill(work.batch)
        eager = graph.step({layer.group: filled}, **graph.inputs)
        eager = eager[graph.buffers.rows(work.batch)]
        assert torch.equal(eager, replayed), (
            "a replay has other bits than the same step run eagerly"
        )


def graph(case: Case, harness: Harness) -> None:
    """A captured step, replayed with other lengths, tables and choices, equals eager bit for bit.

    It still does after the capture of a larger batch. The backend may have grown its workspace for
    that, and the first graph must not write to memory that has a new owner.
    """
    layer = harness.layer(case.spec)
    block = layer.group.cache_format.block_size
    lengths = captured_lengths(case, block)
    first = harness.step(layer, lengths)
    count, query_len = first.batch.num_seqs, first.batch.max_query_len
    step = _over(layer, first.cache)
    graphs = StepGraphs([layer.group], step, [count, 8 * count], 8 * block, query_len)
    graphs.capture(first.tensors())
    others = [
        torch.full((size,), 7.0, device=harness.torch_device)
        for size in (1 << 13,) * 128 + (1 << 19,) * 32
    ]
    for chosen in (lengths, lengths[::-1]):
        work = harness.step(layer, chosen)
        _hold(first.cache, work.cache)
        eager = work.remembered().run()
        assert torch.equal(graphs.replay(work.batch, work.tensors()), eager)
        assert all(bool((other == 7).all()) for other in others), "it wrote beside its own memory"
        work.check()


def _over(layer: Any, cache: KVCache) -> Step:
    """Return a step of one layer, for capture."""

    def step(plans: Any, choice: Tensor | None = None, **inputs: Tensor) -> Any:
        chosen = {} if choice is None else {"choice": choice}
        return layer(*inputs.values(), cache, plans[layer.group], **chosen)

    return step


def _hold(cache: KVCache, wanted: KVCache) -> None:
    """Copy another cache's blocks to the first ones of a captured step's."""
    for stored, others in ((cache.key, wanted.key), (cache.value, wanted.value)):
        stored[: len(others)] = others


def reuse(case: Case, harness: Harness) -> None:
    """What a captured graph reads is refilled: the first plan, run after another step was planned.

    A device that records no graphs can still tell whether the new step is in the old plan's buffers.
    """
    for work, out, lse in refills(case, harness, harness.layer(case.spec)):
        work.compare(out, lse, "a plan reused: ")


def refills(case: Case, harness: Harness, layer: Any) -> Iterator[Refilled]:
    """Return steps of rows of as many tokens each with a captured plan's results."""
    block = layer.group.cache_format.block_size
    lengths = captured_lengths(case, block)
    rows, query_len = len(lengths) + 2, max(query for query, _ in lengths)
    pads, device = layer.group.planner.padding_rows, harness.torch_device
    buffers = StepBuffers(rows, query_len, 8 * block, block, device, padding_rows=pads)
    return _refills(harness, layer, buffers, (lengths, lengths[::-1], lengths[1:4]))


def _refills(
    harness: Harness, layer: Any, buffers: StepBuffers, steps: Sequence[Lengths]
) -> Iterator[Refilled]:
    """Yield each step with the results of one captured plan after planning the step into it."""
    layer.checks = False  # the captured plan's lengths are the longest, not the step's
    captured = layer.group.plan(buffers.longest())
    for lengths in steps:
        work = harness.step(layer, lengths)
        assert buffers.fits(work.batch)
        filled = buffers.fill(work.batch)
        layer.group.plan(filled, reuse=captured)
        rows = buffers.rows(work.batch)
        widened = {
            name: in_rows(tensor, rows, buffers.num_tokens, 0)
            for name, tensor in work.tensors().items()
        }
        step = work.remembered().but(batch=filled, **widened)
        step.run(captured)
        yield work, step.out[rows], None if step.lse is None else step.lse[rows]


def in_rows(tensor: Tensor, rows: slice | Tensor, count: int, rest: float) -> Tensor:
    """Return a tensor of `count` rows, a step's own where a graph has them and `rest` elsewhere."""
    wide = tensor.new_full((count, *tensor.shape[1:]), rest)
    wide[rows] = tensor
    return wide


def bounds(case: Case, harness: Harness) -> None:
    """A plan by bounds serves all lengths on the device, padding rows included."""
    layer = harness.layer(case.spec)
    layer.checks = False  # the plan's lengths are bounds
    lengths = batches(case.batch, block_size(layer))
    work = harness.step(layer, [*lengths, *lengths[1:]] if case.batch == "decode" else lengths)
    batch = work.batch
    assert batch.block_table is not None
    longest = batch.block_table.shape[1] * block_size(layer)
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
