"""Lies about blocks that rows share: what is read once for all goes to the wrong rows, or twice."""

from __future__ import annotations

from typing import ClassVar

import torch
from liars.plain import GraphPlan, HonestGraph, Pair
from polyattn.kernel import Batch, KVCache, LayerParams, Plan, SharedRun
from torch import Tensor


class Forest(HonestGraph):
    """Reads each run from its first row's table, a row's rest from its own; honest."""

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        super().refill(plan, batch)
        plan.batch = plan.batch.with_shared_prefix(batch.shared_prefix)

    def held(self, plan: GraphPlan) -> Batch:
        return super().held(plan).with_shared_prefix(plan.batch.shared_prefix)

    def runs(self, batch: Batch, index: int) -> list[SharedRun]:
        levels = batch.shared_prefix or ()
        return [run for level in levels for run in level if index in run.rows]

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        blocks = super().blocks(batch, index, count).clone()
        assert batch.block_table is not None
        for run in self.runs(batch, index):
            columns = slice(run.first, run.first + run.count)
            blocks[columns] = batch.block_table[run.rows[0], columns].long()
        return blocks


class HonestForest(Forest):
    """What the liars are when they don't lie."""


class OneRowBeside(Forest):
    """Reads a run from the table of the row behind its first."""

    by = ("forest",)

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        blocks = super().blocks(batch, index, count)
        assert batch.block_table is not None
        for run in self.runs(batch, index):
            other = batch.block_table[min(run.rows[0] + 1, batch.num_seqs - 1)]
            blocks[run.first : run.first + run.count] = other[run.first : run.first + run.count]
        return blocks


class Twice(Forest):
    """Shared keys count in the group's part, and in the row's own."""

    by = ("forest",)

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        keys, values = super().read(plan, cache, index, params)
        ends = [run.first + run.count for run in self.runs(plan.batch, index)]
        again = max(ends, default=0) * cache.block_size
        return torch.cat([keys[:again], keys]), torch.cat([values[:again], values])


class OutermostAlone(Forest):
    """What deeper levels share is nobody's."""

    by = ("forest",)

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        keys, values = super().read(plan, cache, index, params)
        kept = torch.ones(len(keys), dtype=torch.bool)
        for run in self.runs(plan.batch, index)[1:]:
            kept[run.first * cache.block_size : (run.first + run.count) * cache.block_size] = False
        return keys[kept], values[kept]


class SinksInEachPart(Forest):
    """Learned sinks join the denominator once a part."""

    by = ("forest",)

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        self.parts = 1 + len(self.runs(plan.batch, index))
        return super().read(plan, cache, index, params)

    parts: ClassVar[int] = 1

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams) -> Pair:
        if params.sinks is not None:
            params = LayerParams(sinks=params.sinks + torch.log(torch.tensor(float(self.parts))))
        return super().attend(query, keys, values, params)


class SixteenRows(Forest):
    """A group's second tile of sixteen rows has its keys in another order than its values."""

    by = ("forest",)

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        runs = self.runs(plan.batch, index)
        keys, values = super().read(plan, cache, index, params)
        if runs and runs[0].rows.index(index) >= 16:
            return keys.roll(1, 0), values
        return keys, values


class FirstForest(Forest):
    """A captured plan keeps the runs that it had first."""

    by = ("forest_reuse",)

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        kept = plan.batch.shared_prefix or batch.shared_prefix
        super().refill(plan, batch.with_shared_prefix(kept))
