"""Runs an indexer by itself: steps over a poisoned cache of index keys."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.conformance.harness.base import Harness
from polyattn.families.sparse import reference
from polyattn.families.sparse.index_cache import index_cache_form, write_index_keys
from polyattn.families.sparse.indexer import chosen_width
from polyattn.runtime.backend import IndexBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.program import IndexFrame
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec
from polyattn.workload.pages import bits

PAGES = {"narrow": 64}
"""Entries of a page where they aren't 16: of DeepGEMM's pages on Hopper."""
FAR = 10**6
"""Stands in a block table behind a length: nobody reads it."""


class IndexHarness(Harness):
    """Builds caches of index keys, and steps over them."""

    def index(self, spec: LayerSpec) -> IndexBackend:
        """Return the indexer for this layer, whether or not another backend attends at its level."""
        return self.group(spec.replace(batch_invariant=False)).backend("index", IndexBackend, spec)

    def batch(self, spec: LayerSpec, name: str) -> tuple[Batch, list[int]]:
        """Return the step of a name, and the entries that its sequences have."""
        indexer = spec.indexer
        assert indexer is not None
        m, group = indexer.tokens_per_entry, indexer.tokens_per_entry * indexer.pool
        rows = [(1, 160), (7, 140), (1, 1), (5, 33), (1, 0), (9, 9), (1, 71)]
        if name == "decode":
            rows = [(1, 97), (1, 300), (1, 16), (1, 17)]
        if name == "narrow":  # several runs of tiles, and more than are ranked at once
            rows = [(9, 200), (1, 70), (3, 17000), (1, 1), (0, 40), (6, 66)]
        if name == "edges":
            most = indexer.budget * group if isinstance(indexer.budget, int) else group
            lens = [
                n
                for each in (1, m, group, 2 * group, most, 16, 32, 64)
                for n in (each - 1, each, each + 1)
            ]
            rows = [(1, n) for n in lens if n > 0]
        queries, lens = [query for query, _ in rows], [length for _, length in rows]
        bounds = [n + 37 for n in lens] if name == "bounds" else lens
        entries, block = [n // m for n in bounds], PAGES.get(name, 16)
        table, _ = self.dice.blocks(entries, block)
        held = torch.tensor([-(-n // m // block) for n in lens], device=table.device)
        table[torch.arange(table.shape[1], device=table.device) >= held[:, None]] = FAR
        batch = Batch.from_lens(queries, bounds, device=self.torch_device)
        if name == "bounds":
            starts, ends = batch.query_start_loc, torch.tensor(lens).int().to(self.torch_device)
            batch = Batch.on_buffers(batch.starts, bounds, starts, ends, table, None)
        batch.block_table = table
        return batch, [n // m for n in lens]

    def step(  # type: ignore[override]
        self, spec: LayerSpec, name: str, whole: bool = True, near: bool = False
    ) -> tuple[Batch, IndexFrame]:
        """Return a step of a layer; `whole` numbers tie, and every sum of them is exact.

        "narrow": queries are e4m3 where the backend multiplies such.
        `near`: all keys are the same but for a few last bits, so that rounding decides.
        """
        indexer, dice = spec.indexer, self.dice
        assert indexer is not None
        batch, entries = self.batch(spec, name)
        assert batch.block_table is not None
        dtype, tokens = STORAGE_DTYPES[spec.dtype], batch.num_tokens
        keys = dice.normal(sum(entries), indexer.head_size)
        if near and len(keys):
            keys = keys[:1] * (1.0 + 2.0**-18 * keys)
        query = dice.normal(tokens, indexer.num_heads, indexer.head_size)
        weights = dice.normal(tokens, indexer.num_heads) if indexer.fold == "weighted" else None
        if whole:
            keys, query = keys.round(), query.round()
            query[::5] = 0.0  # all of a token's scores are 0
            weights = None if weights is None else weights.round()
            if indexer.cache_dtype == "fp8_scaled":
                keys.clamp_(-3.0, 3.0)
                power = 2.0 ** dice.order(len(keys)).remainder(3).to(keys.device)
                keys[:, 0] = 7.0  # of 448 a power of two: what is stored is what was drawn
                keys *= power[:, None]
        size, stored = index_cache_form(spec)
        table = batch.block_table
        count = int(table[table < FAR].max()) + 2 if (table < FAR).any() else 2
        block = PAGES.get(name, 16)
        cache = torch.zeros(count, block, size, dtype=stored, device=keys.device)
        bits(cache).fill_(-1)  # NaN, and of a key's scale too
        first = 0
        for row, own in enumerate(entries):
            at = torch.arange(own, device=keys.device)
            slots = table[row, at // block].long() * block + at % block
            write_index_keys(indexer, cache, keys[first : first + own].to(dtype), slots)
            first += own
        within = None
        if indexer.within is not None:
            within = torch.tensor([[[0, 3, 2, -1]]], device=keys.device).int().repeat(tokens, 1, 1)
            within[::2, :, 0] = 1
            if indexer.within == 1:  # a single entry counts
                within[:, :, 1:] = -1
        out = torch.full(
            (tokens, indexer.choices, chosen_width(indexer, batch)), 7, dtype=torch.int32
        ).to(keys.device)
        if name == "narrow" and self.index(spec).multiplies_e4m3:
            dtype = torch.float8_e4m3fn
        return batch, IndexFrame(query.to(dtype), cache, weights, within, out)

    def expected(self, spec: LayerSpec, batch: Batch, frame: IndexFrame) -> Tensor:
        """Return what the definition chooses, on the host."""
        return reference.indexed(spec, batch, frame)
