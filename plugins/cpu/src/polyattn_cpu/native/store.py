"""NATIVE_STORE: norms, rotates, quantises and scatters new rows into a paged cache in one call."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from polyattn.kernel import (
    BatchError,
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    NewTokens,
    Rotation,
    StoreBackend,
    StorePlan,
)
from torch import Tensor

from polyattn_cpu.native.attention import TORCH_DTYPES, kernels
from polyattn_cpu.native.library import isa
from polyattn_cpu.native.rows import writer

_SCATTER = struct.Struct("@7P10q5if2Pif")


class Part(NamedTuple):
    """One source of a call, (num_tokens, heads, size), its last stride 1, and where its rows go.

    - `cache` (num_blocks, block_size, heads, size), its last stride 1; None: nothing is stored. One of
      8 bits takes `row / scale`, saturated, rounded to nearest even.
    - `out`: where the rows go too, contiguous, like the source.
    - `rows`: how a cache of rows of bytes is written, `rows.Program.address`; its size is its bytes.
    - `bias` (heads, size), `turns` (num_tokens, 2 * pairs), `factors` (num_tokens,): float32,
      contiguous. Turned are 2 * pairs elements of a head from `first` on: pair i is elements i and
      i + pairs, or with `neighbours` 2 i and 2 i + 1.
    - `norm`: the weight of an RMS norm with `eps` between bias and turn, float32 contiguous: (size,) of
      each head, or (heads * size,) of a token's.
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
    rows: int = 0
    norm: Tensor | None = None
    eps: float = 0.0

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
            TORCH_DTYPES[source.dtype], _stored(source if cache is None else cache),
            0 if turns is None else turns.shape[1] // 2, self.first, self.neighbours, self.scale,
            self.rows, _pointer(self.norm), self.norm is not None and len(self.norm) != size, self.eps,
        )  # fmt: skip


def _stored(cache: Tensor) -> int:
    """Return the dtype of a cache's items: of rows of bytes any of one byte."""
    return TORCH_DTYPES[torch.int8 if cache.dtype == torch.uint8 else cache.dtype]


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
    bad = kernels().pa_store((by or isa()).encode(), packed, len(parts), number)
    if bad:
        cache = next(part.cache for part in parts if part.cache is not None)
        raise _outside(slots, bad - 1, cache.shape[0] * cache.shape[1])


def _outside(slots: Tensor, at: int, count: int) -> BatchError:
    return BatchError(
        f"slot_mapping[{at}]={int(slots[at])} is out of range: the cache has {count} slots, and -1 skips"
    )


class NativeStore(StoreBackend):
    """Norms, rotates, quantises and scatters queries, keys and values in one call."""

    name: ClassVar[str] = "NATIVE_STORE"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.by = isa()
        self.isa, self.scatter = self.by.encode(), kernels().pa_store
        rows, sizes = None if cache is None else cache.rows, (0, 0)
        if cache is not None:
            sizes = (cache.head_size, cache.v_head_size)
        self.written = [writer(f, n) for f, n in zip(rows or (), sizes, strict=False)]
        self.rows = [w.address for w in self.written] or [0, 0]

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        # This runs once a layer, so it reads cached facts of the cache.
        slots, pack = plan.slots, _SCATTER.pack
        (kb, kt, kh, _), (vb, vt, vh, _), stored = cache.strides
        tokens, heads, size = key.shape
        st, sh, _ = key.stride()
        block_size, at = cache.block_size, slots.data_ptr()
        dtype = TORCH_DTYPES[torch.int8 if stored == torch.uint8 else stored]
        count = cache.num_blocks * block_size
        packed, parts = pack(
            key.data_ptr(), cache.key.data_ptr(), 0, at, 0, 0, 0, tokens, heads, size, block_size, count,
            st, sh, kb, kt, kh, TORCH_DTYPES[key.dtype], dtype, 0, 0, False, params.k_scale,
            self.rows[0], 0, False, 0.0,
        ), 1  # fmt: skip
        if not cache.value_in_key:
            st, sh, _ = value.stride()
            packed += pack(
                value.data_ptr(), cache.value.data_ptr(), 0, at, 0, 0, 0, tokens, heads,
                value.shape[2], block_size, count, st, sh, vb, vt, vh, TORCH_DTYPES[value.dtype], dtype,
                0, 0, False, params.v_scale, self.rows[1], 0, False, 0.0,
            )  # fmt: skip
            parts = 2
        bad = self.scatter(self.isa, packed, parts, torch.get_num_threads())
        if bad:
            raise _outside(slots, bad - 1, count)

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        query, key, value = new.query, new.key, new.value
        assert key is not None and value is not None
        biases = new.biases() or (None, None, None)
        out = query.new_empty(query.shape)
        key_out = key.new_empty(key.shape) if keep else None
        value_out = value.new_empty(value.shape) if keep and biases[2] is not None else None
        of_query, of_key = _turn(rotation, query), _turn(rotation, key)
        if (norms := new.norms) is not None:
            of_query |= {"norm": norms.query, "eps": norms.eps}
            of_key |= {"norm": norms.key, "eps": norms.eps}
        factors = None if rotation is None else rotation.query_scale
        parts = [
            Part(query, out=out, bias=biases[0], factors=factors, **of_query),
            Part(
                key,
                cache.key,
                params.k_scale,
                out=key_out,
                bias=biases[1],
                rows=self.rows[0],
                **of_key,
            ),
        ]
        if not cache.value_in_key:
            parts.append(
                Part(
                    value, cache.value, params.v_scale, out=value_out, bias=biases[2], rows=self.rows[1]
                )
            )  # fmt: skip
        store(parts, plan.slots, by=self.by)
        return out, key_out, value if keep and value_out is None else value_out


def _turn(rotation: Rotation | None, x: Tensor) -> dict[str, Any]:
    """Return the fields of a `Part` that turn its heads."""
    if rotation is None or not rotation.size:
        return {}
    return {
        "turns": rotation.turns,
        "first": rotation.offset(x.shape[2]),
        "neighbours": rotation.pairing == "gptj",
    }
