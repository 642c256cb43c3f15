"""Checks that a step's plan reads the keys that the layer's mask shows, in a share of planning time."""

from __future__ import annotations

import time
from typing import Any

from polyattn.errors import PluginError, shown
from polyattn.runtime.backend import AttentionBackend, Backend
from polyattn.runtime.portions import unevenly_called, with_host_table
from polyattn.runtime.reads import problems
from polyattn.runtime.step.batch import Batch
from polyattn.spec.kinds import AttentionKind

SHARE = 0.2
"""The share of the planning time that checks may take with `POLYATTN_CHECKS`."""


class PlanChecks:
    """Checks steps as they are planned, within a share of the planning time.

    `share` is that share; infinity checks every step. The first step is always checked. `plans` counts
    backends' plans, and `checked` those whose backend could tell.
    """

    def __init__(self, share: float = SHARE):
        self.share, self.planned, self.spent = share, 0.0, 0.0
        self.plans = self.checked = 0

    def __call__(self, step: Any, seconds: float) -> None:
        """Check a `StepPlan` that took `seconds` to plan. Raises `PluginError`."""
        self.planned += seconds
        if self.plans and self.spent > self.share * self.planned:
            return
        began = time.perf_counter()
        check_calls(step)
        for call in step.calls:
            shared = getattr(call.plan, "merged", None)  # a decode whose rows share blocks
            for each in (call,) if shared is None else shared.calls:
                self.plans += 1
                self.checked += check_plan(each.backend, each.plan, each.plan.batch)
        self.spent += time.perf_counter() - began


def check_calls(step: Any) -> None:
    """Check that the calls of a `StepPlan` together attend to each key once. Raises `PluginError`."""
    spec, form = step.group.spec, step.group.cache_format
    # Each token of a sparse layer chooses its own keys.
    if spec.kind.is_recurrent or spec.kind is AttentionKind.SPARSE:
        return
    problem = unevenly_called(step.batch, step.ops, form, spec.chunk_size)
    if problem:
        raise PluginError(
            f"a step was taken apart wrongly, and its answer would be wrong: {'; '.join(problem)} "
            f"({spec}, "
            f"query lengths {shown(step.batch.query_lens)}, lengths {shown(step.batch.lens)}); report it"
        )


def check_plan(backend: Any, plan: Any, batch: Batch) -> bool:
    """Check that a plan reads the keys that the layer's mask shows. Returns whether it could check.

    `batch`: the step whose work the plan's buffers hold, which for a captured plan may be a later one's.
    Raises `PluginError` with the difference.
    """
    if batch.lens_are_bounds or not isinstance(backend, Backend):
        return False
    reads = backend.reads(plan, batch)
    if reads is None:
        return False
    spec = reads.spec
    if spec is None:
        spec = backend.spec_of(batch) if isinstance(backend, AttentionBackend) else backend.spec
    faults = problems(spec, with_host_table(batch), reads)
    if faults:
        raise PluginError(
            f"{type(backend).name} planned a step wrongly, and its answer would be wrong: "
            f"{'; '.join(faults)} ({spec}, query lengths {shown(batch.query_lens)}, lengths "
            f"{shown(batch.lens)}); report it, and select another backend until it is fixed"
        )
    return True
