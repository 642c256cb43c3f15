"""Runs a step of MLA: fresh inputs, a poisoned latent cache, the reference that absorbs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyattn.conformance.cases.attention import batches
from polyattn.conformance.harness.attention import held_before, same_cache
from polyattn.conformance.harness.base import (
    Harness,
    Lengths,
    copied,
    lens_of,
    new_rows,
    paged_batch,
    poison,
    put,
    unchanged,
)
from polyattn.families.attention import reference as attention_reference
from polyattn.families.mla import reference
from polyattn.families.mla.inputs import chosen_positions, latent_weights
from polyattn.families.mla.layer import LatentAttention
from polyattn.families.mla.planning import LatentStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.plan import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.spec.decompose import absorbed
from polyattn.spec.layer import LayerSpec


@dataclass
class LatentInputs:
    """All that one step of one MLA layer takes."""

    batch: Batch
    query: Tensor
    latent: Tensor
    rope: Tensor
    cache: KVCache
    topk: Tensor | None


class LatentHarness(Harness):
    """Builds and runs MLA layers."""

    def layer(
        self, spec: LayerSpec, group: LayerGroup | None = None, weights: bool = True
    ) -> LatentAttention:
        """Return an MLA layer with random weights, or one whose caller absorbs."""
        made = latent_weights(spec, self.generator) if weights else (None, None)
        factor = 0.5 + 0.05 * self.integers(0, 10, 1)[0]
        scale = {"auto": 1.0, "int8": 0.08 * factor}.get(spec.kv_cache_dtype, factor)
        return LatentAttention(group or self.group(spec), *made, k_scale=scale, checks=True)

    def inputs(
        self,
        layer: LatentAttention,
        lengths: Lengths | str,
        *,
        shared: int = 0,
        like: LatentInputs | None = None,
    ) -> LatentInputs:
        """Return a step whose context is in the cache and whose unused cache is NaN.

        `shared`, `like`: as an attention layer's.
        """
        spec, form, part = layer.spec, layer.group.cache_format, layer.spec.latent
        assert part is not None and form is not None
        if isinstance(lengths, str):
            lengths = batches(lengths, form.block_size)
        queries, lens = lens_of(lengths)
        dtype, tokens = STORAGE_DTYPES[spec.dtype], sum(queries)
        table, num_blocks = self.block_table(lens, form.block_size)
        if like is not None and like.batch.block_table is not None:
            table, num_blocks = like.batch.block_table, like.cache.num_blocks
        rows = self.random(sum(lens), 1, part.size, dtype=dtype)
        if shared:
            table[1:, :shared] = table[0, :shared]
            for seq in rows.split(lens):
                seq[: shared * form.block_size] = rows[: shared * form.block_size]
        cache = layer.group.allocate_cache(num_blocks)
        poison(cache)
        slots = Batch.from_lens(lens, lens, table, form.block_size).slot_mapping
        assert slots is not None
        there = held_before(lengths, False).to(self.torch_device)
        scales = (layer.params.k_scale, layer.params.v_scale)
        put(cache, rows, rows[..., : part.rank], slots.masked_fill(~there, -1), scales)
        topk = None
        if part.topk:
            topk = chosen_positions(lens, queries, part.topk, self.generator)
            topk = topk.to(self.torch_device)
        width = spec.head_size if layer.weights is not None else part.size
        new = new_rows(lengths).to(self.torch_device)
        own = rows[new, 0] if len(rows) else rows.new_zeros(len(new), part.size)
        return LatentInputs(
            paged_batch(lengths, table, form.block_size),
            self.random(tokens, spec.num_heads, width, dtype=dtype),
            own[:, : part.rank].contiguous(),
            own[:, part.rank :].contiguous(),
            cache,
            topk,
        )

    def run(
        self, layer: LatentAttention, inputs: LatentInputs, plan: StepPlan | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer into a poisoned output and LSE."""
        spec, step = layer.spec, plan or layer.group.plan(inputs.batch)
        assert isinstance(step, LatentStep) and spec.latent is not None
        width = spec.latent.rank if layer.weights is None else spec.v_head_size
        shape = (len(inputs.query), spec.num_heads, width)
        out = torch.full(shape, torch.nan, device=self.torch_device).to(inputs.query.dtype)
        lse = None
        if spec.needs_lse:
            lse = torch.full(shape[:2], torch.nan, device=self.torch_device)
        layer.run(
            step, inputs.query, inputs.latent, inputs.rope, inputs.cache, inputs.topk, out, lse
        )
        return out, lse

    def check(
        self,
        layer: LatentAttention,
        inputs: LatentInputs,
        label: str = "",
        plan: StepPlan | None = None,
    ) -> Tensor:
        """Run, compare with the reference and look at what must not change; returns the output."""
        names = ("query", "latent", "rope", "topk")
        before = {n: t.clone() for n in names if (t := getattr(inputs, n)) is not None}
        held = self.expected_cache(layer, inputs)
        out, lse = self.run(layer, inputs, plan)
        for name, then in before.items():
            unchanged(name, getattr(inputs, name), then)
        same_cache(inputs.cache, held, inputs.batch.slot_mapping)
        self.compare(layer, replace(inputs, cache=held), out, lse, label)
        return out

    def expected_cache(self, layer: LatentAttention, inputs: LatentInputs) -> KVCache:
        """Return what the cache must hold after the step."""
        held, slots = copied(inputs.cache), inputs.batch.slot_mapping
        assert slots is not None
        entry = torch.cat([inputs.latent, inputs.rope], dim=1)[:, None]
        scales = (layer.params.k_scale, layer.params.v_scale)
        put(held, entry, entry[..., : inputs.latent.shape[1]], slots, scales)
        return held

    def compare(
        self,
        layer: LatentAttention,
        inputs: LatentInputs,
        out: Tensor,
        lse: Tensor | None,
        label: str = "",
    ) -> None:
        """Assert that results are the reference's, `inputs.cache` holding the new latents."""
        spec = layer.spec
        if layer.weights is None:
            expected, expected_lse = attention_reference.forward(
                absorbed(spec), inputs.query, None, None, inputs.cache, inputs.batch, layer.params
            )
        else:
            expected, expected_lse = reference.forward(
                spec, inputs.query, inputs.cache, inputs.batch, layer.weights, layer.params,
                inputs.topk,
            )  # fmt: skip
        self.judge(spec, inputs.batch, (out, lse), (expected, expected_lse), label)
