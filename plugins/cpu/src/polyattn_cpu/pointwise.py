"""A variant's functions and a step's mask in TORCH_SDPA, which computes the scores itself."""

from __future__ import annotations

import torch
from polyattn.kernel import AttentionState, Batch, LayerParams, LayerSpec, Pointwise
from torch import Tensor

from polyattn_cpu.gather import Span


class Places:
    """The positions of a block of one sequence's queries, which the functions take."""

    def __init__(
        self, spec: LayerSpec, batch: Batch, index: int, params: LayerParams, device: torch.device
    ):
        self.heads = torch.arange(spec.num_heads, device=device)[:, None, None]
        self.seq = torch.tensor(batch.seq_ids[index], device=device)
        self.inputs = {**batch.inputs, **params.inputs}

    def of(self, first: int, count: int, span: Span) -> tuple[Tensor, ...]:
        """Return b, h, q_idx, kv_idx of (heads, count, keys) scores."""
        device = self.heads.device
        query = torch.arange(first, first + count, device=device)[:, None]
        return self.seq, self.heads, query, span.positions().to(device)


def changed(
    pointwise: Pointwise, places: Places, scores: Tensor, visible: Tensor, span: Span, first: int
) -> tuple[Tensor, Tensor]:
    """Return the changed scores (heads, queries, keys), and a mask that broadcasts to them."""
    at = places.of(first, scores.shape[1], span)
    scores = pointwise.score(scores, at, places.inputs)
    seen = pointwise.visible(at, places.inputs)
    return scores, visible if seen is None else visible & seen


def summed(scores: Tensor, values: Tensor) -> AttentionState:
    """Return the sum of values by weights (heads, queries, keys) as they are; values by KV head."""
    heads, count, keys = scores.shape
    folded = scores.reshape(values.shape[0], -1, keys)
    output = torch.bmm(folded, values.to(scores.dtype)).view(heads, count, -1)
    return AttentionState(output.transpose(0, 1), scores.new_zeros(count, heads))
