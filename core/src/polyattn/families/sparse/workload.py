"""One step of a sparse layer: a poisoned cache, a choice, and the reference a token at a time."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyattn.families.sparse import reference
from polyattn.families.sparse.layer import SparseAttention
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import choice_of, token_places, visible_entries
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import SparseSpec
from polyattn.workload.attending import ChoosingWorkload
from polyattn.workload.compare import output_error
from polyattn.workload.dice import Dice
from polyattn.workload.pages import copied, put
from polyattn.workload.steps import Lengths, held_before, lens_of, paged


class SparseWorkload(ChoosingWorkload):
    """One step of a sparse layer.

    - `query`; `key`, `value`: the new tokens', None where the cache holds entries of several tokens.
    - `keys`, `values`: every sequence's entries, one sequence after another.
    - `choice` int32 (tokens, scope, budget): ids that the token sees, a few that it doesn't, and -1.
    """

    names = ("query", "key", "value", "choice")
    by_token = ("query", "ids")
    choice: Tensor
    key: Tensor | None
    value: Tensor | None

    def __init__(
        self,
        layer: SparseAttention,
        lengths: Lengths,
        dice: Dice,
        *,
        like: SparseWorkload | None = None,
        full: KVCache | None = None,
    ):
        """Draw a step. `like`: another layer's step, whose batch this one has too.

        `full`: a cache of random numbers, anywhere in which the step lies; `keys` are the new tokens'.
        """
        self.layer, self.lengths, self.dice = layer, lengths, dice
        spec = self.spec
        queries, lens = lens_of(lengths)
        dtype = STORAGE_DTYPES[spec.dtype]
        m = self.part.tokens_per_entry
        entries = sum(queries) if full is not None else sum(n // m for n in lens)
        self.query = dice.normal(sum(queries), spec.num_heads, spec.head_size, dtype=dtype)
        self.keys = dice.normal(entries, spec.num_kv_heads, spec.head_size, dtype=dtype)
        self.values = dice.normal(entries, spec.num_kv_heads, spec.v_head_size, dtype=dtype)
        if self.part.value_in_key:
            self.values = self.keys[..., : spec.v_head_size]
        if full is None:
            self.ids = drawn_choice(spec, lengths, dice)
            self.lay(like)
            return
        self.cache, self.key, self.value = full, self.keys, self.values
        table, _ = dice.blocks([n // m for n in lens], full.block_size, within=full.num_blocks)
        if m > 1:
            self.key = self.value = None
            self.batch = Batch.from_lens(queries, lens, device=self.device).with_block_table(table)
        else:
            self.batch = paged(lengths, table, full.block_size)
        self.ids = self.choice = whole_choice(
            self.part, self.part.choices(spec.num_heads, spec.num_kv_heads), self.batch
        )

    @classmethod
    def layer_of(cls, group: LayerGroup, dice: Dice, *, checks: bool = True) -> SparseAttention:
        """Return a layer with random sinks and scales where the spec has them."""
        spec = group.spec
        factor = {"auto": 1.0, "int8": 0.08}.get(spec.kv_cache_dtype, 0.7)
        sinks = dice.normal(spec.num_heads).float() if spec.learned_sinks else None
        return SparseAttention(
            group,
            sinks=sinks,
            k_scale=factor,
            v_scale=factor,
            checks=checks,
            rotate=False if spec.rope is not None else None,
        )

    @property
    def part(self) -> SparseSpec:
        """The spec's own part."""
        assert self.spec.sparse is not None
        return self.spec.sparse

    @property
    def by_key(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("keys",) if self.part.value_in_key else ("keys", "values")

    def entries(self, lengths: Lengths) -> list[int]:
        return [length // self.part.tokens_per_entry for _, length in lengths]

    def lay(self, like: SparseWorkload | None = None) -> None:
        form = self.group.cache_format
        assert form is not None
        if self.part.value_in_key:
            self.values = self.keys[..., : self.spec.v_head_size]
        table, num_blocks = self.table(form, like)
        self.cache, slots = self.fresh(form, table, num_blocks)
        self.choice = self.ids
        if self.part.physical:
            self.choice = as_places(self.spec, self.ids, self.lengths, table, form.block_size)
        if self.part.tokens_per_entry > 1:
            put(self.cache, self.keys, self.values, slots, self.scales)
            self.key = self.value = None
            queries, lens = lens_of(self.lengths)
            self.batch = Batch.from_lens(queries, lens, device=self.device).with_block_table(table)
            return
        there = held_before(self.lengths).to(self.device)
        put(self.cache, self.keys, self.values, slots.masked_fill(~there, -1), self.scales)
        self.batch = paged(self.lengths, table, form.block_size)
        self.key = self.new(self.keys)
        in_key = self.part.value_in_key
        self.value = self.key[..., : self.spec.v_head_size] if in_key else self.new(self.values)

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.cache

    @cached_property
    def held(self) -> KVCache:
        """The expected cache after the step."""
        held, slots = copied(self.cache), self.batch.slot_mapping
        if slots is not None and self.key is not None and self.value is not None:
            put(held, self.key, self.value, slots, self.scales)
        return held

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        return reference.forward(
            self.spec, self.query, self.held, self.batch, self.choice, self.layer.params
        )

    def token_error(self, index: int) -> float:
        """Return the error of the last run's last token of a sequence, by what the cache holds now."""
        at = self.batch.query_lens[index] - 1
        return token_error(
            self.layer, self.query, self.cache, self.batch, self.choice, self.out, index, at
        )


WORKLOAD = SparseWorkload


def token_error(
    layer: SparseAttention,
    query: Tensor,
    cache: KVCache,
    batch: Batch,
    choice: Tensor | None,
    out: Tensor,
    index: int,
    at: int,
) -> float:
    """Return the error of token `at` of a sequence's query; without a choice it sees the newest."""
    assert batch.block_table is not None
    length = batch.lens[index] - batch.query_lens[index] + at + 1
    table = batch.block_table[index : index + 1]
    alone = Batch.from_lens([1], [length], device=batch.device).with_block_table(table)
    token = slice(batch.starts[index] + at, batch.starts[index] + at + 1)
    ids = choice_of(layer.spec, None if choice is None else choice[token], alone)
    expected, _ = reference.forward(layer.spec, query[token], cache, alone, ids, layer.params)
    return output_error(out[token], expected)


def drawn_choice(spec: LayerSpec, lengths: Lengths, dice: Dice, least: int = 0) -> Tensor:
    """Return int32 (tokens, scope, budget): distinct ids in any order, -1 behind them.

    Some are of groups that end behind the token, or lie behind it altogether; the newest group is often
    among them. Some tokens have no id, some `least`, some all that there are.
    """
    sparse = spec.sparse
    assert sparse is not None
    group = sparse.granularity * sparse.tokens_per_entry
    rows = []
    for query, length in lengths:
        for position in range(length - query, length):
            for _ in range(sparse.choices(spec.num_heads, spec.num_kv_heads)):
                seen = max(position, 0) // group + 1
                count = dice.integer(least, sparse.budget + 1) if dice.integer(0, 8) else 0
                ids = dice.order(seen + dice.integer(0, 3))[:count]
                if dice.integer(0, 2) and not bool((ids == seen - 1).any()) and len(ids):
                    ids[dice.integer(0, len(ids))] = seen - 1
                row = torch.full((sparse.budget,), -1, dtype=torch.int32, device="cpu")
                row[: len(ids)] = ids.int()
                rows.append(row)
    shape = (-1, sparse.choices(spec.num_heads, spec.num_kv_heads), sparse.budget)
    if not rows:
        return torch.empty(0, *shape[1:], dtype=torch.int32, device=dice.device)
    return torch.stack(rows).view(shape).to(dice.device)


def as_places(
    spec: LayerSpec, ids: Tensor, lengths: Lengths, table: Tensor, block_size: int
) -> Tensor:
    """Return a choice as places in the cache, of ids that the token sees."""
    assert spec.sparse is not None
    sparse = SparseSpec(budget=spec.sparse.budget, tokens_per_entry=spec.sparse.tokens_per_entry)
    named, rows, at, blocks = spec.replace(sparse=sparse), ids.tolist(), 0, table.tolist()
    for index, (query, length) in enumerate(lengths):
        for token in range(at, at + query):
            position = length - at - query + token
            for each in rows[token]:
                slots = reference.chosen_slots(
                    named, each, position, length, blocks[index], block_size
                )
                each[:] = slots + [-1] * (len(each) - len(slots))
        at += query
    return torch.tensor(rows, dtype=torch.int32, device=ids.device).view(ids.shape)


def whole_choice(sparse: SparseSpec, choices: int, batch: Batch) -> Tensor:
    """Return int32 (tokens, choices, budget): ids at random, as many as there are."""
    _, positions, lens = token_places(batch)
    seen = visible_entries(sparse.tokens_per_entry, positions, lens)
    groups = -(-(batch.max_seq_len // sparse.tokens_per_entry) // sparse.granularity)
    drawn = torch.rand(
        len(seen), choices, max(groups, sparse.budget), dtype=torch.float32, device=batch.device
    )
    hidden = torch.arange(drawn.shape[2], device=batch.device) * sparse.granularity
    drawn.masked_fill_(hidden >= seen[:, None, None], -1.0)
    best, ids = drawn.topk(sparse.budget)
    return ids.int().masked_fill(best < 0, -1)
