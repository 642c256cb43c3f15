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
MOST = 1 << 24
"""Elements of one sequence's keys, over all query heads: 4,096 keys of 32 heads of 128. The reference
holds them in float64, so that a trial stays under a second; longer windows and chunks are cut there."""
MOST_SCORES = 1 << 22
"""Scores over all heads of a prompt given whole, likewise: 362 tokens of 32 heads. Beyond that a decoder
has fewer queries than keys, and other roles are cut."""


def reach(spec: LayerSpec) -> int:
    """Return a length just beyond the spec's chunk, and beyond its window and kept tokens together.

    0 where every key is seen; at most what `MOST` allows.
    """
    window = spec.sliding_window or spec.window_right or 0
    beyond = max(spec.chunk_size or 0, window + spec.sink_tokens)
    return min(beyond + 3, MOST // (spec.num_heads * spec.head_size)) if beyond else 0


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
        query_lens, lens = [1, 33], [1, 33]
        if keys := reach(spec):
            queries = min(keys, MOST_SCORES // (spec.num_heads * keys))
            query_lens.append(queries)
            lens.append(keys if spec.role is Role.DECODER else queries)
        mask = example_mask(spec, query_lens, lens, generator)
        batch = Batch.from_lens(query_lens, lens, mask=mask, device=device)
        query, _, _ = attention_inputs(spec, sum(query_lens), generator, device)
        _, key, value = attention_inputs(spec, sum(lens), generator, device)
        got = layer(query, key, value, None, group.plan(batch))
        expected = reference.forward(spec, query, key, value, None, batch, layer.params)
    out, lse = got if isinstance(got, tuple) else (got, None)
    return Outcome(out, expected[0], lse, expected[1])


def paged_step(group: LayerGroup, phase: str, generator: torch.Generator) -> tuple[Batch, KVCache]:
    """Return three sequences in pages that lie in no order, and a cache full of numbers."""
    form = group.cache_format
    assert form is not None
    size, device = form.block_size, group.torch_device
    longest = max(3 * size, reach(group.spec))
    more = -(-longest // size) - 3
    cache = group.allocate_cache(8 + more)
    fill(cache, generator)
    # A prefill that had a single token would be taken for a decode.
    query_lens = [1, 1, 1] if phase == "decode" else [0, size, 5]
    if phase == "prefill" and size == 1:
        query_lens = [0, 2, 3]
    rows = [[3, 0, 0], [5, 1, 0], [2, 6, 4]]
    rest = [[0] * more, [0] * more, [*range(7 + more, 7, -1)]]
    blocks = [[*row, *others] for row, others in zip(rows, rest, strict=True)]
    table = torch.tensor(blocks, dtype=torch.int32, device=device)
    lens = [1, size + 1, longest]
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
