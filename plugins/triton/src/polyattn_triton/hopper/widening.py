"""When does Hopper's own prefill serve a cache of 8 or 4 bits? Over 16-bit copies, where these pay.

The kernel multiplies 16-bit numbers. Every number of e4m3, e5m2 and int8 is one of bfloat16's and of
float16's, and so is one of nvfp4 times its block's scale; mxfp4's are bfloat16's. So what a step's
queries see is copied as it is, and a layer's scales stay the factors of logits and outputs that they are
over the cache itself. Copies lie by token, sequence after sequence; tokens before
the first query's window aren't copied. They are the call's own memory: calls on two streams, or in a
captured graph, never share it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from polyattn.kernel import Batch, LayerSpec, upload
from torch import Tensor

from polyattn_triton.kernels.widen import widen_kernel
from polyattn_triton.launch import Launcher

Ints = NDArray[np.signedinteger[Any]]

NARROW = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Caches of elements that may be copied."""
ROWS = {"nvfp4": ("bfloat16", "float16"), "mxfp4": ("bfloat16",)}
"""Formats of rows that may be, to these dtypes: two bits of a number times four of its scale, or times a
power of two of bfloat16's range, are a number of theirs."""
MOST_BYTES = 256 << 20
"""Of a call's copies: 65,536 tokens of eight heads of 128. Above, the portable kernel reads the cache."""
ROWS_A_KEY, OF_ROWS = 256, 192
"""Rows (query token, head of group) that must see a copied key for its copy to pay; and of rows of bytes,
which the portable kernel takes longer to read.

On an H100, 32/8 heads of 128, by copies and directly (us): 64 new tokens after 4,032, e4m3 36.1 and 32.2,
nvfp4 36.9 and 41.4; 128 after 8,064, e4m3 61.8 and 81.5, nvfp4 62.9 and 115.9."""
LEAST = 1 << 26
"""Rows x keys x head size that must be left to gain. On an H100 (us) a prompt of 256 is alike over e4m3
(21.2 and 21.7) and nearly so over nvfp4 (21.8 and 23.0); of 512 copies are faster (25.7 and 32.4, 26.5
and 34.8)."""
ELEMENTS = 8192
"""Of a program's copies of keys."""
ALIGNED = 4
"""Numbers of 16 bytes."""

_copy = Launcher(widen_kernel)


def copy_constants(
    size: int, block_size: int, window: int, read: tuple[Any, Any] = (None, None)
) -> tuple[Any, ...]:
    """Return `widen_kernel`'s constants, in its order. `size`: of a head; `window` 0: none."""
    return size, ELEMENTS // size, block_size, window, *read


def is_exact(spec: LayerSpec) -> bool:
    """Whether every number of a layer's cache is one of its dtype."""
    names = spec.stored_dtype.split("/")
    return all(name in NARROW or spec.dtype in ROWS.get(name, ()) for name in names)


class Widening(NamedTuple):
    """The copied `tokens` of a step, so many.

    `firsts`, `origins`: int32 (sequences,), which of them is each sequence's first, and which would be
    its token 0, below zero where tokens are left out. `window`: of the layer; 0: none.
    """

    tokens: int
    firsts: Tensor
    origins: Tensor
    window: int

    def copies(
        self,
        batch: Batch,
        key: Tensor,
        value: Tensor,
        dtype: torch.dtype,
        size: int,
        read: tuple[Any, Any] = (None, None),
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens' keys and values (tokens, KV heads, size) in `dtype`.

        `read`: how rows of bytes are, `functions.rows.Rows.constants`.
        """
        table = batch.block_table
        assert table is not None
        _, block_size, heads, _ = key.shape
        shape = (2, self.tokens, heads, size)
        keys, values = torch.empty(shape, dtype=dtype, device=key.device).unbind(0)
        constants = copy_constants(size, block_size, self.window, read)
        _copy(
            (-(-self.tokens // constants[1]), heads, 1),
            (
                key, value, keys, values, table, batch.seq_lens, batch.query_start_loc,
                self.firsts, self.origins,
            ),
            (),
            (*key.stride()[:3], *value.stride()[:3], heads * size, size),
            (table.stride(0), self.tokens, batch.num_seqs, (batch.num_seqs - 1).bit_length()),
            constants,
            {"num_warps": 4},
        )  # fmt: skip
        return keys, values


def widening(spec: LayerSpec, batch: Batch, block_n: int) -> Widening | None:
    """Return which of a step's cached tokens are copied; None: the portable kernel takes as long.

    `spec`: the layer as this step has it. `block_n`: keys of a tile, which is read whole where a window
    begins in it. Copies pay where each key is seen by `ROWS_A_KEY` rows in the mean, and by so many more
    that a launch pays too: prompts from 256 tokens on, chunks from some hundred.
    """
    if batch.block_table is None:
        return None
    queries, lens = (n.astype(np.int64) for n in (batch.host_query_lens, batch.host_lens))
    window = spec.sliding_window or 0
    lows = np.zeros_like(lens)
    if window:
        lows = np.maximum(lens - queries - (window - 1), 0) // block_n * block_n
    counts = np.where(queries > 0, lens - lows, 0)
    count = int(counts.sum())
    if 4 * count * spec.num_kv_heads * spec.head_size > MOST_BYTES:
        return None
    moved = count
    # Queries of 8 bits are copied too, half as many bytes as a key and its value.
    if spec.qkv_dtype != "auto":
        moved += batch.num_tokens * spec.gqa_ratio // 2
    each = OF_ROWS if set(spec.stored_dtype.split("/")) <= set(ROWS) else ROWS_A_KEY
    gained = seen(spec, queries, lens) * spec.gqa_ratio - each * moved
    if gained * spec.num_kv_heads * spec.head_size < LEAST:
        return None
    if batch.lens == batch.query_lens:
        return Widening(count, batch.query_start_loc, batch.query_start_loc, window)
    # Compiled code may rely on the alignment of both addresses.
    places = np.zeros((2, -(-batch.num_seqs // ALIGNED) * ALIGNED), np.int32)
    places[0, : batch.num_seqs] = firsts = np.cumsum(counts) - counts
    places[1, : batch.num_seqs] = firsts - lows
    sent = upload(places.reshape(-1), batch.device).view(2, -1)
    return Widening(count, sent[0], sent[1], window)


def seen(spec: LayerSpec, queries: Ints, lens: Ints) -> int:
    """Return how many keys a step's query tokens see, added up."""
    if not spec.causal:
        return int(queries @ lens)

    def by_first(tokens: Ints) -> Ints:
        most = np.minimum(tokens, spec.sliding_window or tokens)
        summed: Ints = most * (most + 1) // 2 + (tokens - most) * most
        return summed

    return int((by_first(lens) - by_first(np.maximum(lens - queries, 0))).sum())
