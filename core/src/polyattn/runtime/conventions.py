"""What an adapter of a library needs again and again: windows, padding rows, the LSE's conventions."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch
from polyattn.spec.key_ranges import window_sizes
from polyattn.spec.layer import LayerSpec


def decode_window_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return the same for one query token, to whose right nothing lies.

    A bound there, though it bounds nothing, keeps flash-attn 2 from packing the heads of a group:
    it would read each key once a head.
    """
    left, right = window_sizes(spec)
    return (left, -1) if left == -1 else (left, right)


def cumulative(lens: Tensor) -> Tensor:
    """Return where sequences of these lengths start: int32 (num_seqs + 1,)."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def empty_rows(batch: Batch, causal: bool = False) -> Tensor | None:
    """Return which tokens see no key, bool (num_tokens,), or None for none.

    Those of sequences without keys, and under a causal mask those that stand before the first key.
    """
    counts = zip(batch.query_lens, batch.lens, strict=True)
    blind = [q if not n else max(q - n, 0) if causal else 0 for q, n in counts]
    if not any(blind):
        return None
    rows = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for start, count in zip(batch.starts, blind, strict=False):
        rows[start : start + count] = True
    return rows.to(batch.device)


def blank(rows: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Write what a token without keys gets: output 0, LSE -inf; libraries differ there."""
    if rows is not None:
        out.masked_fill_(rows[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(rows[:, None], -torch.inf)


def store_lse(lse: Tensor | None, found: Tensor) -> None:
    """Copy a library's (heads, tokens) LSE; where it says +inf for a row without keys, say -inf."""
    if lse is not None:
        lse.copy_(found.T)
        lse.masked_fill_(lse == torch.inf, -torch.inf)


def at_least(buffer: Tensor, size: int, outgrown: list[Tensor]) -> Tensor:
    """Return a flat buffer of `size` elements or more: this one, or a larger one in its place.

    One that is outgrown is put in the list and lives on: a captured graph goes on writing to it.
    """
    if buffer.numel() >= size:
        return buffer
    outgrown.append(buffer)
    return buffer.new_empty(max(size, 2 * buffer.numel()))
