"""New rows into a paged cache by the native kernels: turned, quantised and scattered in one call."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from polyattn.kernel import BatchError
from torch import Tensor

from polyattn_cpu.native.attention import TORCH_DTYPES
from polyattn_cpu.native.library import isa, load

_SCATTER = struct.Struct("@7P10q5if")


class Part(NamedTuple):
    """One source of a call, (num_tokens, heads, size), its last stride 1, and where its rows go.

    - `cache` (num_blocks, block_size, heads, size), its last stride 1; None: nothing is stored. One of
      8 bits takes `row / scale`, saturated, rounded to nearest even.
    - `out`: where the rows go too, contiguous, like the source.
    - `bias` (heads, size), `turns` (num_tokens, 2 * pairs), `factors` (num_tokens,): float32,
      contiguous. Turned are 2 * pairs elements of a head from `first` on: pair i is elements i and
      i + pairs, or with `neighbours` 2 i and 2 i + 1.
    """

    source: Tensor
    cache: Tensor | None = None
    scale: float = 1.0
    out: Tensor | None = None
    bias: Tensor | None = None
    turns: Tensor | None = None
    factors: Tensor | None = None
    first: int = 0
    neighbours: bool = False

    def packed(self, slots: Tensor) -> bytes:
        """Return `pa_scatter`."""
        source, cache, turns = self.source, self.cache, self.turns
        tokens, heads, size = source.shape
        blocks, block_size = (0, 1) if cache is None else cache.shape[:2]
        strides = (0, 0, 0) if cache is None else cache.stride()[:3]
        return _SCATTER.pack(
            source.data_ptr(), _pointer(cache), _pointer(self.out), slots.data_ptr(),
            _pointer(self.bias), _pointer(turns), _pointer(self.factors),
            tokens, heads, size, block_size, blocks * block_size,
            *source.stride()[:2], *strides,
            TORCH_DTYPES[source.dtype], TORCH_DTYPES[(source if cache is None else cache).dtype],
            0 if turns is None else turns.shape[1] // 2, self.first, self.neighbours, self.scale,
        )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def store(
    parts: Sequence[Part], slots: Tensor, threads: int | None = None, by: str | None = None
) -> None:
    """Write the rows of each part to their slots, int64 (num_tokens,), -1 skips, in one call.

    `threads`: at most so many; default torch's number. `by`: an instruction set; default: the one
    that runs. Raises `BatchError` before anything is written
    where a slot is outside the cache.
    """
    packed = b"".join([part.packed(slots) for part in parts])
    number = torch.get_num_threads() if threads is None else threads
    bad = load().pa_store((by or isa()).encode(), packed, len(parts), number)
    if bad:
        at = bad - 1
        cache = next(part.cache for part in parts if part.cache is not None)
        raise BatchError(
            f"slot_mapping[{at}]={int(slots[at])} is out of range: the cache has "
            f"{cache.shape[0] * cache.shape[1]} slots, and -1 skips"
        )
