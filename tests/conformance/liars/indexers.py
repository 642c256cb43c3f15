"""Lies of indexers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from liars.told import Hooks, lies
from polyattn.families.sparse.torch_index import TorchIndex
from polyattn.kernel import IndexFrame, Plan
from polyattn.spec.sparse import IndexerSpec
from torch import Tensor


class Index(Hooks, TorchIndex):
    """Right choices, but for what a table says in place of one step."""

    by: ClassVar[tuple[str, ...]] = ("index",)

    def weighed(self, weights: Tensor) -> Tensor:
        return weights

    def rows(self, table: Tensor) -> Tensor:
        return table

    def scored(self, scores: Tensor) -> Tensor:
        return scores

    def ranked(self, scores: Tensor, visible: Tensor, within: Any, count: int) -> tuple[Any, ...]:
        return scores, visible, within, count

    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Any
    ) -> Any:
        some = None if weights is None else self.weighed(weights)
        return self.scored(super()._scores(query, keys, self.rows(table), entries, some))

    def _best(self, scores: Tensor, visible: Tensor, within: Any, count: int) -> Tensor:
        return super()._best(*self.ranked(scores, visible, within, count))


class HonestIndex(Index):
    by = ()


class OtherIndexer(Index):
    """Another indexer than the spec's."""

    lie: ClassVar[dict[str, Any]] = {}
    of: ClassVar[str] = ""

    @property
    def indexer(self) -> IndexerSpec:
        spec = super().indexer
        return replace(spec, **self.lie) if not self.of or getattr(spec, self.of) else spec


OTHER: dict[str, dict[str, Any]] = {
    "NoActivation": {"lie": {"activation": "none"}},
    "EveryActivation": {"lie": {"activation": "relu"}},
    "NothingFirst": {"lie": {"forced_first": 0}},
    "NothingLast": {"lie": {"forced_last": 0}},
    "OwnAlways": {"lie": {"forced_last": 1}},  # the token's own entry is added for safety
    "AllBlocks": {"lie": {"within": 10**6}, "of": "within"},
}
for _name, _fields in OTHER.items():
    globals()[_name] = type(_name, (OtherIndexer,), {"__module__": __name__, **_fields})
WEIGHED = {
    "PlainSum": lambda self, weights: torch.ones_like(weights),
    "PositiveWeights": lambda self, weights: weights.abs(),
}
RANKED = {
    # Of equal scores the larger id wins.
    "LargerId": lambda self, scores, *rest: (
        scores + 1e-5 * torch.arange(scores.shape[2]), *rest),
    # One entry more than a token sees.
    "Future": lambda self, scores, visible, *rest: (scores, visible + 1, *rest),
    # The token that closes a group doesn't see its entry.
    "Past": lambda self, scores, visible, *rest: (scores, (visible - 1).clamp(min=0), *rest),
    "OneFewer": lambda self, scores, visible, within, count: (scores, visible, within, count - 1),
}  # fmt: skip
AFTER = {
    # One choice for all index heads.
    "FirstChoice": lambda self, plan, frame: frame.out.copy_(
        frame.out[:, :1].clone().expand_as(frame.out)),
    # Ids descend.
    "BestFirst": lambda self, plan, frame: frame.out.copy_(frame.out.flip(2)),
}  # fmt: skip
# All decodes read the first sequence's blocks.
ROWS = {"FirstRowsTable": lambda self, table: table[:1].expand_as(table)}
# Scores in half precision.
SCORED = {"Roughly": lambda self, scores: scores.bfloat16().float()}
globals().update(lies(
    __name__,
    (Index, "weighed", WEIGHED), (Index, "ranked", RANKED), (Index, "after", AFTER),
    (Index, "rows", ROWS), (Index, "scored", SCORED, "index_ranked"),
))  # fmt: skip


class LeavesWhatWasThere(Index):
    """Places behind the ids aren't written."""

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        before = frame.out.clone()
        super().run(plan, frame)
        frame.out.copy_(torch.where(frame.out < 0, before, frame.out))


class LatestIndexPlan(Index):
    """Every plan is the one that was made last."""

    def plan(self, batch: Any, reuse: Any = None) -> Any:
        self.last = super().plan(batch, reuse)
        return self.last

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        same = plan.batch.num_tokens == self.last.batch.num_tokens
        super().run(self.last if same else plan, frame)


class HostsLengths(Index):
    """Lengths are the host's, which are bounds."""

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        batch = plan.batch
        kept = batch.seq_lens.clone()
        batch.seq_lens.copy_(torch.tensor(batch.lens))
        super().run(plan, frame)
        batch.seq_lens.copy_(kept)
