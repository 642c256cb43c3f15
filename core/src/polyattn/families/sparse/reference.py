"""What is the right answer for a sparse layer? One token at a time: what it chooses, what it reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyattn.families.attention.reference import exact
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
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
    A head's sink is part of its LSE; without keys the output is 0 and the LSE -inf, whatever the sink.
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
    query, table, rows = (
        query.detach().to("cpu", dtype),
        batch.block_table.tolist(),
        choice.tolist(),
    )
    output = torch.zeros(batch.num_tokens, spec.num_heads, spec.v_head_size, dtype=dtype)
    lse = torch.full((batch.num_tokens, spec.num_heads), -torch.inf, dtype=dtype)
    every = torch.arange(spec.num_heads).split(
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
                    dtype=torch.int64, device=cache.key.device,
                )  # fmt: skip
                of_key = heads // spec.gqa_ratio
                place = slots // cache.block_size, slots % cache.block_size
                keys, values = (
                    exact(_at(stored, place), scale, dtype)[:, of_key].transpose(0, 1)
                    for stored, scale in (
                        (cache.key, params.k_scale), (cache.value, params.v_scale)
                    )
                )  # fmt: skip
                own = None if sinks is None else sinks[heads]
                output[token, heads], lse[token, heads] = attend(
                    spec, query[token, heads], keys, values, own
                )
    return output, lse


def choose(
    spec: IndexerSpec,
    query: Tensor,
    keys: Tensor,
    position: int,
    weights: Tensor | None = None,
    within: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[list[int]]:
    """Return one token's ids for each of its choices, the best first; the tail comes last.

    `query` (num_heads, head_size); `keys` (entries, head_size), its sequence's; `weights` (num_heads,);
    `within`: the blocks of entries that count.
    """
    query, keys = query.to("cpu", dtype), keys.to("cpu", dtype)
    m, entries = spec.tokens_per_entry, (position + 1) // spec.tokens_per_entry
    products = spec.scale * query @ keys[:entries].T
    if spec.activation == "relu":
        products = products.relu()
    if spec.fold == "weighted":
        assert weights is not None
        products = (weights.to("cpu", dtype) @ products)[None]
    elif spec.fold == "sum":
        products = products.sum(0, keepdim=True)
    candidates = -(-entries // spec.pool)
    count = spec.budget
    if isinstance(count, float):
        count = math.ceil(candidates * count - 1e-9)
    chosen = []
    for row in products:
        ranked = []
        for candidate in range(candidates):
            members = [
                entry
                for entry in range(candidate * spec.pool, min((candidate + 1) * spec.pool, entries))
                if within is None or spec.within is None or entry // spec.within in within
            ]
            if not members:
                continue
            score = max(float(row[entry]) for entry in members)
            forced = candidate < spec.forced_first or candidate >= candidates - spec.forced_last
            ranked.append((not forced, 0.0 if forced else -score, candidate))
        ids = [candidate for _, _, candidate in sorted(ranked)][:count]
        chosen.append(ids + ([entries] if spec.tail and (position + 1) % m else []))
    return chosen


def _at(stored: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
    if stored.dtype.itemsize > 1:
        return stored[place]
    return stored.view(torch.uint8)[place].view(stored.dtype)
