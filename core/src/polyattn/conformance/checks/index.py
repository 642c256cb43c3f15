"""What must an indexer do?"""

from __future__ import annotations

import torch

from polyattn.conformance.case import Case
from polyattn.conformance.checks import invariance
from polyattn.conformance.harness.index import IndexHarness
from polyattn.families.sparse import reference
from polyattn.families.sparse.index_workload import NEAR, WHOLE
from polyattn.families.sparse.indexer import chosen_width
from polyattn.runtime.program import IndexFrame
from polyattn.runtime.step.batch import Batch
from polyattn.spec.kinds import Invariance
from polyattn.workload.pages import unchanged


def index(case: Case, harness: IndexHarness) -> None:
    """Whole numbers, whose scores are exact and tie: each id, ascending, and the same ids twice."""
    backend = harness.index(case.spec)
    steps = [harness.step(case.spec, case.batch, numbers=WHOLE) for _ in range(2)]
    plans = [backend.plan(step.batch) for step in steps]
    for at in (0, 1, 0):
        frame, wanted = steps[at].frame, steps[at].expected
        before = {
            name: getattr(frame, name).clone()
            for name in ("query", "keys", "weights", "within")
            if getattr(frame, name) is not None
        }
        frame.out.fill_(7)
        backend.run(plans[at], frame)
        for name, held in before.items():
            unchanged(name, getattr(frame, name), held)
        chosen = frame.out.cpu()
        for token, choice in (chosen != wanted).any(2).nonzero()[:1].tolist():
            scores = reference.scored(case.spec, steps[at].batch, frame, token)[choice]
            ids = [each[token, choice].tolist() for each in (chosen, wanted)]
            raise AssertionError(
                f"{harness.backend} chose {ids[0]} for token {token}, choice {choice}, not {ids[1]}: "
                + _difference(scores, *([n for n in each if n >= 0] for each in ids))
            )


def _difference(scores: dict[int, float], chosen: list[int], wanted: list[int]) -> str:
    """Say what is wrong with a token's ids. `scores`: of the candidates that it sees."""
    if sorted(chosen) == wanted:
        return "these ids in another order; they ascend, and -1 follows them"
    if unseen := {*chosen} - {*wanted} - {*scores}:
        return f"it sees {len(scores)} candidates, and not {min(unseen)}"
    if problem := reference.ranking_problem(scores, chosen, wanted):
        return f"it {problem}"
    other = min({*chosen} - {*wanted})
    return f"of equal scores, {other}'s is {scores[other]:.6g}, the smaller id is chosen"


def index_ranked(case: Case, harness: IndexHarness) -> None:
    """Any numbers: no other candidate has a better score than the chosen ones, except by rounding."""
    backend = harness.index(case.spec)
    step = harness.step(case.spec, case.batch)
    backend.run(backend.plan(step.batch), step.frame)
    exact, chosen = step.expected, step.frame.out.cpu()
    assert torch.equal((chosen >= 0).sum(2), (exact >= 0).sum(2)), "another number of ids"
    for token, choice in (chosen != exact).any(2).nonzero().tolist():
        scores = reference.scored(case.spec, step.batch, step.frame, token)[choice]
        ids = ([n for n in each[token, choice].tolist() if n >= 0] for each in (chosen, exact))
        problem = reference.ranking_problem(scores, *ids)
        assert problem is None, f"token {token} {problem}"


def index_regrouped(case: Case, harness: IndexHarness) -> None:
    """Among keys whose scores rounding decides, a token chooses alike in any batch, and as a decode."""
    backend = harness.index(case.spec)
    step = harness.step(case.spec, case.batch, numbers=NEAR)
    batch, frame = step.batch, step.frame
    backend.run(backend.plan(batch), frame)
    queries, table, device = batch.query_lens, batch.block_table, harness.torch_device
    assert table is not None and case.spec.indexer is not None
    tokens = [(seq, at) for seq, count in enumerate(queries) for at in range(count)]
    regrouped = [
        [(seq, 0, queries[seq]) for seq in requests]
        for requests in invariance.drawn_requests(harness.dice, batch.num_seqs, invariance.DRAWS)
    ]
    if case.spec.batch_invariant >= Invariance.STEPS:
        regrouped += [[(*tokens[i], 1) for i in harness.dice.order(len(tokens)).tolist()]]
        regrouped += [[(*token, 1)] for token in tokens[:: max(1, len(tokens) // invariance.DRAWS)]]
    for pieces in regrouped:
        rows = [batch.starts[seq] + at + i for seq, at, count in pieces for i in range(count)]
        lens = [max(batch.lens[seq] - queries[seq] + at + count, 0) for seq, at, count in pieces]
        some = Batch.from_lens([count for _, _, count in pieces], lens, device=device)
        some.block_table = table[[seq for seq, _, _ in pieces]]
        out = frame.out.new_full(
            (len(rows), frame.out.shape[1], chosen_width(case.spec.indexer, some)), 7
        )
        weights, within = (None if t is None else t[rows] for t in (frame.weights, frame.within))
        part = IndexFrame(frame.query[rows], frame.keys, weights, within, out)
        backend.run(backend.plan(some), part)
        wanted = frame.out[rows]
        width = min(out.shape[2], wanted.shape[2])
        differ = int((out[..., :width] != wanted[..., :width]).any(2).sum())
        assert not differ, f"{differ} choices are others in a step of {pieces[:4]}"
