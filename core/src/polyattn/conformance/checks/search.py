"""Are random layers and batches right? Drawn from the claims, within a budget of seconds."""

from __future__ import annotations

from polyattn.conformance.case import Case
from polyattn.conformance.derive import CASE
from polyattn.conformance.draws import Draw, drawn, drawn_group, drawn_numbers
from polyattn.conformance.harness.base import Harness
from polyattn.conformance.random_batches import random_batches


def search(case: Case, harness: Harness) -> None:
    """Any layer that is claimed, two of them and two plans in turn, over any batch."""
    phases = harness.info.capabilities.phases
    decodes = "prefill" not in phases and (case.spec.latent is None or case.spec.chooses)

    def example(draw: Draw) -> None:
        group = drawn_group(draw, harness, case.spec)
        numbers = drawn_numbers(draw, group.spec)
        steps = [draw.lengths() for _ in range(2)]
        if decodes:
            steps = [[(1, max(length, 1)) for _, length in step] for step in steps]
        layers = [harness.layer(group.spec, group=group, **numbers) for _ in range(2)]
        firsts = [harness.step(layers[0], step, **numbers) for step in steps]
        plans = [group.plan(first.batch) for first in firsts]
        for index in (0, 1, 0):
            first = firsts[index]
            other = harness.step(layers[1], first.lengths, like=first, **numbers)
            first.check("drawn: ", plans[index])
            other.check("drawn, another layer: ", plans[index])

    drawn(harness, example)


def batches(case: Case, harness: Harness) -> None:
    """A thousand random batches, composed of requests with known answers, NaN beside them."""
    tally = random_batches(harness.info, harness.device, harness.seed, CASE)
    assert not tally.failed, f"{tally.failed} failures: " + "\n".join(tally.failures)
