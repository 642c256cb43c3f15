"""Lies of indexers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from polyattn.families.sparse.torch_index import TorchIndex
from polyattn.kernel import IndexFrame, Plan
from polyattn.spec.sparse import IndexerSpec
from torch import Tensor


class Index(TorchIndex):
    by: ClassVar[tuple[str, ...]] = ("index",)


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


class NoActivation(OtherIndexer):
    lie: ClassVar[dict[str, Any]] = {"activation": "none"}


class EveryActivation(OtherIndexer):
    lie: ClassVar[dict[str, Any]] = {"activation": "relu"}


class NothingFirst(OtherIndexer):
    lie: ClassVar[dict[str, Any]] = {"forced_first": 0}


class NothingLast(OtherIndexer):
    lie: ClassVar[dict[str, Any]] = {"forced_last": 0}


class OwnAlways(OtherIndexer):
    """The token's own entry is added for safety."""

    lie: ClassVar[dict[str, Any]] = {"forced_last": 1}


class AllBlocks(OtherIndexer):
    lie: ClassVar[dict[str, Any]] = {"within": 10**6}
    of = "within"


class PlainSum(Index):
    """Weights are left out."""

    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Any
    ) -> Any:
        ones = None if weights is None else torch.ones_like(weights)
        return super()._scores(query, keys, table, entries, ones)


class PositiveWeights(Index):
    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Any
    ) -> Any:
        some = None if weights is None else weights.abs()
        return super()._scores(query, keys, table, entries, some)


class LargerId(Index):
    """Of equal scores the larger id wins."""

    def _best(self, scores: Tensor, visible: Tensor, within: Any, count: int) -> Tensor:
        lifted = scores + 1e-5 * torch.arange(scores.shape[2])
        return super()._best(lifted, visible, within, count)


class Future(Index):
    """One entry more than a token sees."""

    def _best(self, scores: Tensor, visible: Tensor, within: Any, count: int) -> Tensor:
        return super()._best(scores, visible + 1, within, count)


class Past(Index):
    """The token that closes a group doesn't see its entry."""

    def _best(self, scores: Tensor, visible: Tensor, within: Any, count: int) -> Tensor:
        return super()._best(scores, (visible - 1).clamp(min=0), within, count)


class OneFewer(Index):
    def _best(self, scores: Tensor, visible: Tensor, within: Any, count: int) -> Tensor:
        return super()._best(scores, visible, within, count - 1)


class FirstChoice(Index):
    """One choice for all index heads."""

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        super().run(plan, frame)
        frame.out.copy_(frame.out[:, :1].clone().expand_as(frame.out))


class BestFirst(Index):
    """Ids descend."""

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        super().run(plan, frame)
        frame.out.copy_(frame.out.flip(2))


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


class FirstRowsTable(Index):
    """All decodes read the first sequence's blocks."""

    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Any
    ) -> Any:
        return super()._scores(query, keys, table[:1].expand_as(table), entries, weights)


class Roughly(Index):
    """Scores in half precision."""

    by = ("index_ranked",)

    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Any
    ) -> Any:
        return super()._scores(query, keys, table, entries, weights).bfloat16().float()


class HostsLengths(Index):
    """Lengths are the host's, which are bounds."""

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        batch = plan.batch
        kept = batch.seq_lens.clone()
        batch.seq_lens.copy_(torch.tensor(batch.lens))
        super().run(plan, frame)
        batch.seq_lens.copy_(kept)
