"""FLEX_ATTENTION: torch's flex_attention, compiled, over the whole batch in one call.

The batch's sequences lie one after another in one long row; the mask lets a query see only keys of
its own sequence. Lengths are padded to multiples of 128 so that few shapes are ever compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from polyattn import AttentionBackend, Batch, KVCache, LayerParams
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

PAD = 128
RECOMPILES = 256
"""Distinct layers and shapes in one process; torch's own limit of 8 is meant for one function."""

_compiled: Callable[..., Any] | None = None


def compiled_flex() -> Callable[..., Any]:
    """Return the compiled kernel, shared by all layers so that equal ones compile once."""
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=False)
    return _compiled


class FlexAttention(AttentionBackend):
    """Masks and score changes are functions that torch compiles into the kernel."""

    name: ClassVar[str] = "FLEX_ATTENTION"

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        device = batch.device
        query_lens, lens = torch.tensor(batch.query_lens), torch.tensor(batch.lens)
        self.num_keys = int(lens.sum())
        rows, keys = _padded(batch.num_tokens), _padded(self.num_keys)
        seq_q, at_q = _rows(query_lens, rows)
        self.seq_k, self.at_k = _rows(lens, keys)
        context = torch.cat([lens - query_lens, torch.zeros(1, dtype=torch.int64)])
        self.position_q = (at_q + context[seq_q.clamp(max=len(lens))]).to(device)
        self.seq_q = seq_q.to(device)
        self.position_k = self.at_k.to(device)
        own = self._sequence_mask(self.seq_q, self.seq_k.to(device))
        self.block_mask = create_block_mask(own, 1, 1, rows, keys, device=str(device))
        self._slots: Tensor | None = None

    def _sequence_mask(self, seq_q: Tensor, seq_k: Tensor) -> Callable[..., Tensor]:
        spec, position_q, position_k = self.spec, self.position_q, self.position_k
        pad = self.batch.num_seqs

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            mask = (seq_q[q] == seq_k[k]) & (seq_k[k] < pad)
            at, key = position_q[q], position_k[k]
            if spec.causal:
                mask = mask & (key <= at)
            if spec.sliding_window is not None:
                near = key > at - spec.sliding_window
                if not spec.causal:
                    near = near & (key < at + spec.sliding_window)
                mask = mask & (near | (key < spec.sink_tokens))
            if spec.chunk_size is not None:
                mask = mask & (key // spec.chunk_size == at // spec.chunk_size)
            return mask

        return visible

    def _score(self, params: LayerParams) -> Callable[..., Tensor] | None:
        cap, slopes = self.spec.logit_soft_cap, params.alibi_slopes
        if cap is None and slopes is None:
            return None
        position_q, position_k = self.position_q, self.position_k

        def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                score = score + slopes[h] * (position_k[k] - position_q[q])
            return score

        return change

    def forward_mixed(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if cache is not None:
            key, value = self._gather(cache)
        assert key is not None and value is not None
        rows, keys = len(self.position_q), len(self.position_k)
        inputs = (_row(query, rows), _row(key, keys), _row(value, keys))
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            result = compiled_flex()(
                *inputs,
                score_mod=self._score(params),
                block_mask=self.block_mask,
                scale=self.spec.scale,
                enable_gqa=self.spec.gqa_ratio > 1,
            )
        out.copy_(result[0].transpose(0, 1)[: self.batch.num_tokens])

    def forward_prefill(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.forward_mixed(query, key, value, cache, params, out, lse)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.forward_mixed(query, None, None, cache, params, out, lse)

    def _gather(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return all sequences' cached keys and values one after another."""
        size = cache.block_size
        if self._slots is None:
            assert self.batch.block_table is not None
            seq, at = self.seq_k[: self.num_keys], self.at_k[: self.num_keys]
            seq, at = seq.to(cache.key.device), at.to(cache.key.device)
            self._slots = self.batch.block_table[seq, at // size].long() * size + at % size
        block, offset = self._slots // size, self._slots % size
        return cache.key[block, offset], cache.value[block, offset]


def _padded(size: int) -> int:
    return max(-(-size // PAD), 1) * PAD


def _rows(lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return each row's sequence (their number where it is padding) and its place in it."""
    seq = torch.full((total,), len(lens), dtype=torch.int64)
    used = int(lens.sum())
    seq[:used] = torch.repeat_interleave(torch.arange(len(lens)), lens)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    return seq, torch.arange(total) - starts[seq]


def _row(tensor: Tensor, length: int) -> Tensor:
    """Return (1, heads, length, size), zeros behind."""
    padding = tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding]).transpose(0, 1)[None]
