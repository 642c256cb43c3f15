"""The right answer for a sparse layer, one token at a time: its choice, and its attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn.families.attention.reference import exact
from polyattn.families.sparse.index_cache import read_index_keys
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.program import IndexFrame, LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import token_places
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import IndexerSpec


def chosen_slots(
    spec: LayerSpec, ids: list[int], position: int, length: int, blocks: list[int], block_size: int
) -> list[int]:
    """Return the places in the cache that one token's ids name for one head, one after another."""
    sparse = spec.sparse
    assert sparse is not None
    if sparse.physical:
        return [place for place in ids if place >= 0]
    seen = min(position + 1, length) if spec.causal else length
    entries = seen // sparse.tokens_per_entry
    slots = []
    for group in ids:
        if group < 0:
            continue
        for entry in range(group * sparse.granularity, (group + 1) * sparse.granularity):
            if entry < entries:
                slots.append(blocks[entry // block_size] * block_size + entry % block_size)
    return slots


def attend(
    spec: LayerSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with one token's heads that share a choice (heads, head_size) to keys and values.

    `keys`, `values` (heads, count, size). Returns the output (heads, v_head_size) and the LSE (heads,).
    A head's sink is part of its LSE; without keys the output is 0 and the LSE -inf, also with a sink.
    """
    heads = len(query)
    if not keys.shape[1]:
        return query.new_zeros(heads, spec.v_head_size), query.new_full((heads,), -torch.inf)
    scores = torch.einsum("hd,hkd->hk", query, keys) * spec.scale
    if spec.logit_soft_cap is not None:
        scores = spec.logit_soft_cap * torch.tanh(scores / spec.logit_soft_cap)
    logits = scores if sinks is None else torch.cat([scores, sinks[:, None]], 1)
    lse = logits.logsumexp(1)
    return torch.einsum("hk,hkd->hd", torch.exp(scores - lse[:, None]), values), lse


def forward(
    spec: LayerSpec,
    query: Tensor,
    cache: KVCache,
    batch: Batch,
    choice: Tensor,
    params: LayerParams | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Run a sparse layer over a batch whose new tokens are already in `cache`.

    Returns the output (num_tokens, num_heads, v_head_size) and the LSE (num_tokens, num_heads).
    """
    params, sparse = params or LayerParams(), spec.sparse
    assert batch.block_table is not None and sparse is not None
    query = query.detach().to("cpu", dtype)
    table, rows = batch.block_table.tolist(), choice.tolist()
    output = torch.zeros(
        batch.num_tokens, spec.num_heads, spec.v_head_size, dtype=dtype, device="cpu"
    )
    lse = torch.full((batch.num_tokens, spec.num_heads), -torch.inf, dtype=dtype, device="cpu")
    every = torch.arange(spec.num_heads, device="cpu").split(
        spec.num_heads // sparse.choices(spec.num_heads, spec.num_kv_heads)
    )
    sinks = params.sinks.detach().to("cpu", dtype) if params.sinks is not None else None
    for index in range(batch.num_seqs):
        length, start, stop = batch.lens[index], batch.starts[index], batch.starts[index + 1]
        for token in range(start, stop):
            for ids, heads in zip(rows[token], every, strict=True):
                slots = torch.tensor(
                    chosen_slots(
                        spec, ids, length - stop + token, length, table[index], cache.block_size
                    ),
                    dtype=torch.int64,
                    device=cache.key.device,
                )
                of_key = heads // spec.gqa_ratio
                place = slots // cache.block_size, slots % cache.block_size
                keys, values = (
                    exact(_at(stored, place), scale, dtype)[:, of_key].transpose(0, 1)
                    for stored, scale in (
                        (cache.key, params.k_scale),
                        (cache.value, params.v_scale),
                    )
                )
                own = None if sinks is None else sinks[heads]
                output[token, heads], lse[token, heads] = attend(
                    spec, query[token, heads], keys, values, own
                )
    return output, lse


def candidates(
    spec: IndexerSpec,
    query: Tensor,
    keys: Tensor,
    position: int,
    weights: Tensor | None = None,
    within: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[dict[int, float]]:
    """Return the scores of one token's candidates by id, for each of its choices.

    `query` (num_heads, head_size); `keys` (entries, head_size), its sequence's; `weights` (num_heads,);
    `within`: the blocks of entries that count.
    """
    query, keys = query.to("cpu", dtype), keys.to("cpu", dtype)
    entries = max(position + 1, 0) // spec.tokens_per_entry
    products = spec.scale * query @ keys[:entries].T
    if spec.activation == "relu":
        products = products.relu()
    if spec.fold == "weighted":
        assert weights is not None
        products = (weights.to("cpu", dtype) @ products)[None]
    elif spec.fold == "sum":
        products = products.sum(0, keepdim=True)
    ranked = []
    for row in products:
        scores: dict[int, float] = {}
        for entry, score in enumerate(row.tolist()):
            if within is None or spec.within is None or entry // spec.within in within:
                candidate = entry // spec.pool
                scores[candidate] = max(score, scores.get(candidate, -math.inf))
        ranked.append(scores)
    return ranked


def choose(spec: IndexerSpec, scores: dict[int, float], position: int) -> list[int]:
    """Return the ids that one of a token's choices has, of all candidates' scores: ascending."""
    seen = max(position + 1, 0)
    there = -(-(seen // spec.tokens_per_entry) // spec.pool)
    count = spec.budget
    if isinstance(count, float):
        count = math.ceil(there * count - 1e-9)
    ranked = []
    for candidate, score in scores.items():
        forced = candidate < spec.forced_first or candidate >= there - spec.forced_last
        ranked.append((not forced, 0.0 if forced else -score, candidate))
    tail = [seen // spec.tokens_per_entry] if spec.tail and seen % spec.tokens_per_entry else []
    return sorted(candidate for _, _, candidate in sorted(ranked)[:count]) + tail


BAND = 1e-4
"""How far below the worst chosen score, as a part of the largest, another one may lie in its place."""


def ranking_problem(
    scores: dict[int, float], chosen: Sequence[int], wanted: Sequence[int]
) -> str | None:
    """Return how a token's ids differ wrongly from the expected ones; None if rounding explains it.

    `scores` of the candidates by id; both choices without -1.
    """
    if len(chosen) != len(wanted):
        return f"has {len(chosen)} ids, not {len(wanted)}"
    mine, theirs = {*chosen} - {*wanted}, {*wanted} - {*chosen}
    if len(mine) != len(theirs):
        return "has an id twice"
    largest = max(map(abs, scores.values()), default=0.0)
    for one, other in zip(sorted(mine), sorted(theirs), strict=True):
        if one not in scores:
            return f"doesn't see candidate {one}"
        if other not in scores or not abs(scores[one] - scores[other]) <= BAND * largest:
            return (
                f"has candidate {one} of score {scores[one]:.6g}, and not {other} of "
                f"{scores.get(other, math.nan):.6g}"
            )
    return None


def scored(spec: LayerSpec, batch: Batch, frame: IndexFrame, token: int) -> list[dict[int, float]]:
    """Return the scores of the candidates of a step's token, for each of its choices."""
    indexer, table = spec.indexer, batch.block_table
    assert indexer is not None and table is not None
    index, position, length = (int(each[token]) for each in token_places(batch))
    entries = length // indexer.tokens_per_entry
    own = table[index, : -(-entries // frame.keys.shape[1])].long()
    pages = read_index_keys(indexer, frame.keys, own, torch.float64)
    keys = pages.flatten(0, 1)[:entries].cpu()
    weights = None if frame.weights is None else frame.weights[token]
    query = frame.query[token]
    if frame.within is None:
        return candidates(indexer, query, keys, position, weights)
    each = frame.within[token].expand(frame.out.shape[1], -1).tolist()
    return [
        candidates(indexer, query, keys, position, weights, within)[at]
        for at, within in enumerate(each)
    ]


def indexed(spec: LayerSpec, batch: Batch, frame: IndexFrame) -> Tensor:
    """Return the choice of a layer's indexer, int32 like `frame.out`, on the host."""
    assert spec.indexer is not None
    ids = torch.full(frame.out.shape, -1, dtype=torch.int32, device="cpu")
    for token, position in enumerate(token_places(batch)[1].tolist()):
        for at, scores in enumerate(scored(spec, batch, frame, token)):
            choice = choose(spec.indexer, scores, position)
            ids[token, at, : len(choice)] = torch.tensor(choice, dtype=torch.int32, device="cpu")
    return ids


def _at(stored: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
    if stored.dtype.itemsize > 1:
        return stored[place]
    return stored.view(torch.uint8)[place].view(stored.dtype)
