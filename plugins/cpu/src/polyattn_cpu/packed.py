"""A step on an NVIDIA GPU in one call of torch's own kernels, its keys packed one after another."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from polyattn.kernel import (
    AttentionState,
    Batch,
    CacheFormat,
    Device,
    KVCache,
    LayerSpec,
    arch_matches,
    empty_rows,
    raw,
    window_sizes,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polyattn_cpu.gather import picked

FLASH_DTYPES, FLASH_SIZE = ("bfloat16", "float16"), 256
"""The head sizes of torch's build of FlashAttention. Its memory-efficient kernel takes the rest."""
FLASH = torch.ops.aten._flash_attention_forward
EFFICIENT = torch.ops.aten._efficient_attention_forward
DENSE: Any = scaled_dot_product_attention
FROM_BOTTOM_RIGHT = 2
"""The memory-efficient kernel's number for a causal mask whose last query sees all keys."""


def packs(spec: LayerSpec, device: Device) -> bool:
    """Return whether torch's kernels serve such a layer, in steps in which every query sees a key."""
    return (
        device.platform == "cuda"
        and arch_matches("sm_80+", device.arch)
        and (spec.dtype in FLASH_DTYPES or spec.dtype == "float32")
        and spec.head_size % 8 == spec.v_head_size % 8 == 0
        and not (
            spec.logit_soft_cap or spec.chunk_size or spec.sink_tokens or spec.mask or spec.alibi
        )
        and spec.variant is None
        and spec.scales == "number"
        and (spec.rope is None or spec.rope.positions != "cache")
        and not spec.batch_invariant  # FlashAttention splits keys by the batch's size
        and (_by_flash(spec) or max(_window(spec)) < 0)
    )


def _by_flash(spec: LayerSpec) -> bool:
    same = spec.head_size == spec.v_head_size <= FLASH_SIZE
    return same and spec.dtype in FLASH_DTYPES


def _window(spec: LayerSpec) -> tuple[int, int]:
    """Return the window's sizes beside a causal mask, which is a flag of its own: -1 where unbounded."""
    left, right = window_sizes(spec)
    return left, -1 if spec.causal else right


class Packed:
    """A step's keys, from the first one in a query's window. Located once a plan, at first use."""

    def __init__(self, spec: LayerSpec, batch: Batch, cache: CacheFormat | None):
        self.spec, self.batch = spec, batch
        left = _window(spec)[0]
        lengths = zip(batch.query_lens, batch.lens, strict=True)
        self.firsts = [max(0, n - q - left) if left >= 0 else 0 for q, n in lengths]
        self.counts = [n - first for first, n in zip(self.firsts, batch.lens, strict=True)]
        self.longest, self.total = max(self.counts, default=0), sum(self.counts)
        self.key_starts = torch.tensor(
            [0, *accumulate(self.counts)], dtype=torch.int32, device="cpu"
        )
        self.key_starts = self.key_starts.to(batch.device)
        ordered = batch.lens == batch.query_lens if cache is not None else batch.keys_packed
        self.as_given = ordered and not any(self.firsts)
        self.dense = self._is_dense()

    def _is_dense(self) -> bool:
        """Whether torch's public call serves the step: all rows alike, under no mask or a square one."""
        lens, queries = set(self.counts), set(self.batch.query_lens)
        if (
            len(lens) != 1
            or len(queries) != 1
            or not (_by_flash(self.spec) or self.spec.gqa_ratio == 1)
        ):
            return False
        bare = not self.spec.causal or queries == {1}
        return max(_window(self.spec)) < 0 and (bare or lens == queries)

    @classmethod
    def of(cls, spec: LayerSpec, batch: Batch, cache: CacheFormat | None) -> Packed | None:
        """Return the step's form where a kernel serves it, of a layer that `packs`; else None."""
        packed = cls(spec, batch, cache)
        # The memory-efficient kernel divides by the sum of no weights, and splits no keys. For single
        # tokens of 16 x 4,096 with heads of 512 it took 1.9 times as long as one by one (H100).
        prompts = batch.max_query_len > 1 and empty_rows(batch, spec.causal) is None
        every = _by_flash(spec) or prompts
        return packed if packed.longest and batch.num_tokens and every else None

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float | Tensor,
        summed: bool = True,
    ) -> AttentionState:
        """Attend to what `read` returned; `query` (tokens, heads, size) of its dtype.

        `summed`: whether the caller reads the state's LSE. If not, it may be arbitrary.
        """
        spec, batch = self.spec, self.batch
        if self.dense and not summed:
            return self._attend_dense(query, keys, values, scale)
        most = batch.max_query_len
        if batch.num_tokens < batch.num_seqs:  # for single tokens it expects one in each sequence
            most = max(2, most)
        starts = (batch.query_start_loc, self.key_starts, most, self.longest)
        query, keys, values = (_aligned(each) for each in (query, keys, values))
        if _by_flash(spec):
            left, right = _window(spec)
            output, lse = FLASH(
                query,
                keys,
                values,
                *starts,
                0.0,
                spec.causal,
                False,
                scale=scale,
                window_size_left=left,
                window_size_right=right,
            )[:2]
            lse = lse.T
            if summed:
                lse = lse.masked_fill(lse == torch.inf, -torch.inf)
            return AttentionState(output, lse)
        # It has no groups of query heads. A call for each place in a group repeats no key.
        mask, each = (FROM_BOTTOM_RIGHT if spec.causal else 0), spec.gqa_ratio
        outputs, sums = [], []
        for place in range(each):
            tensors = (query[None, :, place::each], keys[None], values[None])
            output, lse = EFFICIENT(*tensors, None, *starts, 0.0, mask, True, scale=scale)[:2]
            outputs.append(output[0])
            sums.append(lse[self._tokens[0], :, self._tokens[1]])
        return AttentionState(*(torch.stack(parts, 2).flatten(1, 2) for parts in (outputs, sums)))

    def _attend_dense(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float | Tensor
    ) -> AttentionState:
        """Call `scaled_dot_product_attention`. torch takes the fastest of its kernels, cuDNN's too."""
        rows = len(self.counts)
        packed = (each.unflatten(0, (rows, -1)).transpose(1, 2) for each in (query, keys, values))
        causal = self.spec.causal and self.batch.max_query_len > 1
        output = DENSE(*packed, is_causal=causal, scale=scale, enable_gqa=self.spec.gqa_ratio > 1)
        return AttentionState(output.transpose(1, 2).flatten(0, 1), query.new_empty(0))

    def read(
        self, key: Tensor | None, value: Tensor | None, cache: KVCache | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of all sequences, (keys, KV heads, size), in `dtype`."""
        at_hand = cache is None or (self.as_given and cache.key.dtype == dtype)
        if at_hand and key is not None and value is not None:
            rows = slice(self.total) if self.as_given else self._rows
            return key[rows].to(dtype), value[rows].to(dtype)
        assert cache is not None
        seq, place = self._places
        assert self.batch.block_table is not None
        block = self.batch.block_table[seq, place // cache.block_size].long()
        offset = place % cache.block_size
        return picked(cache, lambda stored: raw(stored)[block, offset].view(stored.dtype), dtype)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Each key's sequence, and its place in it: int64 on the device."""
        return _ragged(self.counts, self.firsts, self.batch.device)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Each query token's sequence, and its place among the sequence's: int64 on the device."""
        lens = self.batch.query_lens
        return _ragged(lens, [0] * len(lens), self.batch.device)

    @cached_property
    def _rows(self) -> Tensor:
        """Each key's row among the given ones."""
        seq, place = self._places
        return torch.tensor(self.batch.key_starts, device=place.device)[seq] + place


def _ragged(counts: list[int], firsts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (row, column) of every entry of rows with so many entries each, from these columns on."""
    lens = torch.tensor(counts, device="cpu")
    row = torch.arange(len(lens), device="cpu").repeat_interleave(lens)
    column = (
        torch.arange(len(row), device="cpu")
        + (torch.tensor(firsts, device="cpu") - lens.cumsum(0) + lens)[row]
    )
    return row.to(device), column.to(device)


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where a row's elements don't start at 16 bytes, one after another."""
    size = tensor.element_size()
    starts = (tensor.data_ptr(), *(stride * size for stride in tensor.stride()[:-1]))
    if tensor.stride(-1) == 1 and not any(start % 16 for start in starts):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
