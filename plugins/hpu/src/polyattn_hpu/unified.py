"""Unified Attention: one softmax in three parts, each over its own kind of keys.

The algorithm that vLLM's plugin for Gaudi describes (docs.vllm.ai/projects/gaudi, "Unified
Attention"), in torch operations of static shapes: query tokens lie one after another without a
sequence dimension, and each part is one product over all of them.

- causal: the step's own keys, still at hand; queries in slices, keys up to the slice's end.
- shared: cached blocks that several query tokens use, each fetched once for all queries.
- unique: cached blocks that one query token uses, block by block, then summed a sequence.

A part gives a `Partial`: the unnormalised value, the scores' maximum and the sum of exponentials
under it. Partials combine in any order (`combine`), and are divided by their sum once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn_hpu.buckets import SLICE
from polyattn_hpu.metadata import Metadata

SHARED_PRODUCTS = 1 << 20
"""(Query token, key) products of one head at a time in the shared part: bounds the scores."""
SCORES = 1 << 27
"""Most scores of all heads at a time in the causal part. Larger slices are split."""
UNIQUE_KEYS = 1 << 14
"""Keys at a time in the unique part: bounds the copy of the cache."""


Cache = tuple[Tensor, Tensor | int]
"""K and V, each (num_blocks, block_size, num_kv_heads, size); or K alone and how many of its leading
elements are its value, as in an MLA latent."""


class Partial(NamedTuple):
    """Attention over some of the keys, before division; an absent part is `ABSENT`.

    `value` (rows, num_heads, v_head_size + 1): the sum of `exp(score - maximum) * value`; its last
    element is positive where a key with weight had a value that is no finite number. `maximum` and
    `total` (rows, num_heads): the largest score, -inf where no key was seen, and the sum of
    `exp(score - maximum)`.
    """

    value: Tensor | None
    maximum: Tensor | None
    total: Tensor | None


ABSENT = Partial(None, None, None)


@dataclass(frozen=True)
class Scoring:
    """How a product becomes a score: `cap * tanh(scale * q.k / cap) + slope * distance`.

    `slopes` (num_heads,): ALiBi's, or None. `soft_cap` None: no cap. `dtype`: what is computed in.
    """

    scale: float
    soft_cap: float | None = None
    slopes: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def finish(self, products: Tensor, visible: Tensor, distance: Tensor | None) -> Tensor:
        """Turn products, in place, (…, num_heads, rows, keys) into scores, -inf where not `visible`.

        `visible` and `distance` (key position - query position; None without ALiBi) broadcast to
        (…, 1, rows, keys).
        """
        scores = products.mul_(self.scale)
        if self.soft_cap is not None:
            scores = scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.slopes is not None:
            assert distance is not None
            scores += self.slopes.to(self.dtype)[:, None, None] * distance.to(self.dtype)
        return scores.masked_fill_(~visible, -torch.inf)


def attend(
    meta: Metadata,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: Cache | None,
    scoring: Scoring,
) -> Partial:
    """Return the partial over all keys of a step, for the bucket's rows.

    `query` (bucket.query, num_heads, head_size); `key`, `value` (bucket.own_rows, num_kv_heads,
    size): the step's own, needed where the phase has a causal part; `cache`: K and V, each (num_blocks,
    block_size, num_kv_heads, size), needed where it has another.
    """
    query = query.to(scoring.dtype)
    partial = ABSENT
    if meta.bucket.phase[0] == "c":
        assert key is not None and value is not None
        partial = causal(meta, query, key, value, scoring)
    if meta.bucket.phase[1] == "s":
        assert cache is not None
        partial = combine(partial, shared(meta, query, cache, scoring))
    if meta.bucket.phase[2] == "u":
        assert cache is not None
        partial = combine(partial, unique(meta, query, cache, scoring))
    return partial


def causal(meta: Metadata, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Partial:
    """Attend over the step's own keys, slice by slice; in order, a slice needs keys up to its end.

    Where the layer isn't causal every slice needs all keys: the masks' widths say so.
    """
    tokens = meta.tokens
    keys, values = key.to(scoring.dtype).transpose(0, 1), _flagged(value, scoring.dtype)
    values = values.transpose(0, 1)
    parts = []
    for index, mask in enumerate(meta.causal_masks):
        height, width = mask.shape
        step = max(1, SCORES // (width * query.shape[1]))
        for at in range(0, height, step):
            some = slice(at, min(at + step, height))
            rows = slice(index * SLICE + some.start, index * SLICE + some.stop)
            distance = None
            if scoring.slopes is not None:
                row = torch.arange(width, dtype=tokens.origin.dtype, device=tokens.origin.device)
                distance = row - (tokens.origin + tokens.position)[rows, None]
            part = query[rows], keys[:, :width], values[:, :width]
            parts.append(_dense(*part, mask[some], distance, scoring))
    return Partial(*(torch.cat(same) for same in zip(*parts, strict=True)))


def shared(meta: Metadata, query: Tensor, cache: Cache, scoring: Scoring) -> Partial:
    """Attend over the shared blocks, a few at a time, all queries to each."""
    size = cache[0].shape[1]
    step = max(1, SHARED_PRODUCTS // (query.shape[0] * size))
    partial = ABSENT
    for at in range(0, meta.bucket.shared, step):
        entries = slice(at, min(at + step, meta.bucket.shared))
        keys, values = read(cache, meta.shared_blocks[entries])
        position = positions(meta.shared_starts[entries], size).flatten()
        mask = meta.tokens.sees_cached(position)
        mask &= meta.member[:, entries][meta.tokens.sequence].repeat_interleave(size, dim=1)
        distance = None
        if scoring.slopes is not None:
            distance = position[None] - meta.tokens.position[:, None]
        keys = keys.to(scoring.dtype).flatten(0, 1).transpose(0, 1)
        values = _flagged(values, scoring.dtype).flatten(0, 1).transpose(0, 1)
        partial = combine(partial, _dense(query, keys, values, mask, distance, scoring))
    return partial


def unique(meta: Metadata, query: Tensor, cache: Cache, scoring: Scoring) -> Partial:
    """Attend block by block to each block's one query token, then add up a sequence's blocks.

    The work is the sum of the blocks, not sequences times the longest.
    """
    size = cache[0].shape[1]
    count = meta.bucket.unique
    if meta.bucket.contiguous:  # a bucket may reach beyond the cache's end, where nothing lies
        count = min(count, cache[0].shape[0])
    step = max(1, UNIQUE_KEYS // size)
    partial = ABSENT
    for at in range(0, count, step):
        entries = slice(at, min(at + step, count))
        partial = combine(partial, _unique_blocks(meta, query, cache, entries, scoring))
    return Partial(*(t[meta.tokens.sequence] for t in partial if t is not None))


def _unique_blocks(
    meta: Metadata, query: Tensor, cache: Cache, entries: slice, scoring: Scoring
) -> Partial:
    """Return the partial of each sequence, (logits + 1) rows, over some of the unique blocks."""
    groups, rows = meta.unique_groups[entries], meta.unique_rows[entries]
    blocks = entries if meta.unique_blocks is None else meta.unique_blocks[entries]
    keys, values = read(cache, blocks)
    position = positions(meta.unique_starts[entries], keys.shape[1])
    kv_heads = keys.shape[2]
    asked = query[rows].unflatten(1, (kv_heads, -1))  # (blocks, KV heads, group, size)
    products = torch.matmul(asked, keys.to(scoring.dtype).permute(0, 2, 3, 1))
    distance = None
    if scoring.slopes is not None:
        distance = (position - meta.tokens.position[rows][:, None])[:, None, None]
    visible = meta.unique_masks[entries][:, None, None]
    scores = scoring.finish(products.flatten(1, 2)[:, :, None], visible, distance)
    weights, maximum, total = _softmax(scores[:, :, 0])
    weights = weights.unflatten(1, (kv_heads, -1))
    value = torch.matmul(weights, _flagged(values, scoring.dtype).permute(0, 2, 1, 3))
    block = Partial(value.flatten(1, 2), maximum, total)
    return _by_group(block, groups, meta.bucket.logits + 1)


def _by_group(block: Partial, groups: Tensor, count: int) -> Partial:
    """Combine the partials of the blocks of each group.

    Sums are scattered, where a product with a one-hot matrix would carry NaN from group to group.
    """
    value, maximum, total = block
    assert value is not None and maximum is not None and total is not None
    top = maximum.new_full((count, maximum.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, groups[:, None].long().expand_as(maximum), maximum, "amax")
    weight = torch.exp(maximum - _finite(top)[groups])
    return Partial(
        value.new_zeros(count, *value.shape[1:]).index_add(0, groups, value * weight[..., None]),
        top,
        total.new_zeros(count, total.shape[1]).index_add(0, groups, total * weight),
    )


def combine(first: Partial, second: Partial) -> Partial:
    """Return the partial over both parts' keys. Associative, commutative; `ABSENT` is its identity."""
    if first.value is None:
        return second
    if second.value is None:
        return first
    assert first.maximum is not None and first.total is not None
    assert second.maximum is not None and second.total is not None
    maximum = torch.maximum(first.maximum, second.maximum)
    a = torch.exp(first.maximum - _finite(maximum))
    b = torch.exp(second.maximum - _finite(maximum))
    return Partial(
        first.value * a[..., None] + second.value * b[..., None],
        maximum,
        first.total * a + second.total * b,
    )


def normalize(part: Partial) -> tuple[Tensor, Tensor]:
    """Divide once: return the output (rows, num_heads, v_head_size) and the LSE (rows, num_heads).

    A row that saw no key is output 0, LSE -inf; one that gave weight to a value that is no finite
    number is NaN.
    """
    value, maximum, total = part
    assert value is not None and maximum is not None and total is not None
    output, flag = value[..., :-1], value[..., -1:]
    empty = total == 0
    output = output / total.masked_fill(empty, 1.0)[..., None]
    return output.masked_fill(flag > 0, torch.nan), maximum + torch.log(total)


def read(cache: Cache, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Return K and V of blocks, (blocks, block_size, num_kv_heads, size)."""
    stored, other = cache
    keys = fetch(stored, blocks)
    return keys, keys[..., :other] if isinstance(other, int) else fetch(other, blocks)


def fetch(stored: Tensor, blocks: Tensor | slice) -> Tensor:
    """Read blocks of K or V; the one place that does. A slice is a view, a list a copy."""
    if isinstance(blocks, slice):
        return stored[blocks]
    if stored.dtype.itemsize > 1:
        return stored.index_select(0, blocks)
    return stored.view(torch.uint8).index_select(0, blocks).view(stored.dtype)


def nothing(rows: int, heads: int, v_head_size: int, like: Tensor) -> Partial:
    """Return the partial of rows that saw no key."""
    return Partial(
        like.new_zeros(rows, heads, v_head_size + 1),
        like.new_full((rows, heads), -torch.inf),
        like.new_zeros(rows, heads),
    )


def _dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    distance: Tensor | None,
    scoring: Scoring,
) -> Partial:
    """Attend `query` (rows, num_heads, size) to K and V (num_kv_heads, keys, size)."""
    rows, kv_heads = query.shape[0], keys.shape[0]
    folded = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    products = torch.matmul(folded, keys.transpose(1, 2))
    products = products.view(query.shape[1], rows, -1)
    weights, maximum, total = _softmax(scoring.finish(products, visible, distance))
    value = torch.matmul(weights.view(kv_heads, -1, weights.shape[2]), values)
    value = value.view(query.shape[1], rows, -1)
    return Partial(value.transpose(0, 1), maximum.T, total.T)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - maximum), the maximum and the sum, over the last dimension."""
    maximum = scores.amax(-1)
    weights = torch.exp(scores - _finite(maximum)[..., None])
    return weights, maximum, weights.sum(-1)


def _finite(maximum: Tensor) -> Tensor:
    """Return 0 for -inf, the maximum of a row without keys: exp(-inf - -inf) would be NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _flagged(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace values that aren't finite by 0, and flag them in one more element.

    A weight of 0 times NaN is NaN. So a hidden or unwritten value would reach a request through the
    product. The flag's product is 0 for a hidden value and positive for one with weight.
    """
    values = values.to(dtype)
    fine = torch.isfinite(values)
    flag = (~fine).any(-1, keepdim=True).to(dtype)
    return torch.cat([values.masked_fill(~fine, 0.0), flag], dim=-1)


def positions(starts: Tensor, size: int) -> Tensor:
    """Return the position of every key of blocks that start at `starts`, (blocks, size)."""
    return starts[:, None] + torch.arange(size, dtype=starts.dtype, device=starts.device)
