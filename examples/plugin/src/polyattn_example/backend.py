"""The kernel side of the plugin; imported only when EXAMPLE_ATTN is chosen."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import AttentionBackend, Frame, Plan


class ExampleAttention(AttentionBackend):
    """Gathers each sequence's keys and values and attends in float32, prefill and decode alike."""

    name: ClassVar[str] = "EXAMPLE_ATTN"

    def run(self, plan: Plan, frame: Frame) -> None:
        cache = frame.cache
        assert cache is not None  # only cached layers are claimed; it holds the new keys already
        batch, ratio = plan.batch, self.spec.gqa_ratio
        assert batch.block_table is not None
        for index, length in enumerate(batch.lens):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            blocks = batch.block_table[index, : -(-length // cache.block_size)].long()
            keys = cache.key[blocks].flatten(0, 1)[:length].float().repeat_interleave(ratio, 1)
            values = cache.value[blocks].flatten(0, 1)[:length].float().repeat_interleave(ratio, 1)
            scores = torch.einsum("qhd,khd->qhk", frame.query[rows].float(), keys) * self.spec.scale
            position = torch.arange(length - batch.query_lens[index], length)[:, None, None]
            distance = position - torch.arange(length)
            hidden = distance < 0
            if self.spec.sliding_window is not None:
                hidden = hidden | (distance >= self.spec.sliding_window)
            if length:
                scores.masked_fill_(hidden, -torch.inf)
            found = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - found.nan_to_num(neginf=0.0)[..., None])
            frame.out[rows] = torch.einsum("qhk,khd->qhd", weights, values).to(frame.out.dtype)
            if frame.lse is not None:
                frame.lse[rows] = found
