"""Runs an indexer alone, in steps over a poisoned cache of index keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.conformance.harness.base import Harness
from polyattn.families.sparse.index_workload import IndexWorkload
from polyattn.runtime.backend import IndexBackend
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import IndexerSpec

PAGES = {"narrow": 64}
"""Entries of a page that doesn't have 16: DeepGEMM's pages on Hopper."""


class IndexHarness(Harness):
    """Builds caches of index keys, and steps over them."""

    def index(self, spec: LayerSpec) -> IndexBackend:
        """Return the indexer for this layer, whether or not another backend attends at its level."""
        return self.group(spec.replace(batch_invariant=False)).backend("index", IndexBackend, spec)

    def step(self, spec: LayerSpec, name: str, **how: Any) -> IndexWorkload:  # type: ignore[override]
        """Return a layer's step of this name; `how`: further arguments of `IndexWorkload`.

        "narrow": queries are e4m3 if the backend multiplies e4m3.
        """
        assert spec.indexer is not None
        more, block = 37 * (name == "bounds"), PAGES.get(name, 16)
        work = IndexWorkload(
            spec, lengths_of(name, spec.indexer), self.dice, block=block, more=more, **how
        )
        if name == "narrow" and self.index(spec).multiplies_e4m3:
            work.frame = replace(work.frame, query=work.frame.query.to(torch.float8_e4m3fn))
        return work


def lengths_of(name: str, indexer: IndexerSpec) -> list[tuple[int, int]]:
    """Return the (query length, sequence length) of a step's sequences."""
    m, group = indexer.tokens_per_entry, indexer.tokens_per_entry * indexer.pool
    if name == "decode":
        return [(1, 97), (1, 300), (1, 16), (1, 17)]
    if name == "narrow":  # several runs of tiles, and more than are ranked at once
        return [(9, 200), (1, 70), (3, 17000), (1, 1), (0, 40), (6, 66)]
    if name == "edges":
        most = indexer.budget * group if isinstance(indexer.budget, int) else group
        ends = (1, m, group, 2 * group, most, 16, 32, 64)
        return [(1, n) for each in ends for n in (each - 1, each, each + 1) if n > 0]
    return [(1, 160), (7, 140), (1, 1), (5, 33), (1, 0), (9, 9), (1, 71)]
