"""What does an indexer's call take? One step over a paged cache of random index keys, as a workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from polyattn import Batch, Indexer, LayerGroup
from polyattn.families.sparse import reference
from polyattn.families.sparse.roofline import index_cost
from polyattn.kernel import IndexFrame
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.workload.dice import Dice

PAGE = 64
DRAWN = 1 << 20
"""Index keys that are stored at a time."""


class IndexStep:
    """One step of a layer's indexer: `call` writes `out` and returns it."""

    def __init__(self, group: LayerGroup, lengths: Sequence[tuple[int, int]], dice: Dice):
        self.group, self.spec, self.lengths, self.device = group, group.spec, lengths, dice.device
        self.indexer, form = Indexer(group), group.spec.indexer
        assert form is not None
        queries, lens = [query for query, _ in lengths], [length for _, length in lengths]
        table, blocks = dice.blocks([n // form.tokens_per_entry for n in lens], PAGE)
        self.batch = Batch.from_lens(queries, lens, device=self.device).with_block_table(table)
        self.keys, dtype = (
            self.indexer.allocate_cache(blocks, PAGE),
            STORAGE_DTYPES[self.spec.dtype],
        )
        for slots in torch.arange(blocks * PAGE, device=self.device).split(DRAWN):
            self.indexer.store(
                dice.normal(len(slots), form.head_size, dtype=dtype), self.keys, slots
            )
        self.query = dice.normal(sum(queries), form.num_heads, form.head_size, dtype=dtype)
        self.weights = None
        if form.fold == "weighted":
            self.weights = dice.normal(sum(queries), form.num_heads)
        self.out = self.indexer(self.query, self.keys, self.batch, self.weights)

    @property
    def cost(self) -> Any:
        """The operations and bytes that the step costs at least."""
        return index_cost(self.spec, self.batch)

    def call(self) -> torch.Tensor:
        """Choose."""
        self.out = self.indexer(self.query, self.keys, self.batch, self.weights)
        return self.out

    def error(self, token: int) -> float:
        """Return 0 where the token's ids are the definition's but for rounding, else infinity."""
        frame = IndexFrame(self.query, self.keys, self.weights, None, self.out)
        position = self.lengths[0][1] - self.lengths[0][0] + token
        for at, scores in enumerate(reference.scored(self.spec, self.batch, frame, token)):
            chosen = [each for each in self.out[token, at].tolist() if each >= 0]
            exact = reference.choose(self.indexer.spec, scores, position)
            if reference.ranking_problem(scores, chosen, exact) is not None:
                return math.inf
        return 0.0
