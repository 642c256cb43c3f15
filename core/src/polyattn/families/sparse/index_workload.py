"""One step of an indexer: queries over a paged cache of index keys, with the right choice."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from polyattn.families.sparse import reference
from polyattn.families.sparse.index_cache import write_index_keys, zeroed_index_cache
from polyattn.families.sparse.indexer import Indexer, chosen_width
from polyattn.families.sparse.roofline import index_cost
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.program import IndexFrame
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import token_places
from polyattn.runtime.step.cost import Cost
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec
from polyattn.workload.dice import Dice
from polyattn.workload.pages import bits
from polyattn.workload.steps import USUAL, Lengths, lens_of

WHOLE, NEAR = "whole", "near"
"""How a step's numbers are drawn. Whole numbers tie, and their sums are exact. Near ones: all keys
agree except in a few last bits, so that rounding decides."""
FAR = 10**6
"""Fills a block table behind a length; no kernel may read it."""
MOST_ENTRIES = 1 << 12
"""Entries that `index_problem` scores at most."""
DRAWN = 1 << 20
"""Index keys that are stored at a time where a whole cache is filled."""


class IndexWorkload:
    """One step of a layer's indexer.

    - `batch`, `lengths`: the step; `frame`: what a backend reads, and where it writes.
    """

    def __init__(
        self,
        layer: LayerSpec | Indexer,
        lengths: Lengths,
        dice: Dice,
        *,
        block: int = 16,
        numbers: str = USUAL,
        more: int = 0,
        full: bool = False,
    ):
        """Draw a step.

        - `layer`: its spec, or the indexer that `call` calls.
        - `block`: entries of a page.
        - `more`: by how much the lengths on the host are more than the device's.
        - `full`: the whole cache holds keys; else NaN lies where no sequence has any.
        """
        self.indexer = layer if isinstance(layer, Indexer) else None
        self.spec = layer.group.spec if isinstance(layer, Indexer) else layer
        self.lengths, self.dice, self.device = lengths, dice, dice.device
        form = self.spec.indexer
        assert form is not None
        self.form = form
        queries, lens = lens_of(lengths)
        entries = [n // form.tokens_per_entry for n in lens]
        table, blocks = dice.blocks([(n + more) // form.tokens_per_entry for n in lens], block)
        keys = zeroed_index_cache(self.spec, blocks, block, self.device)
        if full:
            self._fill(keys)
        else:
            held = torch.tensor(
                [-(-n // form.tokens_per_entry // block) for n in lens], device=self.device
            )
            table[torch.arange(table.shape[1], device=self.device) >= held[:, None]] = FAR
            self._store(keys, table, entries, numbers)
        self.batch = _batch(queries, lens, more, table)
        self.frame = self._frame(keys, numbers)

    def _fill(self, keys: Tensor) -> None:
        dtype = STORAGE_DTYPES[self.spec.dtype]
        for slots in torch.arange(keys.shape[0] * keys.shape[1], device=self.device).split(DRAWN):
            drawn = self.dice.normal(len(slots), self.form.head_size, dtype=dtype)
            write_index_keys(self.form, keys, drawn, slots)

    def _store(self, keys: Tensor, table: Tensor, entries: list[int], numbers: str) -> None:
        drawn = self.dice.normal(sum(entries), self.form.head_size)
        if numbers == NEAR and len(drawn):
            drawn = drawn[:1] * (1.0 + 2.0**-18 * drawn)
        if numbers == WHOLE:
            drawn = drawn.round()
            if self.form.cache_dtype == "fp8_scaled":
                power = 2.0 ** self.dice.order(len(drawn)).remainder(3).to(drawn.device)
                drawn.clamp_(-3.0, 3.0)
                drawn[:, 0] = 7.0  # of 448 a power of two: what is stored is what was drawn
                drawn *= power[:, None]
        bits(keys).fill_(-1)  # NaN, and of a key's scale too
        block, dtype = keys.shape[1], STORAGE_DTYPES[self.spec.dtype]
        for row, own in zip(table, drawn.split(entries), strict=True):
            at = torch.arange(len(own), device=self.device)
            slots = row[at // block].long() * block + at % block
            write_index_keys(self.form, keys, own.to(dtype), slots)

    def _frame(self, keys: Tensor, numbers: str) -> IndexFrame:
        form, tokens = self.form, self.batch.num_tokens
        query = self.dice.normal(tokens, form.num_heads, form.head_size)
        weights = self.dice.normal(tokens, form.num_heads) if form.fold == "weighted" else None
        if numbers == WHOLE:
            query = query.round()
            query[::5] = 0.0  # all of a token's scores are 0
            weights = None if weights is None else weights.round()
        within = None
        if form.within is not None:
            within = torch.tensor([[[0, 3, 2, -1]]], device=self.device).int().repeat(tokens, 1, 1)
            within[::2, :, 0] = 1
            if form.within == 1:  # a single entry counts
                within[:, :, 1:] = -1
        shape = tokens, form.choices, chosen_width(form, self.batch)
        out = torch.full(shape, 7, dtype=torch.int32, device=self.device)
        return IndexFrame(query.to(STORAGE_DTYPES[self.spec.dtype]), keys, weights, within, out)

    @cached_property
    def expected(self) -> Tensor:
        """What the definition chooses, on the host."""
        return reference.indexed(self.spec, self.batch, self.frame)

    @property
    def cost(self) -> Cost:
        """The operations and bytes that the step costs at least."""
        return index_cost(self.spec, self.batch)

    def call(self) -> Tensor:
        """Choose as a model does; the ids are the frame's, too. What benchmarks time."""
        assert self.indexer is not None
        frame = self.frame
        frame.out = self.indexer(
            frame.query, frame.keys, self.batch, frame.weights, within=frame.within
        )
        return frame.out

    def problem(self, token: int) -> str | None:
        """Return how a token's ids differ from the definition's, other than by rounding, or None."""
        position = int(token_places(self.batch)[1][token])
        for at, scores in enumerate(reference.scored(self.spec, self.batch, self.frame, token)):
            chosen = [each for each in self.frame.out[token, at].tolist() if each >= 0]
            exact = reference.choose(self.form, scores, position)
            problem = reference.ranking_problem(scores, chosen, exact)
            if problem is None and chosen != sorted(chosen):
                problem = f"has ids that don't ascend: {chosen[:9]}"
            if problem is not None:
                return f"at {position} {problem}"
        return None

    def error(self, token: int) -> float:
        """Return 0 if the token's ids are the definition's, up to rounding, else infinity."""
        return 0.0 if self.problem(token) is None else math.inf


def _batch(queries: list[int], lens: list[int], more: int, table: Tensor) -> Batch:
    bounds = [n + more for n in lens]
    batch = Batch.from_lens(queries, bounds, device=table.device)
    if more:
        starts, ends = batch.query_start_loc, torch.tensor(lens, device=table.device).int()
        batch = Batch.on_buffers(batch.starts, bounds, starts, ends, table, None)
    batch.block_table = table
    return batch


def index_problem(selection: Selection, seed: int) -> str | None:
    """Return how an indexer's choices differ from their definition's, or None.

    Scores are summed in float32: so choices may differ between scores that only rounding tells apart.
    """
    indexer = Indexer(selection)
    spec = indexer.spec
    group = spec.tokens_per_entry * spec.pool
    budget = spec.budget if isinstance(spec.budget, int) else 8
    longest = min((budget + 5) * group + 1, MOST_ENTRIES * spec.tokens_per_entry)
    rows = [(1, longest), (3, 2 * group + 1), (1, 1)]
    work = IndexWorkload(indexer, rows, Dice(seed, indexer.group.torch_device), full=True)
    work.call()
    problems = map(work.problem, range(work.batch.num_tokens))
    wrong = next(filter(None, problems), None)
    return None if wrong is None else f"the indexer's choice is wrong: a token {wrong}"
