"""Is a decode right that reads shared blocks once? Each row gets all its keys and no others."""

from __future__ import annotations

import torch

from polyattn.conformance.case import Case
from polyattn.conformance.harness.base import Harness, block_size
from polyattn.families.attention.layer import Attention
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.graphs.cuda_graph import StepGraphs
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.runtime.program import Frame, Plan
from polyattn.runtime.step.shared_prefix import Levels
from polyattn.workload.steps import FORESTS
from polyattn.workload.steps import forest as forest_of


def forest(case: Case, harness: Harness) -> None:
    """Told of the runs, and of the outermost alone, it agrees with the reference, twice the same bits."""
    layer = harness.layer(case.spec)
    step, levels = _step(layer, case.batch, harness)
    for told in dict.fromkeys((levels, levels[:1])):
        plan = _backend(layer).plan(step.batch.with_shared_prefix(told))
        label = f"{len(told)} levels read once: "
        first = _run(step, plan, label)
        if case.spec.deterministic or "deterministic" in _claims(layer):
            assert torch.equal(_run(step, plan, label), first), f"{label}other bits"


def forest_reuse(case: Case, harness: Harness) -> None:
    """A plan that was captured for steps that may share holds each later step's runs, or none."""
    layer = harness.layer(case.spec)
    layer.checks = False  # the captured plan's lengths are the longest, not the step's
    block = block_size(layer)
    small = [name for name in FORESTS if len(forest_of(name, block)[1]) <= 8]
    most = 12 * block
    buffers = StepBuffers(8, 1, most, block, harness.torch_device, sharing=True)
    captured = _backend(layer).plan(buffers.batch([most] * 8))
    for name in (*small, case.batch):
        work, levels = _step(layer, name, harness)
        count = work.batch.num_seqs
        filled = buffers.fill(work.batch.with_shared_prefix(levels))
        _backend(layer).plan(filled, captured)
        query = torch.cat([work.query, work.query.new_zeros(8 - count, *work.query.shape[1:])])
        _run(work.remembered(), captured, f"{name}, a plan reused: ", query)


def forest_graph(case: Case, harness: Harness) -> None:
    """A graph that was captured for steps that may share serves any of them, and steps that don't."""
    layer = harness.layer(case.spec)

    def step(plans, query):  # type: ignore[no-untyped-def]
        return layer(query, None, None, cache, plans[layer.group])

    steps = [_step(layer, name, harness) for name in FORESTS]
    blocks = max(work.cache.num_blocks for work, _ in steps if work.cache is not None)
    cache = layer.group.allocate_cache(blocks)
    graphs = StepGraphs([layer.group], step, [8, 96], 12 * block_size(layer), shared_prefix=True)
    graphs.capture({"query": steps[0][0].query})
    for work, levels in (*steps, steps[0]):
        held = work.remembered().held
        assert held is not None
        cache.key[: held.num_blocks], cache.value[: held.num_blocks] = held.key, held.value
        told = work.batch.with_shared_prefix(levels)
        replayed = graphs.replay(told, {"query": work.query})
        out, lse = replayed if isinstance(replayed, tuple) else (replayed, None)
        work.compare(out, lse, "a replayed step that shares: ")


def _step(layer: Attention, name: str, harness: Harness) -> tuple[AttentionWorkload, Levels]:
    """Return the step of a forest's rows, whose tables and keys agree where they share.

    With "appends", a row has up to four new tokens of its own.
    """
    block, (forest, _, appends) = block_size(layer), name.partition(", ")
    levels, lens = forest_of(forest, block)
    queries = [1] * len(lens)
    if appends:
        shared = dict.fromkeys(range(len(lens)), 0)
        for run in (run for level in levels for run in level):
            shared |= dict.fromkeys(run.rows, (run.first + run.count) * block)
        queries = [max(1, min(1 + row % 4, n - shared[row])) for row, n in enumerate(lens)]
    return harness.step(layer, list(zip(queries, lens, strict=True)), shared=levels), levels


def _backend(layer: Attention) -> AttentionBackend:
    group = layer.group
    walked = group.kernel_format(group.selection.backend("decode"))
    return group.backend("decode", AttentionBackend, cache=walked)


def _claims(layer: Attention) -> frozenset[str]:
    info = layer.group.selection.backend("decode")
    assert info is not None
    return info.capabilities.features


def _run(
    step: AttentionWorkload, plan: Plan, label: str, query: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the backend into a poisoned output over the cache as the step leaves it, and compare.

    `query`: the step's, and padding rows.
    """
    spec, count = step.spec, step.batch.num_tokens
    query = step.query if query is None else query
    out = torch.full((len(query), spec.num_heads, spec.v_head_size), torch.nan, device=query.device)
    out, lse = out.to(query.dtype), None
    if spec.needs_lse:
        lse = torch.full(out.shape[:2], torch.nan, device=out.device)
    _backend(step.layer).run(plan, Frame(query, None, None, step.held, step.layer.params, out, lse))
    step.compare(out[:count], None if lse is None else lse[:count], label)
    return out
