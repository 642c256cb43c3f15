"""One step of MLA: a poisoned latent cache, and the reference that absorbs nothing."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyattn.families.attention import reference as attention_reference
from polyattn.families.mla import reference
from polyattn.families.mla.layer import LatentAttention
from polyattn.families.sparse.workload import as_places, drawn_choice, whole_choice
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.spec.decompose import absorbed
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.workload.attending import ChoosingWorkload
from polyattn.workload.compare import output_error
from polyattn.workload.dice import Dice
from polyattn.workload.pages import copied, put
from polyattn.workload.steps import Lengths, held_before, lens_of, paged


class LatentWorkload(ChoosingWorkload):
    """One step of an MLA layer.

    - `query` (tokens, num_heads, size), `latent` (tokens, rank), `rope` (tokens, rope_head_size): what
      the layer takes, and `choice` of a sparse one.
    - `rows` (all tokens, rank + rope_head_size): every sequence's.
    """

    names = ("query", "latent", "rope", "choice")
    by_token = ("query", "ids")
    by_key = ("rows",)

    def __init__(
        self, layer: LatentAttention, lengths: Lengths, dice: Dice, *, shared: int = 0,
        like: LatentWorkload | None = None, full: KVCache | None = None,
    ):  # fmt: skip
        """Draw a step. `shared`: blocks that all sequences begin with; `like`, `full`: as attention's."""
        self.layer, self.lengths, self.dice = layer, lengths, dice
        spec, form = self.spec, self.group.cache_format
        assert form is not None
        queries, lens = lens_of(lengths)
        dtype = STORAGE_DTYPES[spec.dtype]
        rows = sum(lens) if full is None else sum(queries)
        self.rows = dice.normal(rows, self.part.size, dtype=dtype)
        for seq in self.rows.split(lens) if shared else ():
            seq[: shared * form.block_size] = self.rows[: shared * form.block_size]
        width = spec.head_size if layer.weights is not None else self.part.size
        self.query = dice.normal(sum(queries), spec.num_heads, width, dtype=dtype)
        self.choice = self.ids = None
        if full is not None:
            self._lay_in(full)
            return
        if spec.sparse is not None:
            self.ids = drawn_choice(spec, lengths, dice, least=spec.sparse.budget - 1)
        self.lay(shared, like)

    @classmethod
    def layer_of(
        cls, group: LayerGroup, dice: Dice, *, checks: bool = True, weights: bool = True
    ) -> LatentAttention:
        """Return an MLA layer with random weights, or one whose caller absorbs."""
        latent = latent_weights(group.spec, dice.generator) if weights else (None, None)
        factor = 0.5 + 0.05 * dice.integer(0, 10)
        scale = {"auto": 1.0, "int8": 0.08 * factor}.get(group.spec.kv_cache_dtype, factor)
        return LatentAttention(group, *latent, k_scale=scale, checks=checks)

    @property
    def part(self) -> LatentSpec:
        """The spec's own part."""
        assert self.spec.latent is not None
        return self.spec.latent

    def lay(self, shared: int = 0, like: LatentWorkload | None = None) -> None:
        form = self.group.cache_format
        assert form is not None
        table, num_blocks = self.table(form, like)
        if shared:
            table[1:, :shared] = table[0, :shared]
        self.cache, slots = self.fresh(form, table, num_blocks)
        there = held_before(self.lengths).to(self.device)
        self._put(self.cache, self.rows, slots.masked_fill(~there, -1))
        own = self.new(self.rows)
        self.latent = own[:, : self.part.rank].contiguous()
        self.rope = own[:, self.part.rank :].contiguous()
        self.batch = paged(self.lengths, table, form.block_size)
        self.choice = self.ids
        if self.ids is not None and self.spec.sparse is not None and self.spec.sparse.physical:
            self.choice = as_places(self.spec, self.ids, self.lengths, table, form.block_size)

    def _lay_in(self, full: KVCache) -> None:
        self.cache, (_, lens) = full, lens_of(self.lengths)
        table, _ = self.dice.blocks(lens, full.block_size, within=full.num_blocks)
        self.batch = paged(self.lengths, table, full.block_size)
        self.latent, self.rope = (
            part.contiguous() for part in self.rows.tensor_split([self.part.rank], dim=1)
        )
        if self.spec.sparse is not None:
            self.choice = whole_choice(self.spec.sparse, 1, self.batch)

    def _put(self, cache: KVCache, entries: Tensor, slots: Tensor) -> None:
        put(cache, entries[:, None], entries[:, None, : self.part.rank], slots, self.scales)

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.query, self.latent, self.rope, self.cache

    @cached_property
    def held(self) -> KVCache:
        """The expected cache after the step."""
        held, slots = copied(self.cache), self.batch.slot_mapping
        assert slots is not None
        self._put(held, torch.cat([self.latent, self.rope], dim=1), slots)
        return held

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        layer = self.layer
        if layer.weights is None:
            return attention_reference.forward(
                absorbed(self.spec), self.query, None, None, self.held, self.batch, layer.params
            )
        return reference.forward(
            self.spec, self.query, self.held, self.batch, layer.weights, layer.params, self.choice
        )

    def token_error(self, index: int) -> float:
        """Return the error of the last run's last token of a sequence, by what the cache holds now."""
        form, table = self.group.cache_format, self.batch.block_table
        assert form is not None and table is not None
        rows = slice(self.batch.starts[index + 1] - 1, self.batch.starts[index + 1])
        alone = Batch.from_lens(
            [1], [self.batch.lens[index]], table[index : index + 1], form.block_size
        )
        choice = None if self.choice is None else self.choice[rows]
        if self.layer.weights is None:
            spec, params, query = absorbed(self.spec), self.layer.params, self.query[rows]
            key, value = attention_reference.read_cache(self.cache, alone, 0, params)
            if choice is not None:
                chosen = choice[choice >= 0].cpu()
                key, value = key[chosen], value[chosen]
            expected, _ = attention_reference.attend(spec, query.cpu().double(), key, value, params)
        else:
            expected, _ = reference.forward(
                self.spec,
                self.query[rows],
                self.cache,
                alone,
                self.layer.weights,
                self.layer.params,
                choice,
            )
        return output_error(self.out[rows], expected)


WORKLOAD = LatentWorkload


def latent_weights(spec: LayerSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return W_UK and W_UV of an MLA layer, scaled so that keys and values have unit size."""
    assert spec.latent is not None
    dtype, rank = STORAGE_DTYPES[spec.dtype], spec.latent.rank
    nope = spec.head_size - spec.latent.rope_head_size
    w_uk = torch.randn(
        spec.num_heads, nope, rank, generator=generator, dtype=torch.float32, device="cpu"
    ) / math.sqrt(rank)
    w_uv = torch.randn(
        spec.num_heads,
        rank,
        spec.v_head_size,
        generator=generator,
        dtype=torch.float32,
        device="cpu",
    )
    return w_uk.to(dtype), (w_uv / math.sqrt(rank)).to(dtype)
