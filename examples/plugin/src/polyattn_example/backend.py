"""The kernel side of the plugin; imported only when EXAMPLE_ATTN is chosen."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import AttentionBackend, Frame, Plan


class ExampleAttention(AttentionBackend):
    """Attends to each sequence's keys in float32, prefill and decode alike."""

    name: ClassVar[str] = "EXAMPLE_ATTN"

    def run(self, plan: Plan, frame: Frame) -> None:
        batch, cache, ratio = plan.batch, frame.cache, self.spec.gqa_ratio
        spec = self.spec_of(batch)
        for index, length in enumerate(batch.lens):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            if cache is None:  # the keys are given whole
                own = slice(batch.key_starts[index], batch.key_starts[index] + length)
                assert frame.key is not None and frame.value is not None
                keys, values = frame.key[own], frame.value[own]
            else:  # its pages hold the new keys already
                assert batch.block_table is not None
                blocks = batch.block_table[index, : -(-length // cache.block_size)].long()
                keys = cache.key[blocks].flatten(0, 1)[:length]
                values = cache.value[blocks].flatten(0, 1)[:length]
            keys, values = (x.float().repeat_interleave(ratio, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->qhk", frame.query[rows].float(), keys) * spec.scale
            places = torch.arange(length - batch.query_lens[index], length, device=keys.device)
            distance = places[:, None, None] - torch.arange(length, device=keys.device)
            hidden = distance < 0 if spec.causal else torch.zeros_like(distance, dtype=torch.bool)
            if spec.sliding_window is not None:
                hidden = hidden | (distance.abs() >= spec.sliding_window)
            if length:
                scores.masked_fill_(hidden, -torch.inf)
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
            frame.out[rows] = torch.einsum("qhk,khd->qhd", weights, values).to(frame.out.dtype)
            if frame.lse is not None:
                frame.lse[rows] = lse
