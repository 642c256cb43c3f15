"""One step of attention, paged or over whole keys, and its right result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyattn.families.attention import reference
from polyattn.families.attention.brought import Brought
from polyattn.families.attention.layer import Attention
from polyattn.families.attention.mistakes import mistake_of
from polyattn.families.attention.transforms import Places, Transforms
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache, quantize
from polyattn.runtime.cache.scales import Scale, input_dtype, output_dtype, used_scales
from polyattn.runtime.functions.pointwise import Pointwise, example_inputs
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.shared_prefix import Levels, SharedRun
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.workload.attending import AttendingWorkload
from polyattn.workload.compare import output_error
from polyattn.workload.dice import Dice
from polyattn.workload.pages import copied, put
from polyattn.workload.steps import (
    AT_CAP,
    EDGES,
    LATER,
    PAGES,
    USUAL,
    Lengths,
    held_before,
    lens_of,
    paged,
    share_blocks,
)
from polyattn.workload.tolerance import tolerance_of

OFFSETS = {"+100": 100.0, "-100": -100.0}
"""What unusual logits are raised or lowered by: more than float32's exponential takes."""
LARGE, LONGER = 4096.0, 8.0
"""Values so many times as large saturate in formats whose scales end early: e4m3, int8 and nvfp4."""


class AttentionWorkload(AttendingWorkload):
    """One step of an attention layer.

    - `query` (tokens, num_heads, head_size); `key`, `value`: the new tokens', or, without a cache,
      all. None where nothing new is stored.
    - `keys`, `values`: every sequence's tokens, one sequence after another.
    """

    names = ("query", "key", "value")
    by_key = ("keys", "values")
    key: Tensor | None
    value: Tensor | None

    def __init__(
        self,
        layer: Attention,
        lengths: Lengths,
        dice: Dice,
        *,
        numbers: str = USUAL,
        packed: bool = False,
        shared: Levels = (),
        skipped: bool = False,
        like: AttentionWorkload | None = None,
        full: KVCache | None = None,
        spare: int = 1,
        first_block: int = 1,
    ):
        """Draw a step.

        - `numbers`: unusual ones, by name.
        - `packed`: K and V are views into one storage.
        - `shared`: runs of blocks that sequences have in common.
        - `skipped`: of every other new token the cache has the key already; it isn't stored again.
        - `like`: another layer's step, whose batch this one has too.
        - `full`: a cache of random numbers, anywhere in which the step lies; there is no `keys`.
        - `spare`: columns of the block table beyond the longest sequence's; 0: nor are there gaps between
          keys that are given whole.
        - `first_block`: the first of a cache's blocks that a sequence may have.
        """
        self.layer, self.lengths, self.dice, self.packed = layer, lengths, dice, packed
        self.numbers, self.skipped, self.spare = numbers, skipped, spare
        self.first_block = first_block
        at_cap = self.spec.logit_soft_cap or 0.0
        self.offset = at_cap if numbers == AT_CAP else OFFSETS.get(numbers, 0.0)
        queries, lens = lens_of(lengths)
        self.query = self._drawn("query", sum(queries))
        form = self.group.cache_format
        page = form.block_size if form and numbers == PAGES else None
        self.brought = Brought.of(self.spec, lengths, dice, page)
        tokens = sum(queries) if full is not None else sum(lens)
        self.keys, self.values = self._drawn("key", tokens), self._drawn("value", tokens)
        if full is None:
            self.lay(shared, like)
            return
        self.cache, self.key, self.value = full, self.keys, self.values
        table, _ = dice.blocks(lens, full.block_size, spare, full.num_blocks)
        share_blocks(table, shared)
        host = table.cpu().numpy()
        self.batch = paged(lengths, table, full.block_size, host_block_table=host)

    @classmethod
    def layer_of(cls, group: LayerGroup, dice: Dice, *, checks: bool = True) -> Attention:
        """Return a layer with random sinks, slopes and scales where the spec has them."""
        spec = group.spec
        # An output this small leaves room in e4m3 for values near 1.
        stored = 0.08 if spec.kv_cache_dtype == "int8" else 1.0
        sizes = {"q_scale": 1.0, "k_scale": stored, "v_scale": stored, "out_scale": 0.04}
        scales: dict[str, Any] = {
            name: _scale(spec, name, sizes[name], dice) for name in sorted(used_scales(spec))
        }
        pointwise, read = Pointwise.of(spec), None
        if pointwise is not None:
            read = example_inputs(pointwise, spec, dice.generator, num_seqs=0)
            read = {n: t for n, t in read.items() if "num_seqs" not in pointwise.inputs[n].dims}
        return Attention(
            group,
            sinks=_sinks(spec, dice) if spec.learned_sinks else None,
            alibi_slopes=_slopes(spec, dice) if spec.alibi else None,
            **scales,
            rotate=spec.rope is not None,
            **_norm_weights(spec, dice),
            inputs=read,
            checks=checks,
        )

    def _drawn(self, what: str, tokens: int) -> Tensor:
        """Return random queries, keys or values in the form of the layer's arguments."""
        shape = widths(self.spec)[("query", "key", "value").index(what)]
        numbers = self.dice.normal(tokens, *shape, dtype=STORAGE_DTYPES[self.spec.dtype])
        if self.offset and what != "value":
            each = (abs(self.offset) / self.spec.scale) ** 0.5
            numbers[..., 0] = math.copysign(each, self.offset) if what == "key" else each
            # Above, queries are longer than any in use; below, keys are.
            numbers[..., 0] *= LONGER if (what == "query") is (self.offset > 0) else 1 / LONGER
        if self.numbers == EDGES and what != "query":
            numbers[::5] = 0.0
            numbers[1::5] = torch.finfo(numbers.dtype).smallest_normal / 4
            if what == "value":
                numbers[2::5] *= LARGE
        dtype = input_dtype(self.spec)
        if dtype == numbers.dtype:
            return numbers
        factor = getattr(self.layer.params, f"{what[0]}_scale")
        if isinstance(factor, Tensor):
            factor = factor.repeat_interleave(numbers.shape[1] // len(factor))
        return quantize(numbers, dtype, factor)

    def lay(self, shared: Levels = (), like: AttentionWorkload | None = None) -> None:
        spec, form = self.spec, self.group.cache_format
        queries, lens = lens_of(self.lengths)
        if form is None:
            self._lay_given(like)
            return
        table, num_blocks = self.table(form, like, self.spare, self.first_block)
        share_blocks(table, shared)
        for run in (run for level in shared for run in level):
            _share(run, (self.keys, self.values), lens, form.block_size)
        own = replace(form, apart=(1 + self.packed) * form.block_size)
        cache, slots = self.fresh(own, table, num_blocks)
        self.cache = cache
        if spec.role is Role.CROSS:
            put(cache, self.keys, self.values, slots, self.scales)
            self.batch = Batch([0, *accumulate(queries)], lens, table)
            self.key = self.value = None
            return
        there = held_before(self.lengths, self.skipped).to(self.device)
        put(cache, self.keys, self.values, slots.masked_fill(~there, -1), self.scales)
        self.batch = paged(self.lengths, table, form.block_size, self.brought.mask())
        self.batch.inputs |= self.brought.tensors(self.device)
        if self.skipped:
            assert self.batch.slot_mapping is not None
            self.batch.slot_mapping.masked_fill_(self.new(there), -1)
        self.key, self.value = self.new(self.keys), self.new(self.values)

    def _lay_given(self, like: AttentionWorkload | None) -> None:
        queries, lens = lens_of(self.lengths)
        starts, total = [], 0
        gaps = self.dice.integers(0, 4 if self.spare else 1, len(lens))
        for gap, length in zip(gaps, lens, strict=True):
            starts.append(total + gap)
            total += gap + length
        if like is not None:
            starts = like.batch.key_starts
        total = max(map(sum, zip(starts, lens, strict=True)), default=0) + 2
        self.key, self.value = (
            t.new_zeros(total, *t.shape[1:]).fill_(torch.nan) for t in (self.keys, self.values)
        )
        for whole, tokens in ((self.key, self.keys), (self.value, self.values)):
            for start, own in zip(starts, tokens.split(lens), strict=True):
                whole[start : start + len(own)] = own
        firsts = self.dice.integers(0, 60, len(lens)) if self.numbers == LATER else None
        self.cache = None
        self.batch = Batch.from_lens(
            queries, lens, key_starts=starts, first_positions=firsts, mask=self.brought.mask(),
            device=self.device,
        )  # fmt: skip
        self.batch.inputs |= self.brought.tensors(self.device)

    def others(self, requests: Sequence[int]) -> dict[str, Any]:
        return {"brought": self.brought.picked(requests)}

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.cache

    @cached_property
    def held(self) -> KVCache | None:
        """The expected cache after the step."""
        if self.cache is None:
            return None
        held, slots = copied(self.cache), self.batch.slot_mapping
        if slots is not None and self.key is not None and self.value is not None:
            key, value, transforms = self.key, self.value, Transforms.of(self.spec)
            if transforms is not None:
                places = Places.of_queries(self.batch)
                read = {**self.batch.inputs, **self.layer.params.inputs}
                key = transforms.changed("key", key, places, read)
                value = transforms.changed("value", value, places, read)
            put(held, key, value, slots, self.scales)
        return held

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        out, lse = reference.forward(
            self.spec, self.query, self.key, self.value, self.held, self.batch, self.layer.params
        )
        if self.spec.out_dtype == "auto":
            return out, lse
        # Weights that don't sum to 1 can leave its range, where an output saturates.
        stored = output_dtype(self.spec)
        limit = self.exact(
            torch.full((1, out.shape[1], 1), torch.finfo(stored).max, dtype=stored, device="cpu")
        )
        return out.clamp(-limit, limit), lse

    def exact(self, out: Tensor) -> Tensor:
        """Return the numbers that an output encodes, in float64."""
        return reference.exact(out, self.layer.params.out_scale, torch.float64)

    def mistake(self, out: Tensor) -> str:
        return mistake_of(self, out, tolerance_of(self.spec, self.offset).output)

    def token_error(self, index: int) -> float:
        """Return the error of the last run's last token of a sequence, by what the cache holds now.

        For caches too large for a copy, and outputs too large for the reference.
        """
        row, own = self.batch.starts[index + 1] - 1, (None, None)
        if self.cache is None:
            own = tuple(each.split(self.batch.lens)[index] for each in (self.keys, self.values))
        return token_error(
            self.layer, self.query[row], own, self.cache, self.batch, index, self.out[row]
        )


WORKLOAD = AttentionWorkload


def token_error(
    layer: Attention, query: Tensor, own_pair: tuple[Tensor | None, Tensor | None],
    cache: KVCache | None, batch: Batch, index: int, out: Tensor, before_last: int = 0,
) -> float:  # fmt: skip
    """Return the error of one token's output, `out` (num_heads, v_head_size).

    `own_pair`: the sequence's own keys and values, without a cache. `before_last`: how many of the
    sequence's tokens come after it, of a causal layer.
    """
    spec, params = layer.spec, layer.params
    if cache is None:
        keys, values = own_pair
        assert keys is not None and values is not None
    else:
        keys, values = reference.read_cache(cache, batch, index, params)
    seen = batch.lens[index] - before_last
    asked = reference.exact(query[None], params.q_scale, torch.float64)
    expected, _ = reference.attend(spec, asked, keys[:seen], values[:seen], params)
    return output_error(reference.exact(out[None], params.out_scale, torch.float64), expected)


def widths(spec: LayerSpec) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return heads and their size, of queries, keys and values."""
    return (
        (spec.num_heads, spec.head_size),
        (spec.num_kv_heads, spec.head_size),
        (spec.num_kv_heads, spec.v_head_size),
    )


def _norm_weights(spec: LayerSpec, dice: Dice) -> dict[str, Any]:
    """Return random weights of the spec's norm, in the layer's dtype."""
    if (norm := spec.qk_norm) is None:
        return {}
    dtype = STORAGE_DTYPES[spec.dtype]
    heads = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
    counts = {name: count if norm.over == "token" else 1 for name, count in heads.items()}
    return {n: dice.normal(count * spec.head_size, dtype=dtype) for n, count in counts.items()}


def _sinks(spec: LayerSpec, dice: Dice) -> Tensor:
    """Return random sinks, of several heads' the last -inf, which is none.

    They are numbers of the layer's dtype, as a checkpoint's are: FlashAttention-3 reads bf16 ones.
    """
    sinks = dice.normal(spec.num_heads, dtype=STORAGE_DTYPES[spec.dtype]).float()
    sinks[1:][-1:] = -math.inf
    return sinks


def _slopes(spec: LayerSpec, dice: Dice) -> Tensor:
    """Return random slopes, of several heads' the last negative: its farthest keys count most."""
    slopes = dice.normal(spec.num_heads).abs().float() * 0.1
    slopes[1:][-1:] = -0.002
    return slopes


def _scale(spec: LayerSpec, name: str, size: float, dice: Dice) -> Scale:
    """Return a random scale, as the spec has them: a number, or a tensor."""
    many = spec.scales == "head" and name != "out_scale"
    drawn = [
        size * (0.5 + 0.05 * n) for n in dice.integers(0, 10, spec.num_kv_heads if many else 1)
    ]
    if spec.scales == "number":
        return drawn[0]
    numbers = drawn if many else drawn[0]
    return torch.tensor(numbers, dtype=torch.float32, device=dice.device)


def _share(run: SharedRun, tokens: tuple[Tensor, ...], lens: list[int], block: int) -> None:
    """Let a run's rows have the first one's keys and values."""
    same = slice(run.first * block, (run.first + run.count) * block)
    for tensor in tokens:
        parts = tensor.split(lens)
        for row in run.rows[1:]:
            assert lens[row] >= same.stop
            parts[row][same] = parts[run.rows[0]][same]
