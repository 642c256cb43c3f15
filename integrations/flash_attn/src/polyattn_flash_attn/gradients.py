"""Gradients by torch: the backward computes the formula again, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from polyattn import LayerSpec
from polyattn.families.attention.reference import visible
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Recomputed(torch.autograd.Function):
    """`forward(query, key, value)` with the formula's gradients; none flows through the LSE."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, spec: LayerSpec,
        lens: list[tuple[int, int, int, int]], run: Forward,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(query, key, value)
        ctx.slopes, ctx.spec, ctx.lens = slopes, spec, lens
        out, lse = run(query.detach(), key.detach(), value.detach())
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors
        found = [torch.zeros_like(t) for t in (query, key, value)]
        for first, count, start, length in ctx.lens:
            rows, seen = slice(first, first + count), slice(start, start + length)
            own = [t[s].detach().requires_grad_() for t, s in
                   ((query, rows), (key, seen), (value, seen))]  # fmt: skip
            with torch.enable_grad():
                q, k, v = own
                out = formula(ctx.spec, q, k, v, ctx.slopes)
            for total, at, grad in zip(
                found, (rows, seen, seen), torch.autograd.grad(out, own, d_out[rows]), strict=True
            ):
                total[at] += grad
        return *found, None, None, None, None


def formula(
    spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None
) -> Tensor:
    """Attend for one sequence in plain torch, in float32 at least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads = [t.to(dtype).repeat_interleave(spec.gqa_ratio, 1) for t in (key, value)]
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), heads[0]) * spec.scale
    if spec.logit_soft_cap is not None:
        scores = spec.logit_soft_cap * torch.tanh(scores / spec.logit_soft_cap)
    queries, keys = query.shape[0], key.shape[0]
    if slopes is not None:
        at = torch.arange(queries, device=query.device)[:, None] + keys - queries
        distance = torch.arange(keys, device=query.device) - at
        scores = scores + slopes.to(dtype)[:, None, None] * distance
    mask = visible(spec, queries, keys).to(query.device)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, heads[1]).to(query.dtype)
