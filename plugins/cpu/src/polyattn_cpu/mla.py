"""TORCH_MLA: absorbed decode over the latent cache, and attention to chosen rows of it."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import (
    CacheFormat,
    Device,
    Frame,
    LayerSpec,
    Plan,
    SparseBackend,
    absorbed,
    decoded,
    raw,
)

from polyattn_cpu.sdpa import TorchSDPA

SPARSE_ELEMENTS = 1 << 24
"""Elements of gathered rows that are held at a time."""


class TorchMLA(TorchSDPA):
    """MQA whose one key is latent and rope key, and whose value is the key's first part."""

    name: ClassVar[str] = "TORCH_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)


class TorchSparseMLA(SparseBackend):
    """Attends each token to its chosen rows, a bounded number of gathered rows at a time."""

    name: ClassVar[str] = "TORCH_MLA_SPARSE"

    def run(self, plan: Plan, frame: Frame) -> None:
        query, cache, choice = frame.query, frame.cache, frame.choice
        assert cache is not None and choice is not None
        stored, form = cache.key, cache.format
        rank, formats = form.v_head_size, form.rows
        compute = torch.float64 if query.dtype == torch.float64 else torch.float32
        scale = frame.params.k_scale if stored.dtype.itemsize == 1 else 1.0
        # A product of several tokens may sum in another order than one token's.
        elements = 1 if self.spec.batch_invariant else SPARSE_ELEMENTS
        step = max(1, elements // (choice.shape[1] * stored.shape[3]))
        for start in range(0, len(query), step):
            part = slice(start, start + step)
            chosen = choice[part].long()
            unused = (chosen < 0)[:, :, None]
            chosen = chosen.clamp(min=0)
            rows = raw(stored)[chosen // cache.block_size, chosen % cache.block_size, 0]
            rows = rows.view(stored.dtype)
            if formats is not None:
                rows = decoded(rows, formats[0], form.head_size)
            rows = rows.to(compute).masked_fill(unused, 0.0)
            scores = query[part].to(compute) @ rows.transpose(1, 2) * (self.spec.scale * scale)
            scores = scores.masked_fill_(unused.transpose(1, 2), -torch.inf)
            total = torch.logsumexp(scores, dim=2)
            weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0)[..., None])
            frame.out[part] = weights @ rows[..., :rank] * scale
            if frame.lse is not None:
                frame.lse[part] = total
