"""New rows into a paged cache by the native kernels: turned, quantised and scattered in one call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from polyattn.kernel import BatchError, KVCache
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
        cache = next(part.cache for part in parts if part.cache is not None)
        raise _outside(slots, bad - 1, cache.shape[0] * cache.shape[1])


def _outside(slots: Tensor, at: int, count: int) -> BatchError:
    return BatchError(
        f"slot_mapping[{at}]={int(slots[at])} is out of range: the cache has {count} slots, and -1 skips"
    )


def plain(by: str) -> Callable[[Tensor, Tensor, KVCache, float, float, Tensor], None]:
    """Return `store` of keys and values that aren't turned, by an instruction set.

    Called with key, value (num_tokens, num_kv_heads, size), their cache and scales, and the slots. Paid
    once a layer: what the cache knows isn't asked for again.
    """
    run, pack, isa_bytes, threads = (
        load().pa_store,
        _SCATTER.pack,
        by.encode(),
        torch.get_num_threads,
    )

    def scatter(
        key: Tensor, value: Tensor, cache: KVCache, k_scale: float, v_scale: float, slots: Tensor
    ) -> None:
        (kb, kt, kh, _), (vb, vt, vh, _), stored = cache.strides
        tokens, heads, size = key.shape
        st, sh, _ = key.stride()
        block_size, at, dtype = cache.block_size, slots.data_ptr(), TORCH_DTYPES[stored]
        count = cache.num_blocks * block_size
        packed, parts = pack(
            key.data_ptr(), cache.key.data_ptr(), 0, at, 0, 0, 0, tokens, heads, size, block_size, count,
            st, sh, kb, kt, kh, TORCH_DTYPES[key.dtype], dtype, 0, 0, False, k_scale,
        ), 1  # fmt: skip
        if not cache.value_in_key:
            st, sh, _ = value.stride()
            packed += pack(
                value.data_ptr(), cache.value.data_ptr(), 0, at, 0, 0, 0, tokens, heads,
                value.shape[2], block_size, count, st, sh, vb, vt, vh, TORCH_DTYPES[value.dtype], dtype,
                0, 0, False, v_scale,
            )  # fmt: skip
            parts = 2
        bad = run(isa_bytes, packed, parts, threads())
        if bad:
            raise _outside(slots, bad - 1, count)

    return scatter
