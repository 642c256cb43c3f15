"""TORCH_INDEX: keys are scored and chosen by torch's operators, on any device; and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from polyattn.families.sparse import reference
from polyattn.families.sparse.index_cache import read_index_keys
from polyattn.runtime.backend import IndexBackend
from polyattn.runtime.program import IndexFrame, Plan
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import NONE, token_places, visible_entries
from polyattn.spec.sparse import IndexerSpec

SCORES = 1 << 24
"""Products that are held at a time."""


class TorchIndex(IndexBackend):
    """A stable sort of each token's scores."""

    name: ClassVar[str] = "TORCH_INDEX"

    @property
    def indexer(self) -> IndexerSpec:
        """The indexer's spec."""
        assert self.spec.indexer is not None
        return self.spec.indexer

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        spec, batch, out = self.indexer, plan.batch, frame.out
        _seqs, positions, lens = token_places(batch)
        visible = visible_entries(spec.tokens_per_entry, positions, lens)
        count = out.shape[2] - spec.tail
        out.fill_(NONE)
        for rows, table, entries in self._parts(batch, frame.keys.shape[1]):
            if not entries:
                continue
            query, weights = frame.query[rows], _part(frame.weights, rows)
            scores = self._scores(query, frame.keys, table, entries, weights)
            chosen = self._best(scores, visible[rows], _part(frame.within, rows), count)
            out[rows, :, : chosen.shape[2]] = chosen
        if spec.tail:
            m, seen = spec.tokens_per_entry, torch.minimum(positions + 1, lens).clamp(min=0)
            out[:, :, -1] = torch.where(seen % m > 0, seen // m, NONE)[:, None]
        ids = out.sort(2).values
        out.copy_(ids.masked_fill(ids == NONE, -1))

    def _parts(self, batch: Batch, block_size: int) -> Iterator[tuple[slice, Tensor, int]]:
        """Yield tokens whose keys are read together, their rows of the table, and how many entries.

        Runs of one-token sequences, and pieces of longer ones. At a level each sequence is apart: a
        product's sums follow from how many rows it has.
        """
        spec, table = self.indexer, batch.block_table
        assert table is not None
        first = 0
        while first < batch.num_seqs:
            last, queries = first + 1, batch.query_lens
            if queries[first] == 1 and not self.spec.batch_invariant:
                while last < batch.num_seqs and queries[last] == 1:
                    last += 1
            longest = max(batch.lens[first:last]) // spec.tokens_per_entry
            step = max(1, SCORES // max(longest * spec.num_heads, 1))
            start, stop = batch.starts[first], batch.starts[last]
            for at in range(start, stop, step):
                rows = slice(at, min(at + step, stop))
                mine = slice(first, last)
                if last - first > 1:
                    mine = slice(first + at - start, first + rows.stop - start)
                yield rows, table[mine, : -(-longest // block_size)], longest
            first = last

    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Tensor | None
    ) -> Tensor:
        """Return scores (tokens, choices, entries); `table` has a row for each token, or one for all."""
        spec = self.indexer
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        # Behind a sequence's length a table may hold anything; what lies there isn't seen.
        blocks = table.long().clamp(0, len(keys) - 1)
        pages = read_index_keys(spec, keys, blocks.flatten(), dtype)
        rows = pages.unflatten(0, blocks.shape).flatten(1, 2)[:, :entries]
        if len(table) == 1:
            products = torch.einsum("thd,ed->the", query.to(dtype), rows[0])
        else:
            products = torch.bmm(query.to(dtype), rows.transpose(1, 2))
        products *= spec.scale
        if spec.activation == "relu":
            products.relu_()
        if spec.fold == "none":
            return products
        if weights is not None:
            products *= weights.to(dtype)[:, :, None]
        return products.sum(1, keepdim=True)

    def _best(self, scores: Tensor, visible: Tensor, within: Tensor | None, count: int) -> Tensor:
        """Return the best candidates' ids, int32 (tokens, choices, count), NONE for none."""
        spec, entries = self.indexer, scores.shape[2]
        place = torch.arange(entries, device=scores.device)
        seen = (place < visible[:, None])[:, None]
        if within is not None:
            assert spec.within is not None
            blocks = -(-entries // spec.within)
            named = within.long().clamp(min=-1, max=blocks)
            held = seen.new_zeros(*named.shape[:2], blocks + 2)
            held.scatter_(2, named + 1, True)
            seen = seen & held[..., 1:-1].repeat_interleave(spec.within, 2)[..., :entries]
        scores = scores.nan_to_num(nan=-torch.inf).masked_fill(~seen, -torch.inf)
        if spec.pool > 1:
            short = -entries % spec.pool
            scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
            scores = scores.unflatten(2, (-1, spec.pool)).amax(3)
            seen = torch.nn.functional.pad(seen, (0, short)).unflatten(2, (-1, spec.pool)).any(3)
        candidate = torch.arange(scores.shape[2], device=scores.device)
        there = -(-visible // spec.pool)
        if spec.forced_first or spec.forced_last:
            forced = (candidate < spec.forced_first) | (
                candidate >= (there - spec.forced_last)[:, None]
            )
            scores = scores.masked_fill(forced[:, None] & seen, torch.inf)
        # A stable sort: equal scores keep the order of their ids, and unseen entries come last.
        order = scores.sort(stable=True, dim=2, descending=True).indices
        real = seen.expand_as(scores).gather(2, order)
        if within is not None:  # of scores of -inf, too: what isn't seen may have smaller ids
            real, places = real.sort(stable=True, dim=2, descending=True)
            order = order.gather(2, places)
        order = order[..., :count].int().masked_fill(~real[..., :count], NONE)
        if isinstance(spec.budget, float):
            allowed = torch.ceil(there.double() * spec.budget - 1e-9)
            behind = torch.arange(order.shape[2], device=order.device) >= allowed[:, None]
            order = order.masked_fill(behind[:, None], NONE)
        return order


class VanillaIndex(IndexBackend):
    """`reference.choose`, a token at a time, in float64 on the host."""

    name: ClassVar[str] = "VANILLA_INDEX"

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        frame.out.copy_(reference.indexed(self.spec, plan.batch, frame))


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]
