"""Gradients where no kernel has a backward: the formula's, one sequence at a time.

As FlashAttention's paper writes them (Dao et al., 2022, appendix B.2), with the weights whole: memory of
queries x keys. They are torch's own operators, so gradients of gradients follow (`create_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.families.attention.reference import visible
from polyattn.runtime.inputs import own_precision
from polyattn.spec.layer import LayerSpec

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Sequences = Sequence[tuple[int, int, int, int]]
"""For each sequence: its first query, its queries, its first key, its keys."""


class Recomputed(torch.autograd.Function):
    """`forward(query, key, value)` with the formula's gradients; none flows through the LSE."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, spec: LayerSpec,
        sequences: Sequences, run: Forward,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(query, key, value)
        ctx.slopes, ctx.spec, ctx.sequences = slopes, spec, sequences
        out, lse = run(query.detach(), key.detach(), value.detach())
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors
        grads = gradients(ctx.spec, query, key, value, d_out, ctx.sequences, ctx.slopes)
        return *grads, None, None, None, None


def gradients(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    d_out: Tensor,
    sequences: Sequences,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of packed queries, keys and values, (tokens, heads, size) each."""
    dq, dk, dv = (torch.zeros_like(t) for t in (query, key, value))
    for first, count, start, length in sequences:
        rows, seen = slice(first, first + count), slice(start, start + length)
        with own_precision(query.device.type):
            own = _of_sequence(spec, query[rows], key[seen], value[seen], d_out[rows], slopes)
        for total, at, grad in zip((dq, dk, dv), (rows, seen, seen), own, strict=True):
            total[at] += grad.to(total.dtype)
    return dq, dk, dv


def _of_sequence(
    spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, slopes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, d_out = query.to(dtype), d_out.to(dtype)
    k, v = (t.to(dtype).repeat_interleave(spec.gqa_ratio, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    slope: float | Tensor = 1.0  # of the capped scores by the uncapped ones
    if spec.logit_soft_cap is not None:
        capped = torch.tanh(scores / spec.logit_soft_cap)
        scores, slope = spec.logit_soft_cap * capped, 1 - capped * capped
    queries, keys = query.shape[0], key.shape[0]
    if slopes is not None:
        at = torch.arange(queries, device=query.device)[:, None] + keys - queries
        distance = torch.arange(keys, device=query.device) - at
        scores = scores + slopes.to(dtype)[:, None, None] * distance
    mask = visible(spec, queries, keys).to(query.device)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    d_weights = torch.einsum("qhd,khd->hqk", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    d_scores = d_scores * slope * spec.scale
    grouped = (spec.num_kv_heads, spec.gqa_ratio)
    return (
        torch.einsum("hqk,khd->qhd", d_scores, k),
        torch.einsum("hqk,qhd->khd", d_scores, q).unflatten(1, grouped).sum(2),
        torch.einsum("hqk,qhd->khd", weights, d_out).unflatten(1, grouped).sum(2),
    )
