"""Attention as torch's `scaled_dot_product_attention` is called; one operator where it is compiled."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from polyattn.calls.dense import Count, attend_dense
from polyattn.calls.intervals import UnreadableMask
from polyattn.calls.ledger import Ledger
from polyattn.calls.masked import masked
from polyattn.calls.memo import remembered
from polyattn.calls.plans import CallOptions


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    needs_lse: bool = False,
    heads_first: bool = True,
    heads_out: bool = False,
    count: Count | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend as torch's `scaled_dot_product_attention` does.

    Args:
        query: (batch, heads, queries, size); without `heads_first` (batch, queries, heads, size).
        key: as `query`, with the KV heads and the keys.
        value: as `key`, with the values' size.
        mask: bool or floats (batch or 1, 1, queries or 1, keys), as `polyattn.attention` takes it, and
            instead of `is_causal`.
        is_causal: a causal mask aligned to the top left: the first query sees the first key alone.
        scale: of the scores; None: 1 / sqrt(size).
        logit_soft_cap: scores become cap * tanh(score / cap).
        sinks: float32 (heads,), learned sink logits.
        needs_lse: whether to return the LSE.
        heads_first: the order of heads and tokens in the inputs.
        heads_out: return views with the heads second.
        count: is called with the group that serves.

    Returns:
        The output (batch, queries, heads, v_size), and the LSE, float32 (batch, queries, heads),
        natural logarithm, if it is needed, else None.

    Raises:
        BatchError: shapes, dtypes or devices don't fit, or the mask isn't of a kind that is served.
        SelectionError: nothing serves such a layer.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 5, 64)
        >>> out, _ = sdpa(query, key, value, is_causal=True, heads_out=True)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> bool(torch.allclose(out, expected, atol=1e-5))
        True

    """
    seqlen = 2 if heads_first else 1
    queries, keys = query.shape[seqlen], key.shape[seqlen]
    if mask is None and is_causal and queries > keys:
        mask = _top_left(queries, keys, query.device)
    if mask is not None:
        options = _options(False, scale, logit_soft_cap, needs_lse)
        return masked(
            query, key, value, mask, options, heads_first=heads_first, heads_out=heads_out,
            sinks=sinks, count=count,
        )  # fmt: skip
    lens = None
    causal = is_causal and queries > 1
    if is_causal and keys != queries:  # keys beyond the queries are seen by none
        lens = (queries,) * len(query)
    options = _options(causal, scale, logit_soft_cap, needs_lse)
    return attend_dense(
        query, key, value, options, heads_first=heads_first, heads_out=heads_out, key_lens=lens,
        sinks=sinks, count=count,
    )  # fmt: skip


@lru_cache(maxsize=256)  # a hit takes half the time of making it
def _options(
    causal: bool, scale: float | None, soft_cap: float | None, needs_lse: bool
) -> CallOptions:
    return CallOptions(causal, scale, logit_soft_cap=soft_cap, needs_lse=needs_lse)


@remembered
def _top_left(queries: int, keys: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()[None, None]


# Masks are read on the host when it runs: Inductor leaves it out of the graphs that it captures.
@torch.library.custom_op("polyattn::sdpa", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def sdpa_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    scale: float | None,
    logit_soft_cap: float | None,
    host: str,
) -> Tensor:
    """`sdpa` as one operator of torch, so that compiled graphs don't break. It plans when it runs.

    Args:
        query: as `sdpa` takes it, with heads first, and so are the other arguments.
        key: likewise.
        value: likewise.
        mask: likewise.
        sinks: likewise.
        is_causal: likewise.
        scale: likewise.
        logit_soft_cap: likewise.
        host: the name of the `Ledger` that counts the call.

    Returns:
        The output (batch, queries, heads, v_size).

    Raises:
        BatchError, SelectionError: as `sdpa`.

    """
    try:
        out, _ = sdpa(
            query, key, value, mask, is_causal=is_causal, scale=scale,
            logit_soft_cap=logit_soft_cap, sinks=sinks, count=Ledger.known[host].count,
        )  # fmt: skip
    except UnreadableMask as error:
        raise UnreadableMask(
            f"a compiled model has {error}, which the host's own attention would have to serve; compile "
            "it without polyattn's"
        ) from error
    return out


@sdpa_operator.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None,
    is_causal: bool, scale: float | None, logit_soft_cap: float | None, host: str,
) -> Tensor:  # fmt: skip
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[3])
