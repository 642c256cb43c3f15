"""NKI_ATTN: each sequence's keys gathered, and attended to by the NKI library's `attention_cte`."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import torch
from polyattn.kernel import AttentionBackend, Batch, Frame, LayerSpec, Plan, blank, key_ranges
from torch import Tensor

ROWS = 128
"""Rows of one tile: the kernel takes the bounds of whole tiles."""
MOST_ROWS = 1 << 14
"""Rows of one call: a head's query is a row, and the heads of a group follow one another."""


class Call(NamedTuple):
    """Neighbouring queries of one sequence.

    `tokens`: their slice of the step. `slots`, each (keys,): the keys' places, in a cache blocks and
    offsets. Each row sees keys `low` up to `high`, float32 (rows, 1).
    """

    tokens: slice
    slots: tuple[Tensor, ...]
    low: Tensor
    high: Tensor


class CallPlan(Plan):
    """The calls of a step. Their sizes are rounded up, because each size compiles another kernel.

    `blind` bool (num_tokens,): the tokens that see no key, or None if all see one.
    """

    __slots__ = ("blind", "calls")

    def __init__(self, batch: Batch, spec: LayerSpec, block_size: int):
        super().__init__(batch)
        blind = np.ones(batch.num_tokens, dtype=bool)
        self.calls: list[Call] = []
        table = batch.host_block_table
        if spec.cached and table is None and batch.block_table is not None:
            table = batch.block_table.cpu().numpy()
        ratio = spec.num_heads // spec.num_kv_heads
        origins = batch.first_positions or (0,) * batch.num_seqs
        for index, (length, count) in enumerate(zip(batch.lens, batch.query_lens, strict=True)):
            # Padding repeats the sequence's own keys, so that no other request's NaN is multiplied by 0.
            places = np.arange(rounded(length)) % max(length, 1)
            if spec.cached and table is not None:
                slots = [table[index][places // block_size], places % block_size]
            else:
                slots = [batch.key_starts[index] + places]
            where = tuple(torch.from_numpy(s.astype(np.int64)).to(batch.device) for s in slots)
            step, origin = MOST_ROWS // ratio, origins[index]
            for start in range(0, count if length else 0, step):
                at = origin + length - count + np.arange(start, min(start + step, count))
                seen = key_ranges(spec, at, at, np.int64(origin + length), np.minimum, np.maximum)
                low, high = (
                    np.tile(np.broadcast_to(bound, at.shape) - origin, ratio).clip(0)
                    for bound in (seen.near_start, seen.near_stop)
                )
                first = batch.starts[index] + start
                blind[first : first + len(at)] = (low >= high)[: len(at)]
                more = (0, rounded(len(low)) - len(low))  # rows that fill the tile see one key
                self.calls.append(
                    Call(
                        slice(first, first + len(at)),
                        where,
                        torch.from_numpy(np.pad(low, more)).float()[:, None].to(batch.device),
                        torch.from_numpy(np.pad(high, more, constant_values=1))
                        .float()[:, None]
                        .to(batch.device),
                    )
                )
        self.blind: Tensor | None = (
            torch.from_numpy(blind).to(batch.device) if blind.any() else None
        )


class NkiAttention(AttentionBackend):
    """A call for each sequence. Its masks are bounds, so that one form serves each of them."""

    name: ClassVar[str] = "NKI_ATTN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> CallPlan:
        size = 1 if self.cache is None else self.cache.block_size
        return CallPlan(batch, self.spec_of(batch), size)

    def run(self, plan: CallPlan, frame: Frame) -> None:
        from nkilib.core.attention.attention_cte import attention_cte

        key, value, spec = frame.key, frame.value, self.spec
        if frame.cache is not None:
            key, value = frame.cache.key, frame.cache.value
        assert key is not None and value is not None
        for call in plan.calls:
            query = frame.query[call.tokens].unflatten(1, (spec.num_kv_heads, -1))
            rows = query.permute(1, 2, 0, 3).flatten(1, 2)  # (KV heads, rows, size)
            count, more = rows.shape[1], len(call.low) - rows.shape[1]
            result = attention_cte(
                torch.nn.functional.pad(rows, (0, 0, 0, more)).contiguous(),
                key[call.slots].transpose(0, 1).contiguous(),
                value[call.slots].transpose(0, 1).contiguous(),
                scale=spec.scale,
                causal_mask=False,
                tp_q=True,
                tp_k=True,
                bound_min=call.low,
                bound_max=call.high,
            )
            shape = (query.shape[2], query.shape[0])
            heads = result[:, :count].unflatten(1, shape).permute(2, 0, 1, 3)
            frame.out[call.tokens] = heads.flatten(1, 2)
        blank(plan.blind, frame.out, frame.lse)


def rounded(size: int) -> int:
    """Return the next power of two, a tile at least."""
    return 1 << (max(size, ROWS) - 1).bit_length()
