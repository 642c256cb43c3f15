"""What is looked at of an indexer?"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.harness.index import IndexHarness
from polyattn.families.sparse import reference
from polyattn.runtime.program import IndexFrame
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec
from polyattn.workload.pages import unchanged

BAND = 1e-4
"""How far below the worst chosen score, as a part of the largest, another one may lie in its place."""


def index(case: Case, harness: IndexHarness) -> None:
    """Whole numbers, whose scores are exact and tie: each id, ascending, and the same ids twice."""
    backend = harness.index(case.spec)
    steps = [harness.step(case.spec, case.batch) for _ in range(2)]
    plans = [backend.plan(batch) for batch, _ in steps]
    for at in (0, 1, 0):
        batch, frame = steps[at]
        before = {
            name: getattr(frame, name).clone()
            for name in ("query", "keys", "weights", "within")
            if getattr(frame, name) is not None
        }
        frame.out.fill_(7)
        backend.run(plans[at], frame)
        for name, held in before.items():
            unchanged(name, getattr(frame, name), held)
        wanted = harness.expected(case.spec, batch, frame)
        wrong = (frame.out.cpu() != wanted).nonzero()
        assert not len(wrong), (
            f"{harness.backend} chose {frame.out[tuple(wrong[0, :2])].tolist()} for token and choice "
            f"{wrong[0, :2].tolist()}, not {wanted[tuple(wrong[0, :2])].tolist()}"
        )


def index_ranked(case: Case, harness: IndexHarness) -> None:
    """Any numbers: no candidate that was left out has a score that is better, but for rounding."""
    backend = harness.index(case.spec)
    batch, frame = harness.step(case.spec, case.batch, whole=False)
    backend.run(backend.plan(batch), frame)
    exact = harness.expected(case.spec, batch, frame)
    found = frame.out.cpu()
    assert torch.equal((found >= 0).sum(2), (exact >= 0).sum(2)), "another number of ids"
    for token, choice in (found != exact).any(2).nonzero().tolist():
        _ranked(case.spec, batch, frame, token, choice, found[token, choice], exact[token, choice])


def _ranked(
    spec: LayerSpec, batch: Batch, frame: IndexFrame, token: int, choice: int, found: Tensor,
    exact: Tensor,
) -> None:  # fmt: skip
    """Assert that ids which differ from the definition's have scores as good."""
    mine, theirs = {*found.tolist()} - {*exact.tolist()}, {*exact.tolist()} - {*found.tolist()}
    assert len(mine) == len(theirs), f"token {token} has an id twice"
    scores = reference.scored(spec, batch, frame, token)[choice]
    largest = max(abs(score) for score in scores.values())
    for one, other in zip(sorted(mine), sorted(theirs), strict=True):
        assert one in scores, f"token {token} doesn't see candidate {one}"
        assert abs(scores[one] - scores[other]) <= BAND * largest, (
            f"token {token} has candidate {one} of score {scores[one]:.6g}, and not {other} of "
            f"{scores[other]:.6g}"
        )
