"""Sparse policies in a few lines of torch each, over any backend that serves sparse layers.

A policy returns a choice, int32 (num_tokens, scope, K) with -1 for none, and `SparseAttention` attends
to it. Only NSA calls layers itself: it adds three of them. Shapes: `query` (num_tokens, num_heads,
head_size); `cache` holds the step's tokens too. Run it: python examples/sparse_policies.py
"""

from __future__ import annotations

import torch
from polyattn import Batch, KVCache, LayerSpec, SparseAttention, SparseSpec
from torch import Tensor


def places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each token's sequence and its position there, int64 (num_tokens,)."""
    tokens = torch.arange(batch.num_tokens, device=batch.device)
    ends = batch.query_start_loc[1:].long()
    seqs = torch.searchsorted(ends, tokens, right=True)
    return seqs, tokens - ends[seqs] + batch.seq_lens[seqs]


def blocks_of(cache: KVCache, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return keys (num_seqs, blocks, block_size, kv_heads, head_size) and which are there, bool."""
    table = batch.block_table.long().clamp(0, cache.num_blocks - 1)
    place = torch.arange(table.shape[1] * cache.block_size, device=table.device)
    there = (place < batch.seq_lens[:, None]).view(len(table), -1, cache.block_size)
    return cache.key[table].float().masked_fill(~there[..., None, None], 0), there


def best(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return the ids of the largest scores (..., n) that are seen; of equal ones the smallest ids."""
    scores = scores.masked_fill(~seen, -torch.inf)
    order = scores.sort(stable=True, dim=-1, descending=True).indices[..., :count]
    order = order.masked_fill(~seen.expand_as(scores).gather(-1, order), -1)
    return torch.nn.functional.pad(order, (0, count - order.shape[-1]), value=-1).int()


def streaming_llm(batch: Batch, first: int, window: int) -> Tensor:
    """Attention sinks and a window (Xiao et al., 2023): scope "all", granularity 1."""
    _, position = places(batch)
    near = position[:, None] - torch.arange(window, device=batch.device)
    kept = torch.arange(first, device=batch.device).expand(len(near), -1)
    ids = torch.cat([kept, near.masked_fill(near < first, -1)], 1)
    return ids.masked_fill(ids > position[:, None], -1)[:, None].int()


def quest(query: Tensor, cache: KVCache, batch: Batch, pages: int) -> Tensor:
    """Bounds of a page's scores (Tang et al., 2024), for decodes: scope "head", a page's granularity."""
    keys, there = blocks_of(cache, batch)
    seqs, position = places(batch)
    hidden = ~there[..., None, None]
    low = keys.masked_fill(hidden, torch.inf).amin(2)
    high = keys.masked_fill(hidden, -torch.inf).amax(2)
    low, high = (x.repeat_interleave(query.shape[1] // x.shape[2], 2)[seqs] for x in (low, high))
    q = query.float()[:, None]
    bound = torch.maximum(q * low, q * high).sum(-1).transpose(1, 2)
    page = torch.arange(keys.shape[1], device=batch.device)
    return best(bound, (page * cache.block_size <= position[:, None])[:, None], pages)


def moba(query: Tensor, cache: KVCache, batch: Batch, blocks: int) -> Tensor:
    """Past blocks by mean key, and the own one (Lu et al., 2025): scope "head", a block's granularity."""
    keys, there = blocks_of(cache, batch)
    seqs, position = places(batch)
    mean = keys.sum(2) / there.sum(2).clamp(min=1)[..., None, None]
    mean = mean.repeat_interleave(query.shape[1] // mean.shape[2], 2)
    scores = torch.einsum("thd,tnhd->thn", query.float(), mean[seqs])
    own = (position // cache.block_size)[:, None, None]
    block = torch.arange(keys.shape[1], device=batch.device)
    return best(scores.masked_fill(block == own, torch.inf), block <= own, blocks)


def snapkv(
    query: Tensor, cache: KVCache, batch: Batch, budget: int, window: int, kernel: int = 7
) -> Tensor:
    """What the prompt's last `window` queries look at (Li et al., 2024): scope "kv_head", granularity 1.

    `query`, `batch`: of the last `window` tokens of each prompt. Returns (num_seqs, kv_heads, budget),
    `window` newest positions included; a decode attends to them and to what came after the prompt.
    """
    keys, there = blocks_of(cache, batch)
    keys, there = keys.flatten(1, 2), there.flatten(1, 2)
    q = query.float().view(batch.num_seqs, window, keys.shape[2], -1, query.shape[2])
    _, position = places(batch)
    place = torch.arange(keys.shape[1], device=batch.device)
    hidden = place > position.view(-1, window)[..., None]
    scores = torch.einsum("swhgd,snhd->shgwn", q, keys) * query.shape[2] ** -0.5
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    prefix = there & (place < batch.seq_lens[:, None] - window)
    votes = weights.sum(3).mean(2).masked_fill(~prefix[:, None], 0)
    votes = torch.nn.functional.max_pool1d(votes, kernel, stride=1, padding=kernel // 2)
    chosen = best(votes, prefix[:, None], budget - window)
    newest = position.view(-1, 1, window).expand(-1, keys.shape[2], -1)
    return torch.cat([chosen, newest.int()], 2)


def nsa(
    layers: tuple[SparseAttention, SparseAttention, SparseAttention],
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor,
    caches: tuple[KVCache, KVCache], batches: tuple[Batch, Batch], blocks: int, window: int,
) -> Tensor:  # fmt: skip
    """Compressed, selected and near keys, each times a gate (Yuan et al., 2025); means compress.

    `layers`: over entries of a block's mean key and value, over chosen blocks (scope "kv_head"), over
    the window. `caches`, `batches`: of the tokens and of the entries. `gates` (3, num_tokens, num_heads).
    """
    (cache, entries), (batch, of_entries) = caches, batches
    near = layers[2](query, key, value, cache, batch, choice=streaming_llm(batch, 0, window))
    seqs, position = places(batch)
    done = (position + 1) // cache.block_size  # complete blocks
    means, _ = blocks_of(entries, of_entries)
    means = means.flatten(1, 2)[seqs]
    ids = torch.arange(means.shape[1], device=batch.device)
    seen = ids < done[:, None]
    coarse = best(torch.zeros(seen.shape, device=batch.device), seen, means.shape[1])
    outer = layers[0](query, None, None, entries, of_entries, choice=coarse[:, None])
    q = query.float().unflatten(1, (means.shape[2], -1))
    scores = torch.einsum("thgd,tnhd->thgn", q, means) * query.shape[2] ** -0.5
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num().sum(2)
    own = (position // cache.block_size)[:, None]
    forced = ((ids == 0) | (ids == own) | (ids == own - 1))[:, None]
    choice = best(weights.masked_fill(forced, torch.inf), (ids <= own)[:, None], blocks)
    selected = layers[1](query, None, None, cache, batch, choice=choice)
    return sum(
        gate[..., None] * out for gate, out in zip(gates, (outer, selected, near), strict=True)
    )


def main() -> None:
    """Decode a token with Quest's four best pages of 16 keys."""
    spec = LayerSpec(
        kind="sparse", num_heads=8, num_kv_heads=2, head_size=64, dtype="float32", block_size=16,
        sparse=SparseSpec(budget=4, granularity=16, scope="head"),
    )  # fmt: skip
    layer = SparseAttention(spec)
    cache = layer.group.allocate_cache(num_blocks=16)
    cache.key.normal_()
    cache.value.normal_()
    batch = Batch.from_lens([1], [200], torch.arange(13).view(1, -1).int(), 16)
    query, key, value = torch.randn(1, 8, 64), torch.randn(1, 2, 64), torch.randn(1, 2, 64)
    cache.key[12, 7], cache.value[12, 7] = key[0], value[0]  # Quest reads the newest key as well
    choice = quest(query, cache, batch, 4)
    out = layer(query, key, value, cache, batch, choice=choice)
    print(f"each head's pages: {choice[0].tolist()}; output {tuple(out.shape)}")


if __name__ == "__main__":
    main()
