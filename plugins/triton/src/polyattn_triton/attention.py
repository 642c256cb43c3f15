"""TRITON_ATTN: plans tiles and splits on the host, launches the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import triton
from polyattn import (
    AttentionBackend,
    Batch,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
)
from polyattn.runtime.kv_cache import STORAGE_DTYPES
from torch import Tensor

from polyattn_triton.cache_write import write_kv
from polyattn_triton.configs import Config, pick
from polyattn_triton.decode import decode_kernel, merge_kernel
from polyattn_triton.launch import (
    Kept,
    Site,
    launches_early,
    merge_block,
    merge_constants,
    multiprocessors,
    power,
)
from polyattn_triton.prefill import prefill_kernel

MIN_SPLIT_KEYS = 128
"""A split below this costs more in the merge than it gains."""
FEW_SPLITS = 16
MAX_SPLITS = 128
FEW_ON_ONE = 3
"""Programs of the configuration for few that fit on a multiprocessor of Hopper's at once."""
MANY_ON_ONE = 4
"""And of the other configuration."""
CHEAP_TO_MERGE = 4
"""Splits up to which one more costs less than it gains where sequences share keys."""
MERGED_AT_ONCE = 8192
"""Elements of the splits' outputs that a program merging them keeps in registers."""
MAX_MERGED_BY_ONE = 2048
"""Outputs of a group above which one program would be too slow to merge their splits."""


def even_splits(programs: int, num_sms: int) -> int:
    """Return how many splits leave the fullest multiprocessor the least to do.

    It has two or three programs: one computes while the others' keys arrive. Of equal numbers a few
    more splits are faster where sequences share their keys, more than a few slower to merge.
    """
    loads = [
        (on_one / splits, splits)
        for on_one in (2, FEW_ON_ONE)
        if (splits := on_one * num_sms // programs)
    ]
    if not loads:
        return 1
    least = min(loads)[0]
    equal = [splits for load, splits in loads if load == least]
    splits = max((s for s in equal if s <= CHEAP_TO_MERGE), default=min(equal))
    if splits == 1 and 2 * programs <= MANY_ON_ONE * num_sms:
        splits = 2
    return splits


def _shape_constants(spec: LayerSpec, config: Config, block_size: int) -> tuple[Any, ...]:
    return (
        spec.head_size, spec.v_head_size, power(spec.head_size), power(spec.v_head_size),
        config.block_m, config.block_n, block_size,
    )  # fmt: skip


def _mask_constants(spec: LayerSpec, lse: bool) -> tuple[Any, ...]:
    return (
        spec.sliding_window or 0, spec.chunk_size or 0, spec.sink_tokens,
        spec.logit_soft_cap is not None, spec.alibi, spec.learned_sinks, lse,
    )  # fmt: skip


def prefill_constants(
    spec: LayerSpec, config: Config, block_size: int, paged: bool, lse: bool
) -> tuple[Any, ...]:
    """Return `prefill_kernel`'s constants, in its order."""
    shape = _shape_constants(spec, config, block_size)
    return (spec.gqa_ratio, *shape, paged, spec.causal, *_mask_constants(spec, lse))


def decode_constants(
    spec: LayerSpec, config: Config, block_size: int, split: bool, lse: bool, arch: str, alike: bool
) -> tuple[Any, ...]:
    """Return `decode_kernel`'s constants, in its order. `alike`: V has K's strides."""
    itself = merges_itself(spec, arch)
    at_once = min(16, MERGED_AT_ONCE // _merged_outputs(spec)) if split and itself else 0
    early = split and not itself and launches_early(arch)
    return (
        spec.gqa_ratio, spec.num_heads, *_shape_constants(spec, config, block_size),
        *_mask_constants(spec, lse), split, triton.next_power_of_2(spec.gqa_ratio), at_once, early,
        alike,
    )  # fmt: skip


def _merged_outputs(spec: LayerSpec) -> int:
    """Outputs of one group in the tile that merges its splits."""
    return triton.next_power_of_2(spec.gqa_ratio) * triton.next_power_of_2(spec.v_head_size)


def merges_itself(spec: LayerSpec, arch: str) -> bool:
    """Whether the split that ends last merges them all, instead of a second kernel.

    Not on AMD, where the order of memory between programs was never seen to hold.
    """
    return not arch.startswith("gfx") and _merged_outputs(spec) <= MAX_MERGED_BY_ONE


def tile_config(spec: LayerSpec, arch: str, phase: str) -> Config:
    """Return the configuration of a phase (prefill, paged, decode, few) on `arch`."""
    width = power(max(spec.head_size, spec.v_head_size))
    stored = spec.dtype if phase == "prefill" else spec.stored_dtype
    plain = not (spec.sliding_window or spec.chunk_size or spec.alibi)
    config = pick(arch, phase, width, STORAGE_DTYPES[stored].itemsize, plain)
    rows = max(config.block_m, triton.next_power_of_2(spec.gqa_ratio))
    return replace(config, block_m=rows, num_warps=max(config.num_warps, min(4, rows // 16)))


class TritonAttention(AttentionBackend):
    """Prefill by tiles of a host-made work list, decode by sequence with split-KV."""

    name: ClassVar[str] = "TRITON_ATTN"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.decode_config = tile_config(spec, device.arch, "decode")
        self.few_config = tile_config(spec, device.arch, "few")
        self.prefill_config = tile_config(spec, device.arch, "prefill")
        # The plan lists tiles before it is known where the keys are read from.
        self.paged_config = replace(
            tile_config(spec, device.arch, "paged"), block_m=self.prefill_config.block_m
        )
        self.torch_device = torch.device(str(device.torch_device))
        self.num_sms = multiprocessors(self.torch_device)
        self.early = launches_early(device.arch)
        self.merges_itself = merges_itself(spec, device.arch)
        self.quantized = STORAGE_DTYPES[spec.stored_dtype].itemsize == 1
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._parts = torch.empty(0, device=self.torch_device)
        self._part_lse, self._done = self._parts, self._parts
        self._no_tensor = torch.empty(0, dtype=torch.int32, device=self.torch_device)

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.decode = batch.num_decodes == batch.num_seqs and self.spec.cached
        if self.decode:
            self._plan_splits(batch)
        else:
            self._plan_tiles(batch)

    def _plan_splits(self, batch: Batch) -> None:
        """Split the keys until the chip is full."""
        spec = self.spec
        longest = batch.max_seq_len
        for limit in (
            spec.sliding_window and spec.sliding_window + spec.sink_tokens,
            spec.chunk_size,
        ):
            longest = min(longest, limit or longest)
        programs = max(1, batch.num_seqs * spec.num_kv_heads)
        # To merge many splits takes longer than a second program on a multiprocessor gains.
        wanted = min(even_splits(programs, self.num_sms), max(FEW_SPLITS, self.num_sms // programs))
        most = -(-longest // MIN_SPLIT_KEYS)
        if spec.graph_capture:  # a captured graph keeps its number of splits whatever the lengths
            most = MAX_SPLITS
        self._settle(batch, max(1, min(wanted, most, MAX_SPLITS)))

    def _settle(self, batch: Batch, splits: int) -> None:
        """Keep what a step's launches have in common."""
        programs = batch.num_seqs * self.spec.num_kv_heads * splits
        self.splits = splits
        self.few = programs <= FEW_ON_ONE * self.num_sms
        if splits > 1 and not self._done.numel():
            self._allocate()
        table = batch.block_table
        assert table is not None
        self._kept = Kept(self._parts, self._part_lse, self._done, table, batch.seq_lens)
        self._table = table.stride(0), table.shape[1] - 1
        self._grid = (batch.num_seqs, self.spec.num_kv_heads, splits)

    def _allocate(self) -> None:
        """Make the workspace, once: a captured graph goes on writing to it.

        What is split is at most `MANY_ON_ONE` programs on a multiprocessor, of half as many groups.
        """
        programs, device = MANY_ON_ONE * self.num_sms, self.torch_device
        rows = programs * self.spec.gqa_ratio
        self._parts = torch.empty(rows * self.spec.v_head_size, device=device)
        self._part_lse = torch.empty(rows, device=device)
        # Splits that have ended, by sequence and KV head; whoever merges sets it back to zero.
        self._done = torch.zeros(programs // 2, dtype=torch.int32, device=device)

    def _plan_tiles(self, batch: Batch) -> None:
        """List (sequence, first query) of every tile, the ones with most keys first."""
        step = self.prefill_config.block_m // self.spec.gqa_ratio
        tiles = [
            (batch.lens[seq] - length + start, seq, start)
            for seq, length in enumerate(batch.query_lens)
            for start in range(0, length, step)
        ]
        tiles.sort(reverse=True)
        packed = torch.tensor([[t[1] for t in tiles], [t[2] for t in tiles]], dtype=torch.int32)
        if self.torch_device.type == "cuda":
            packed = packed.pin_memory().to(self.torch_device, non_blocking=True)
        self.tile_seq, self.tile_start = packed.view(2, -1)
        self.starts = batch.query_start_loc

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor, params: LayerParams
    ) -> None:
        write_kv(key, value, cache, slot_mapping, params)

    def forward_prefill(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if self.decode:
            assert cache is not None
            self.forward_decode(query, cache, params, out, lse)
            return
        tiles = len(self.tile_seq)
        if tiles == 0:
            return
        batch, spec, none = self.batch, self.spec, self._no_tensor
        packed = cache is None or (
            batch.lens == batch.query_lens and cache.key.dtype == query.dtype and key is not None
        )
        if packed:
            cache = None
        else:
            assert cache is not None
            key, value = cache.key, cache.value
        assert key is not None and value is not None
        which = ("prefill", query.stride(), key.stride(), value.stride(), out.stride(), key.dtype,
                 packed, lse is None)  # fmt: skip
        site = self._sites.get(which)
        if site is None:
            config = self.prefill_config if packed else self.paged_config
            block_size = 1 if cache is None else cache.block_size
            constants = prefill_constants(spec, config, block_size, not packed, lse is not None)
            site = self._sites[which] = _site(
                prefill_kernel, query, key, value, out, constants, config, packed
            )
        table = None if packed else batch.block_table
        site(
            (tiles, spec.num_kv_heads, 1),
            (
                query, key, value, out, out if lse is None else lse,
                none if table is None else table, batch.seq_lens, self.starts, self.tile_seq,
                self.tile_start, none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            self._factors(self.quantized and not packed, params),
            (0 if lse is None else lse.stride(0), 0 if table is None else table.stride(0)),
        )  # fmt: skip

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        splits, none = self.splits, self._no_tensor
        which = (query.stride(), out.stride(), cache.form, splits > 1, self.few, lse is None)
        site = self._sites.get(which)
        if site is None:
            site = self._sites[which] = self._decode_site(query, cache, out, lse is not None)
        site(
            self._grid,
            (
                query, cache.key, cache.value, out, out if lse is None else lse,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            self._factors(self.quantized, params),
            (0 if lse is None else lse.stride(0), *self._table, splits),
            self._kept,
        )  # fmt: skip
        if splits > 1 and not self.merges_itself:
            self._merge(params, out, lse)

    def _decode_site(self, query: Tensor, cache: KVCache, out: Tensor, lse: bool) -> Site:
        key, value, split = cache.key, cache.value, self.splits > 1
        config = self.few_config if self.few else self.decode_config
        alike = key.stride() == value.stride()
        constants = decode_constants(
            self.spec, config, cache.block_size, split, lse, self.device.arch, alike
        )
        return _site(decode_kernel, query, key, value, out, constants, config, False)

    def _factors(self, quantized: bool, params: LayerParams) -> tuple[float, float, float]:
        """Return the scale of logits and of values, and the soft cap."""
        scale, soft_cap = self.spec.scale, self.spec.logit_soft_cap or 1.0
        if not quantized:
            return scale, 1.0, soft_cap
        return scale * params.k_scale, params.v_scale, soft_cap

    def _merge(self, params: LayerParams, out: Tensor, lse: Tensor | None) -> None:
        spec, splits = self.spec, self.splits
        block = merge_block(splits)
        key = ("merge", out.stride(), block, lse is None)
        site = self._sites.get(key)
        if site is None:
            constants = merge_constants(
                spec.num_heads, spec.v_head_size, splits, spec.learned_sinks, lse is not None,
                self.early,
            )  # fmt: skip
            early = {"launch_pdl": True} if self.early else {}
            site = Site(merge_kernel, out.stride()[:2], constants, {"num_warps": 2} | early)
            self._sites[key] = site
        site(
            (self.batch.num_seqs, spec.num_heads, 1),
            (
                self._parts, self._part_lse, out, out if lse is None else lse,
                self._part_lse if params.sinks is None else params.sinks,
            ),
            (params.v_scale if self.quantized else 1.0,),
            (0 if lse is None else lse.stride(0), splits),
        )  # fmt: skip


def _site(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    constants: tuple[Any, ...],
    config: Config,
    packed: bool,
) -> Site:
    """Specialise a kernel for these strides. `packed`: keys by token, one "block" of them all."""
    k, v = key.stride(), value.stride()
    strides = (0, k[0], k[1], 0, v[0], v[1]) if packed else (*k[:3], *v[:3])
    return Site(
        kernel, (*query.stride()[:2], *strides, *out.stride()[:2]), constants,
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )  # fmt: skip
