"""Merges the ranks' states: one all-gather, or one all-to-all by heads, then the merge op.

Every rank merges the same states in rank order, so all ranks get the same bits. A learned sink joins
the softmax once, after the last state.
"""

from __future__ import annotations

from typing import Any

import torch
from polyattn import LayerGroup
from polyattn.host import Frame, MergeBackend, Op, Rows, with_sinks
from torch import Tensor

from polyattn_context_parallel.ranks import ContextParallel

ALIGNED = 16
"""Outputs are padded to a multiple of these bytes, for kernels' alignment and the start of the LSEs."""


class Merging:
    """Merges a group's states. Buffers stay from step to step.

    `by_heads`: each rank gets only its own heads, `num_heads / size` of them in order.
    """

    def __init__(self, group: LayerGroup, context: ContextParallel, by_heads: bool):
        self.context, self.by_heads = context, by_heads
        self.merge = group.backend("merge", MergeBackend)
        self._kept: dict[Any, _Buffers] = {}

    def buffers(self, like: Tensor, width: int) -> _Buffers:
        """Return buffers for states of queries `like` (tokens, heads, size), outputs of `width`."""
        key = (*like.shape[:2], width, like.dtype, like.device)
        if key not in self._kept:
            self._kept.clear()  # only the last shape's buffers stay
            heads = like.shape[1] // (self.context.size if self.by_heads else 1)
            self._kept[key] = _Buffers(like, width, heads, self.context.size)
        return self._kept[key]


class OverRanks(Op):
    """Attends all queries to each rank's own keys, and merges the ranks' states."""

    def __init__(self, op: Op, merging: Merging, rows: Rows = None):
        self.op, self.merging, self.rows, self.inner = op, merging, rows, (op,)

    def run(self, frame: Frame) -> None:
        by_heads, context = self.merging.by_heads, self.merging.context
        buffers = self.merging.buffers(frame.query, frame.out.shape[2])
        self.op.run(frame.but(out=buffers.out, lse=buffers.lse))
        if by_heads:
            buffers.split_by_heads()
            context.all_to_all(buffers.received, buffers.sent)
        else:
            context.all_gather(buffers.received, buffers.sent[0])
        total, total_lse = buffers.total, buffers.total_lse
        for index, (part, part_lse) in enumerate(buffers.parts):
            if index == 0:
                total.copy_(part)
                total_lse.copy_(part_lse)
            else:
                self.merging.merge.run(total, total_lse, part, part_lse)
        sinks, heads = frame.params.sinks, total.shape[1]
        if sinks is not None and by_heads:
            sinks = sinks[context.rank * heads :][:heads]
        write_merged(frame, total, total_lse, sinks)


def write_merged(frame: Frame, total: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Write the state over all keys. A learned sink (heads,) joins last."""
    if sinks is not None:
        total, lse = with_sinks(total, lse, sinks)
    frame.out.copy_(total)
    if frame.lse is not None:
        frame.lse.copy_(lse)


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
        # A step without tokens has a row, too: without elements its address wouldn't be aligned.
        length = max(-(-(start + tokens * heads * precise.itemsize) // ALIGNED), 1) * ALIGNED
        # Padding is sent too, so it is written once.
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
