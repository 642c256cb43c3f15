"""How do the ranks' states become one? One all-gather, or one all-to-all by heads, then the merge op.

Every rank merges the same states in the order of the ranks, so that all have the same bits. A
learned sink joins the softmax once, after the last of them.
"""

from __future__ import annotations

from typing import Any

import torch
from polyattn import LayerGroup
from polyattn.host import MergeBackend
from torch import Tensor

from polyattn_context_parallel.ranks import ContextParallel

ALIGNED = 16
"""Bytes to whose multiple an output is padded: where kernels may write and the LSEs begin."""


class Merging:
    """One rank's state, all ranks' and their merged one; buffers are kept from step to step.

    `by_heads`: each rank gets only its own heads, `num_heads / size` of them in order.
    """

    def __init__(self, group: LayerGroup, context: ContextParallel, by_heads: bool):
        self.context, self.by_heads = context, by_heads
        self.merge = group.backend("merge", MergeBackend)
        self._kept: dict[Any, _Buffers] = {}
        self._now: _Buffers

    def take(self, like: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return where this rank's state goes: output (tokens, heads, width), LSE (tokens, heads).

        `like`: the query, whose rows, heads, dtype and device they have.
        """
        key = (*like.shape[:2], width, like.dtype, like.device)
        buffers = self._kept.get(key)
        if buffers is None:
            self._kept.clear()  # buffers of the last shape, not of every one there ever was
            heads = like.shape[1] // (self.context.size if self.by_heads else 1)
            buffers = self._kept[key] = _Buffers(like, width, heads, self.context.size)
        self._now = buffers
        return buffers.out, buffers.lse

    def merged(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Merge what `take` gave, written by now, with the other ranks'.

        `sinks` (heads,) float32: learned sinks. Returns the output in the layer's dtype and the
        LSE, float32.
        """
        kept, rank = self._now, self.context.rank
        if self.by_heads:
            kept.split_by_heads()
            self.context.all_to_all(kept.received, kept.sent)
        else:
            self.context.all_gather(kept.received, kept.sent[0])
        total, total_lse = kept.total, kept.total_lse
        for index, (part, part_lse) in enumerate(kept.parts):
            if index == 0:
                total.copy_(part)
                total_lse.copy_(part_lse)
            else:
                self.merge.run(total, total_lse, part, part_lse)
        if sinks is not None:
            heads = total.shape[1]
            mine = sinks[rank * heads : (rank + 1) * heads] if self.by_heads else sinks
            add_sink(total, total_lse, mine)
        return total.to(kept.out.dtype, copy=True), total_lse.to(torch.float32, copy=True)


def add_sink(total: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a learned sink join the softmax, in place; beside no key at all it counts for nothing."""
    sinks = sinks.to(lse.dtype)
    total.mul_(torch.sigmoid(lse - sinks)[..., None])
    torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks), out=lse)


class _Buffers:
    """`sent` uint8 (1 or size, bytes), `received` (size, bytes): outputs, then LSEs, by row."""

    def __init__(self, like: Tensor, width: int, heads: int, size: int):
        tokens, dtype = like.shape[0], like.dtype
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        shape, rows = (tokens, heads, width), 1 if heads == like.shape[1] else size

        def views(row: Tensor) -> tuple[Tensor, Tensor]:
            out = row[: tokens * heads * width * dtype.itemsize].view(dtype).view(shape)
            return out, row[start:].view(precise).view(tokens, heads)

        start = -(-tokens * heads * width * dtype.itemsize // ALIGNED) * ALIGNED
        length = -(-(start + tokens * heads * precise.itemsize) // ALIGNED) * ALIGNED
        # What is padding is sent too, so it is written once.
        self.sent = torch.zeros(rows, length, dtype=torch.uint8, device=like.device)
        self.received = torch.zeros(size, length, dtype=torch.uint8, device=like.device)
        end = start + tokens * heads * precise.itemsize
        self.parts = [views(row[:end]) for row in self.received]
        self.to_send = [views(row[:end]) for row in self.sent]
        self.out, self.lse = self.to_send[0]
        if rows > 1:
            self.out = like.new_empty(tokens, like.shape[1], width)
            self.lse = like.new_empty(like.shape[:2], dtype=precise)
        self.total = like.new_empty(shape, dtype=precise)
        self.total_lse = like.new_empty(shape[:2], dtype=precise)

    def split_by_heads(self) -> None:
        heads = self.total.shape[1]
        for index, (out, lse) in enumerate(self.to_send):
            mine = slice(index * heads, (index + 1) * heads)
            out.copy_(self.out[:, mine])
            lse.copy_(self.lse[:, mine])
