"""What do adapters of libraries have in common? Windows, padding rows, and the LSE's conventions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch
from polyattn.spec.key_ranges import window_sizes
from polyattn.spec.layer import LayerSpec


def decode_window_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return `window_sizes` of one query token, which has no keys to its right.

    The right bound is -1 where nothing else bounds the keys. Even a bound without an effect keeps
    flash-attn 2 from packing the heads of a group, so that it reads each key once a head.

    Args:
        spec: the layer.

    Returns:
        (left, right), in tokens; -1 means no bound.

    Examples:
        >>> decode_window_sizes(LayerSpec(num_heads=1, head_size=64))
        (-1, -1)

    """
    left, right = window_sizes(spec)
    return (left, -1) if left == -1 else (left, right)


def cumulative(lens: Tensor) -> Tensor:
    """Return where sequences of these lengths start, and where the last one ends.

    Args:
        lens: integers (num_seqs,), in tokens.

    Returns:
        int32 (num_seqs + 1,), on the lengths' device.

    Examples:
        >>> cumulative(torch.tensor([5, 1]))
        tensor([0, 5, 6], dtype=torch.int32)

    """
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def empty_rows(batch: Batch, causal: bool = False) -> Tensor | None:
    """Return which tokens see no key.

    Those are the tokens of sequences without keys. Under a causal mask they are also the tokens before
    the first key, in a sequence with more queries than keys.

    Args:
        batch: the step; its lengths are on the host.
        causal: whether the mask is causal.

    Returns:
        bool (num_tokens,) on the batch's device, or None if every token sees a key.

    Examples:
        >>> batch = Batch.from_lens([2, 1], [0, 3])
        >>> empty_rows(batch)
        tensor([ True,  True, False])

    """
    queries, lens = batch.host_query_lens, batch.host_lens
    blind = np.maximum(queries - lens, 0) if causal else queries * (lens == 0)
    if not np.count_nonzero(blind):
        return None
    rows = torch.zeros(batch.num_tokens, dtype=torch.bool, device="cpu")
    for start, count in zip(batch.starts, blind.tolist(), strict=False):
        rows[start : start + count] = True
    return rows.to(batch.device)


def blank(rows: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Write the results of tokens that see no key: output 0 and LSE -inf. Libraries differ there.

    Args:
        rows: bool (num_tokens,), as `empty_rows` returns it; None: there are none.
        out: (num_tokens, heads, size), written.
        lse: float32 (num_tokens, heads), written, or None.

    Examples:
        >>> out, lse = torch.ones(2, 1, 1), torch.zeros(2, 1)
        >>> blank(torch.tensor([True, False]), out, lse)
        >>> out.flatten().tolist(), lse.flatten().tolist()
        ([0.0, 1.0], [-inf, 0.0])

    """
    if rows is not None:
        out.masked_fill_(rows[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(rows[:, None], -torch.inf)


def store_lse(lse: Tensor | None, values: Tensor) -> None:
    """Copy a library's LSE to the call's, and its +inf as -inf, for rows without keys.

    Args:
        lse: float32 (num_tokens, heads), written; None: the call needs no LSE.
        values: what the library returned, (heads, num_tokens), natural logarithm.

    Examples:
        >>> lse = torch.zeros(2, 1)
        >>> store_lse(lse, torch.tensor([[0.5, torch.inf]]))
        >>> lse.flatten().tolist()
        [0.5, -inf]

    """
    if lse is not None:
        lse.copy_(values.T)
        lse.masked_fill_(lse == torch.inf, -torch.inf)


def at_least(buffer: Tensor, size: int, outgrown: list[Tensor]) -> Tensor:
    """Return a flat buffer of at least `size` elements: this one, or a larger one in its place.

    A replaced buffer is appended to `outgrown` and stays alive, because a captured graph may still write
    to it.

    Args:
        buffer: (elements,), of any dtype.
        size: elements that are needed.
        outgrown: the list of replaced buffers.

    Returns:
        The buffer. A new one has at least twice the elements of the old one, uninitialised.

    Examples:
        >>> old: list[torch.Tensor] = []
        >>> buffer = at_least(torch.empty(4), 5, old)
        >>> buffer.numel(), len(old)
        (8, 1)

    """
    if buffer.numel() >= size:
        return buffer
    outgrown.append(buffer)
    return buffer.new_empty(max(size, 2 * buffer.numel()))
