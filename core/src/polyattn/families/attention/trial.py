"""One tiny step of each phase of attention, and what it should give: what verification runs."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.families.attention import reference
from polyattn.families.attention.inputs import attention_inputs
from polyattn.families.attention.layer import Attention
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.functions.pointwise import Pointwise, example_inputs
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.step_mask import BlockSparseMask, CustomMask, StepMask
from polyattn.runtime.trial import Outcome
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

SEQS = 3
"""Sequences of a trial's step, at most."""


def run_trial(group: LayerGroup, phase: str, generator: torch.Generator) -> Outcome:
    """Run a step of `phase` of this group's layer on its device beside the float64 reference."""
    spec, device = group.spec, group.torch_device
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.learned_sinks else None
    sinks = None if sinks is None else sinks.to(device)
    pointwise = Pointwise.of(spec)
    given = None if pointwise is None else example_inputs(pointwise, spec, generator, SEQS)
    layer = Attention(
        group, sinks=sinks, rotate=spec.rope is not None, inputs=given, checks=False
    )  # fmt: skip
    if spec.cached:
        batch, cache = paged_step(group, phase, generator)
        query, key, value = attention_inputs(spec, batch.num_tokens, generator, device)
        new: tuple[Tensor | None, ...] = (key, value)
        if spec.role is Role.CROSS:
            new = (None, None)
        got = layer(query, new[0], new[1], cache, group.plan(batch))
        expected = reference.forward(spec, query, None, None, cache, batch, layer.params)
    else:
        lens = [1, 33]
        mask = example_mask(spec, lens, lens, generator)
        batch = Batch.from_lens(lens, lens, mask=mask, device=device)
        query, key, value = attention_inputs(spec, 34, generator, device)
        got = layer(query, key, value, None, group.plan(batch))
        expected = reference.forward(spec, query, key, value, None, batch, layer.params)
    out, lse = got if isinstance(got, tuple) else (got, None)
    return Outcome(out, expected[0], lse, expected[1])


def paged_step(group: LayerGroup, phase: str, generator: torch.Generator) -> tuple[Batch, KVCache]:
    """Return three sequences in pages that lie in no order, and a cache full of numbers."""
    cache = group.allocate_cache(8)
    size, device = cache.block_size, group.torch_device
    fill(cache, generator)
    # A prefill that had a single token would be taken for a decode.
    query_lens = [1, 1, 1] if phase == "decode" else [0, size, 5]
    if phase == "prefill" and size == 1:
        query_lens = [0, 2, 3]
    table = torch.tensor([[3, 0, 0], [5, 1, 0], [2, 6, 4]], dtype=torch.int32, device=device)
    lens = [1, size + 1, 3 * size]
    mask = example_mask(group.spec, query_lens, lens, generator)
    return Batch.from_lens(query_lens, lens, table, size, mask=mask), cache


def example_mask(
    spec: LayerSpec, query_lens: list[int], lens: list[int], generator: torch.Generator,
    page: int | None = None,
) -> StepMask | None:  # fmt: skip
    """Return a random mask of the kind that a layer's steps bring: half of the keys, or of blocks.

    `page`: a block is so many keys, seen by four queries.
    """
    if spec.mask is None:
        return None
    if spec.mask == "block_sparse" and page is not None:
        indptr, indices = [0], list[int]()
        for queries, keys in zip(query_lens, lens, strict=True):
            for _ in range(0, queries, 4):
                seen = torch.rand(-(-keys // page), generator=generator) < 0.5
                indices += seen.nonzero()[:, 0].tolist()
                indptr.append(len(indices))
        return BlockSparseMask(indptr, indices, (4, page))
    pairs = zip(query_lens, lens, strict=True)
    bits = [torch.rand(q, n, generator=generator) < 0.5 for q, n in pairs]
    whole = CustomMask.pack(bits, "all")
    if spec.mask == "custom":
        return whole
    return BlockSparseMask.of(whole, query_lens, lens, (2, 3))


def fill(cache: KVCache, generator: torch.Generator) -> None:
    """Fill a cache with numbers that its dtype can hold."""
    for stored in (cache.key, cache.value):
        values = torch.randn(stored.shape, generator=generator)
        if stored.dtype == torch.int8:
            values = (values * 32).clamp(-127, 127)
        stored.copy_(values.to(stored.dtype).to(stored.device))
