"""Which pages does a decode read? Quest's choice, by bounds of each page's keys, as a reference.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (2024): a page's
score is the largest product that the query could have with a key between the page's least and greatest
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_bounds(keys: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return each page's least and greatest keys by element, (pages, num_kv_heads, head_size) each.

    `keys` (length, num_kv_heads, head_size): one sequence's; its last page may be short.
    """
    pages = keys.split(page_size)
    low, high = (torch.stack([f(page, 0) for page in pages]) for f in (torch.amin, torch.amax))
    return low, high


def page_scores(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return an upper bound of each page's products, (num_heads, pages), in the bounds' dtype.

    `query` (num_heads, head_size): one token's; `low`, `high`: `page_bounds`.
    """
    group = query.shape[0] // low.shape[1]
    low, high = (bound.repeat_interleave(group, 1).transpose(0, 1) for bound in (low, high))
    return torch.maximum(query[:, None] * low, query[:, None] * high).sum(-1)


def choose_pages(scores: Tensor, count: int) -> list[int]:
    """Return the `count` pages of the highest scores and the last, in order: one choice for all heads.

    `scores` (num_heads, pages): the highest of any head counts. Quest's own choice is by head; a
    `BlockSparseMask` has one for a sequence.
    """
    best = scores.amax(0)
    best[-1] = torch.inf  # the newest token's own page
    chosen = best.topk(min(count, len(best))).indices
    return sorted(int(page) for page in chosen)
