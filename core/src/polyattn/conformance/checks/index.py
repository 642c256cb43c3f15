"""What is looked at of an indexer?"""

from __future__ import annotations

import torch

from polyattn.conformance.case import Case
from polyattn.conformance.harness.index import IndexHarness
from polyattn.families.sparse import reference
from polyattn.workload.pages import unchanged


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
    chosen = frame.out.cpu()
    assert torch.equal((chosen >= 0).sum(2), (exact >= 0).sum(2)), "another number of ids"
    for token, choice in (chosen != exact).any(2).nonzero().tolist():
        scores = reference.scored(case.spec, batch, frame, token)[choice]
        ids = ([n for n in each[token, choice].tolist() if n >= 0] for each in (chosen, exact))
        problem = reference.ranking_problem(scores, *ids)
        assert problem is None, f"token {token} {problem}"
