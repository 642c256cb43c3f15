"""Runs a step of attention: fresh inputs, poisoned outputs and unused cache, the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.cases.attention import LATER, batches
from polyattn.conformance.harness.base import (
    Harness,
    Lengths,
    bits,
    copied,
    lens_of,
    new_rows,
    paged_batch,
    poison,
    put,
    unchanged,
)
from polyattn.families.attention import reference
from polyattn.families.attention.layer import Attention
from polyattn.families.attention.planning import AttentionStep
from polyattn.families.attention.transforms import Places, Transforms
from polyattn.families.attention.trial import example_mask
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache, quantize
from polyattn.runtime.cache.scales import Scale, input_dtype, used_scales
from polyattn.runtime.functions.pointwise import Pointwise, example_inputs
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.plan import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.shared_prefix import Levels, SharedRun
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

OFFSETS = {"+100": 100.0, "-100": -100.0}
"""What unusual logits are raised or lowered by: more than float32's exponential takes."""


@dataclass
class Inputs:
    """All that one step of one layer takes. `offset`: what all its logits lie near."""

    batch: Batch
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: KVCache | None
    offset: float = 0.0


class AttentionHarness(Harness):
    """Builds and runs attention layers."""

    def layer(
        self, spec: LayerSpec, layout: str | None = None, group: LayerGroup | None = None
    ) -> Attention:
        """Return a layer with random sinks, slopes and scales where the spec has them."""
        group = group or self.group(spec, layout)
        # Of an output so small that what it is of values near 1 doesn't saturate.
        stored = 0.08 if spec.kv_cache_dtype == "int8" else 1.0
        sizes = {"q_scale": 1.0, "k_scale": stored, "v_scale": stored, "out_scale": 0.04}
        scales: dict[str, Any] = {
            name: self._scale(spec, name, sizes[name]) for name in sorted(used_scales(spec))
        }
        return Attention(
            group,
            sinks=self.random(spec.num_heads).float() if spec.learned_sinks else None,
            alibi_slopes=self.random(spec.num_heads).abs().float() * 0.1 if spec.alibi else None,
            **scales,
            rotate=spec.rope is not None,
            inputs=self._read_by_functions(spec),
            checks=True,
        )

    def _scale(self, spec: LayerSpec, name: str, size: float) -> Scale:
        """Return a random scale, as the spec has them: a number, or a tensor."""
        many = spec.scales == "head" and name != "out_scale"
        steps = self.integers(0, 10, spec.num_kv_heads if many else 1)
        drawn = [size * (0.5 + 0.05 * n) for n in steps]
        if spec.scales == "number":
            return drawn[0]
        return torch.tensor(drawn if many else drawn[0], device=self.torch_device)

    def given(self, layer: Attention, tensor: Tensor, scale: str) -> Tensor:
        """Return queries, keys or values (tokens, heads, size) as the layer is given them."""
        dtype = input_dtype(layer.spec)
        if dtype == tensor.dtype:
            return tensor
        factor = getattr(layer.params, scale)
        if isinstance(factor, Tensor):
            factor = factor.repeat_interleave(tensor.shape[1] // len(factor))
        return quantize(tensor, dtype, factor)

    def _read_by_functions(self, spec: LayerSpec) -> dict[str, Tensor] | None:
        """Return random inputs of a variant's functions, but those that are each sequence's."""
        pointwise = Pointwise.of(spec)
        if pointwise is None:
            return None
        found = example_inputs(pointwise, spec, self.generator, num_seqs=0)
        return {n: t for n, t in found.items() if "num_seqs" not in pointwise.inputs[n].dims}

    def _brought(self, spec: LayerSpec, batch: Batch) -> Batch:
        """Return a batch that brings what functions read of its sequences."""
        pointwise = Pointwise.of(spec)
        if pointwise is not None:
            found = example_inputs(pointwise, spec, self.generator, batch.num_seqs)
            mine = {n: t for n, t in found.items() if "num_seqs" in pointwise.inputs[n].dims}
            batch.inputs |= {name: tensor.to(batch.device) for name, tensor in mine.items()}
        return batch

    def inputs(
        self,
        layer: Attention,
        lengths: Lengths | str,
        numbers: str = "usual",
        *,
        packed: bool = False,
        shared: Levels = (),
        skipped: bool = False,
        like: Inputs | None = None,
    ) -> Inputs:
        """Return a step whose context is in the cache and whose unused cache is NaN.

        - `numbers`: unusual ones, as a case names them; `pages`: a mask's blocks are the cache's.
        - `packed`: K and V are views into one storage.
        - `shared`: runs of blocks that sequences have in common.
        - `skipped`: of every other new token the cache has the key already; it isn't stored again.
        - `like`: another layer's step, whose batch this one has too.
        """
        spec, form = layer.spec, layer.group.cache_format
        block = form.block_size if form else 16
        if isinstance(lengths, str):
            lengths = batches(lengths, block)
        query = self._numbers(spec, sum(q for q, _ in lengths), "query", numbers)
        query = self.given(layer, query, "q_scale")
        if form is None:
            return self._given(layer, lengths, query, numbers, like)
        queries, lens = lens_of(lengths)
        keys, values = (
            self.given(layer, self._numbers(spec, sum(lens), name, numbers), scale)
            for name, scale in (("key", "k_scale"), ("value", "v_scale"))
        )
        table, num_blocks = self.block_table(lens, form.block_size)
        if like is not None and like.cache is not None and like.batch.block_table is not None:
            table, num_blocks = like.batch.block_table, like.cache.num_blocks
        for run in (run for level in shared for run in level):
            _share(run, table, (keys, values), lens, form.block_size)
        cache = self._cache(layer, num_blocks, packed)
        slots = Batch.from_lens(lens, lens, table, form.block_size).slot_mapping
        assert slots is not None
        scales = (layer.params.k_scale, layer.params.v_scale)
        if spec.role is Role.CROSS:
            put(cache, keys, values, slots, scales)
            starts = [0, *accumulate(queries)]
            return Inputs(Batch(starts, lens, table), query, None, None, cache)
        there = held_before(lengths, skipped).to(self.torch_device)
        put(cache, keys, values, slots.masked_fill(~there, -1), scales)
        rows = new_rows(lengths).to(self.torch_device)
        page = form.block_size if numbers == "pages" else None
        mask = example_mask(spec, queries, lens, self.generator, page)
        batch = self._brought(spec, paged_batch(lengths, table, form.block_size, mask))
        if not len(keys):  # padding rows alone: no sequence has a key
            keys, values = (t.new_zeros(len(rows), *t.shape[1:]) for t in (keys, values))
            return Inputs(batch, query, keys, values, cache)
        if skipped:
            assert batch.slot_mapping is not None
            batch.slot_mapping.masked_fill_(there[rows], -1)
        return Inputs(batch, query, keys[rows], values[rows], cache)

    def _given(
        self, layer: Attention, lengths: Lengths, query: Tensor, numbers: str, like: Inputs | None
    ) -> Inputs:
        """Keys that are given whole, with gaps between the sequences that hold NaN."""
        spec = layer.spec
        queries, lens = lens_of(lengths)
        starts, total = [], 0
        for gap, length in zip(self.integers(0, 4, len(lens)), lens, strict=True):
            starts.append(total + gap)
            total += gap + length
        if like is not None:
            starts = like.batch.key_starts
        total = max(map(sum, zip(starts, lens, strict=True)), default=0) + 2
        key, value = (
            self._numbers(spec, total, n, numbers).to(input_dtype(spec)).fill_(torch.nan)
            for n in ("key", "value")
        )
        for start, length in zip(starts, lens, strict=True):
            for tensor, name, scale in ((key, "key", "k_scale"), (value, "value", "v_scale")):
                new = self._numbers(spec, length, name, numbers)
                tensor[start : start + length] = self.given(layer, new, scale)
        mask = example_mask(spec, queries, lens, self.generator)
        firsts = self.integers(0, 60, len(lens)) if numbers == LATER else None
        batch = Batch.from_lens(
            queries, lens, key_starts=starts, first_positions=firsts, mask=mask,
            device=self.torch_device,
        )  # fmt: skip
        return Inputs(self._brought(spec, batch), query, key, value, None)

    def _numbers(self, spec: LayerSpec, tokens: int, what: str, numbers: str) -> Tensor:
        """Random queries, keys or values; `+100` and `-100` raise or lower every logit by so much."""
        heads = spec.num_heads if what == "query" else spec.num_kv_heads
        size = spec.v_head_size if what == "value" else spec.head_size
        found = self.random(tokens, heads, size, dtype=STORAGE_DTYPES[spec.dtype])
        offset = OFFSETS.get(numbers, 0.0)
        if offset and what != "value":
            each = (abs(offset) / spec.scale) ** 0.5
            found[..., 0] = math.copysign(each, offset) if what == "key" else each
        return found

    def _cache(self, layer: Attention, num_blocks: int, packed: bool) -> KVCache:
        form = layer.group.cache_format
        assert form is not None
        form = replace(form, interleaved=packed)
        cache = KVCache.allocate(form, num_blocks, self.torch_device)
        poison(cache)
        return cache

    def run(
        self, layer: Attention, inputs: Inputs, plan: StepPlan | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer into a poisoned output and LSE."""
        spec, step = layer.spec, plan or layer.group.plan(inputs.batch)
        assert isinstance(step, AttentionStep)
        out = torch.full(step.out_shape, torch.nan, device=self.torch_device)
        out = out.to(step.out_dtype)
        lse = None
        if spec.needs_lse:
            lse = torch.full(step.lse_shape, torch.nan, device=self.torch_device)
        layer.run(step, inputs.query, inputs.key, inputs.value, inputs.cache, out, lse)
        return out, lse

    def check(
        self, layer: Attention, inputs: Inputs, label: str = "", plan: StepPlan | None = None
    ) -> Tensor:
        """Run, compare with the reference and look at what must not change; returns the output."""
        given = (inputs.query, inputs.key, inputs.value)
        before = [None if t is None else t.clone() for t in given]
        held = self.expected_cache(layer, inputs)
        out, lse = self.run(layer, inputs, plan)
        for name, now, then in zip(("query", "key", "value"), given, before, strict=True):
            unchanged(name, now, then)
        if held is not None and inputs.cache is not None:
            same_cache(inputs.cache, held, inputs.batch.slot_mapping)
        self.compare(layer, replace(inputs, cache=held), out, lse, label)
        return out

    def expected_cache(self, layer: Attention, inputs: Inputs) -> KVCache | None:
        """Return what the cache must hold after the step."""
        if inputs.cache is None:
            return None
        held, slots = copied(inputs.cache), inputs.batch.slot_mapping
        if slots is not None and inputs.key is not None and inputs.value is not None:
            scales = (layer.params.k_scale, layer.params.v_scale)
            put(held, *self._transformed(layer, inputs, inputs.key, inputs.value), slots, scales)
        return held

    def _transformed(
        self, layer: Attention, inputs: Inputs, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a step's new keys and values as its layer's variant has them stored."""
        transforms, batch = Transforms.of(layer.spec), inputs.batch
        if transforms is None:
            return key, value
        places, given = Places.of_queries(batch), {**batch.inputs, **layer.params.inputs}
        return (
            transforms.changed("key", key, places, given),
            transforms.changed("value", value, places, given),
        )

    def compare(
        self, layer: Attention, inputs: Inputs, out: Tensor, lse: Tensor | None, label: str = ""
    ) -> None:
        """Assert that results are the reference's, `inputs.cache` holding the new tokens."""
        spec = layer.spec
        expected, expected_lse = reference.forward(
            spec, inputs.query, inputs.key, inputs.value, inputs.cache, inputs.batch, layer.params
        )
        exact = reference.exact(out, layer.params.out_scale, torch.float64)
        self.judge(spec, inputs.batch, (exact, lse), (expected, expected_lse), label, inputs.offset)


def _share(
    run: SharedRun, table: Tensor, tokens: tuple[Tensor, ...], lens: list[int], block: int
) -> None:
    """Let a run's rows have the first one's blocks, and the keys and values that lie there."""
    columns = slice(run.first, run.first + run.count)
    table[list(run.rows), columns] = table[run.rows[0], columns].clone()
    same = slice(run.first * block, (run.first + run.count) * block)
    for tensor in tokens:
        parts = tensor.split(lens)
        for row in run.rows[1:]:
            assert lens[row] >= same.stop
            parts[row][same] = parts[run.rows[0]][same]


def held_before(lengths: Lengths, skipped: bool) -> Tensor:
    """Return which tokens the cache holds before the step: the context, some new ones if `skipped`."""
    there, end = torch.ones(sum(n for _, n in lengths), dtype=torch.bool), 0
    for query, length in lengths:
        first, end = end + max(length - query, 0), end + length
        there[first:end] = False
        if skipped:
            there[first:end:2] = True
    return there


def same_cache(now: KVCache, held: KVCache, slots: Tensor | None) -> None:
    """Assert that a cache holds what it must; of what was quantised, to the last but one bit."""
    written = torch.zeros(now.key.shape[:2], dtype=torch.bool, device=now.key.device)
    if slots is not None and now.key.dtype.itemsize == 1:
        written.view(-1)[slots[slots >= 0]] = True
    for name in ("key", "value"):
        found, wanted = getattr(now, name), getattr(held, name)
        equal = bits(found) == bits(wanted)
        wrong = ~equal & ~written[..., None, None]
        assert not wrong.any(), (
            f"the cache's {name}s changed where the step stores nothing, or wrong"
        )
        if written.any():
            new, right = found[written].float(), wanted[written].float()
            if found.dtype == torch.uint8:  # rows of bytes: each is its own
                new, right = (found[written] != wanted[written]).float(), torch.zeros(())
            step = right.abs() * 0.25 + (1.0 if found.dtype == torch.int8 else 0.02)
            near = ((new - right).abs() <= step) | (new.isnan() & right.isnan())
            assert bool(near.all()), f"a quantised {name} is stored wrong"
