"""Which pages does a decode read? Quest's choice, by bounds of each page's keys, as a reference.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (2024): a page's
score is the largest product that the query could have with a key between the page's least and greatest
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.errors import BatchError, shown
from polyattn.runtime.inputs import bad_input, check_is_tensor


def page_bounds(keys: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return each page's least and greatest keys by element, (pages, num_kv_heads, head_size) each.

    Args:
        keys: (length, num_kv_heads, head_size), one sequence's; its last page may be short.
        page_size: tokens in a page.

    Returns:
        The least and the greatest keys, each (pages, num_kv_heads, head_size).

    Raises:
        BatchError: `keys` isn't such a tensor, or `page_size` isn't positive.

    Examples:
        >>> low, high = page_bounds(torch.arange(4.0).view(4, 1, 1), page_size=2)
        >>> low.flatten().tolist(), high.flatten().tolist()
        ([0.0, 2.0], [1.0, 3.0])

    """
    check_is_tensor("keys", keys)
    if keys.dim() != 3 or not len(keys):
        raise bad_input("keys", keys, ("length from 1", "num_kv_heads", "head_size"))
    _check_count("page_size", page_size)
    pages = keys.split(page_size)
    low, high = (torch.stack([f(page, 0) for page in pages]) for f in (torch.amin, torch.amax))
    return low, high


def page_scores(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return an upper bound of each page's products, (num_heads, pages), in the bounds' dtype.

    Args:
        query: (num_heads, head_size), one token's.
        low: what `page_bounds` returned first.
        high: what it returned second.

    Returns:
        (num_heads, pages), in the bounds' dtype.

    Raises:
        BatchError: shapes don't fit one another.

    Examples:
        >>> low, high = page_bounds(torch.arange(4.0).view(4, 1, 1), page_size=2)
        >>> page_scores(torch.ones(1, 1), low, high)
        tensor([[1., 3.]])

    """
    for name, given in (("query", query), ("low", low), ("high", high)):
        check_is_tensor(name, given)
    if low.dim() != 3:
        raise bad_input("low", low, ("pages", "num_kv_heads", "head_size"))
    if high.shape != low.shape:
        raise bad_input("high", high, tuple(low.shape))
    _, heads, size = low.shape
    if query.dim() != 2 or query.shape[1] != size or query.shape[0] % heads:
        raise bad_input("query", query, (f"a multiple of {heads}", size))
    group = query.shape[0] // low.shape[1]
    low, high = (bound.repeat_interleave(group, 1).transpose(0, 1) for bound in (low, high))
    return torch.maximum(query[:, None] * low, query[:, None] * high).sum(-1)


def choose_pages(scores: Tensor, count: int) -> list[int]:
    """Return the `count` pages of the highest scores and the last, in order: one choice for all heads.

    Quest's own choice is by head; a `BlockSparseMask` has one for a sequence.

    Args:
        scores: (num_heads, pages); the highest of any head counts.
        count: pages to choose, 1 or more.

    Returns:
        The pages' indices, ascending.

    Raises:
        BatchError: `scores` isn't such a tensor, or `count` isn't positive.

    Examples:
        >>> choose_pages(torch.tensor([[0.1, 0.9, 0.2, 0.3]]), count=2)
        [1, 3]

    """
    check_is_tensor("scores", scores)
    if scores.dim() != 2 or not scores.numel():
        raise bad_input("scores", scores, ("num_heads from 1", "pages from 1"))
    _check_count("count", count)
    best = scores.amax(0)
    best[-1] = torch.inf  # the newest token's own page
    chosen = best.topk(min(count, len(best))).indices
    return sorted(int(page) for page in chosen)


def _check_count(name: str, given: int) -> None:
    if type(given) is not int or given < 1:
        raise BatchError(f"{name}={shown(given)} must be a positive integer")
