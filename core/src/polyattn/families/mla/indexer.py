"""Which tokens does a sparse MLA layer attend to? DeepSeek-V3.2's lightning indexer.

`I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])` (DeepSeek-AI, 2025); a query attends to the `topk` keys
with the largest index logits among those that it may see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.step.batch import Batch

ROWS = 256
"""Queries whose logits are held at a time."""


def index_logits(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return float32 logits (queries, keys) of one sequence.

    `query` (queries, index heads, index head size), `weights` (queries, index heads), `keys`
    (keys, index head size). Heads are summed one at a time: all at once would hold
    (queries, heads, keys).
    """
    total = torch.zeros(len(query), len(keys), dtype=torch.float32, device=query.device)
    for head in range(query.shape[1]):
        scores = (query[:, head] @ keys.T).float()
        total += weights[:, head, None].float() * scores.relu_()
    return total


def choose_tokens(
    query: Tensor, weights: Tensor, keys: Tensor, batch: Batch, topk: int, block_size: int
) -> Tensor:
    """Return int32 (num_tokens, topk) positions for `LatentAttention`, -1 where there are fewer.

    Args:
        query: (num_tokens, index heads, index head size).
        weights: (num_tokens, index heads).
        keys: (num_blocks, block_size, index head size), the layer's paged cache of index keys, written
            up to each sequence's length.
        batch: the step, with its block table.
        topk: tokens to choose for each query token.
        block_size: tokens in a block of `keys`.

    Returns:
        Positions within each token's sequence, on the query's device.

    Raises:
        BatchError: shapes don't fit one another, or the batch has no block table.

    Examples:
        >>> table = torch.zeros(1, 1, dtype=torch.int32)
        >>> batch = Batch.from_lens([1], [3], table, block_size=4)
        >>> keys = torch.tensor([5.0, 1.0, 7.0, 0.0]).view(1, 4, 1)
        >>> choose_tokens(torch.ones(1, 1, 1), torch.ones(1, 1), keys, batch, 2, 4).sort().values
        tensor([[0, 2]], dtype=torch.int32)

    """
    if batch.block_table is None:
        raise BatchError(
            "the batch has no block_table, and the index keys are in a paged cache: pass one"
        )
    if keys.dim() != 3 or keys.shape[1] != block_size or keys.shape[2] != query.shape[2]:
        raise BatchError(
            f"keys {tuple(keys.shape)} must be (num_blocks, {block_size}, {query.shape[2]})"
        )
    if not isinstance(topk, int) or topk <= 0:
        raise BatchError(f"topk={topk!r} must be a positive integer")
    chosen = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32, device=query.device)
    for index, length in enumerate(batch.lens):
        start, stop = batch.starts[index], batch.starts[index + 1]
        if start == stop or length == 0:
            continue
        blocks = batch.block_table[index, : -(-length // block_size)].long()
        rows = keys[blocks].reshape(-1, keys.shape[2])[:length]
        for first in range(start, stop, ROWS):
            last = min(first + ROWS, stop)
            logits = index_logits(query[first:last], weights[first:last], rows)
            position = length - stop + torch.arange(first, last, device=query.device)
            unseen = torch.arange(length, device=query.device) > position[:, None]
            logits.masked_fill_(unseen, -torch.inf)
            values, found = logits.topk(min(topk, length), dim=1)
            found = found.int().masked_fill_(values == -torch.inf, -1)
            chosen[first:last, : found.shape[1]] = found
    return chosen
