"""The kernel side of the plugin; imported only when EXAMPLE_ATTN is chosen."""

from __future__ import annotations

from typing import ClassVar

import torch
from polyattn.kernel import AttentionBackend, KVCache, LayerParams, Plan
from torch import Tensor


class ExampleAttention(AttentionBackend):
    """Gathers each sequence's keys and values and attends in float32, prefill and decode alike."""

    name: ClassVar[str] = "EXAMPLE_ATTN"

    def run(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert (
            cache is not None
        )  # only cached layers are claimed; it holds `key` and `value` already
        batch, ratio = plan.batch, self.spec.gqa_ratio
        assert batch.block_table is not None
        for index, length in enumerate(batch.lens):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            blocks = batch.block_table[index, : -(-length // cache.block_size)].long()
            keys = cache.key[blocks].flatten(0, 1)[:length].float().repeat_interleave(ratio, 1)
            values = cache.value[blocks].flatten(0, 1)[:length].float().repeat_interleave(ratio, 1)
            scores = torch.einsum("qhd,khd->qhk", query[rows].float(), keys) * self.spec.scale
            position = torch.arange(length - batch.query_lens[index], length)[:, None, None]
            distance = position - torch.arange(length)
            hidden = distance < 0
            if self.spec.sliding_window is not None:
                hidden = hidden | (distance >= self.spec.sliding_window)
            if length:
                scores.masked_fill_(hidden, -torch.inf)
            found = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - found.nan_to_num(neginf=0.0)[..., None])
            out[rows] = torch.einsum("qhk,khd->qhd", weights, values).to(out.dtype)
            if lse is not None:
                lse[rows] = found
