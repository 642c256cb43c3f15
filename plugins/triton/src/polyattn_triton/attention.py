"""TRITON_ATTN: plans tiles and splits on the host, launches the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import triton
from polyattn import AttentionBackend, Batch, Device, KVCache, LayerParams, LayerSpec
from polyattn.device import arch_matches
from torch import Tensor

from polyattn_triton.cache_write import write_kv
from polyattn_triton.configs import Config, pick
from polyattn_triton.kernels import attention_kernel, merge_kernel
from polyattn_triton.launch import Site, merge_block

MIN_SPLIT_KEYS = 128
"""A split below this costs more in the merge than it gains."""
MAX_SPLITS = 128


def attention_constants(
    spec: LayerSpec,
    config: Config,
    block_size: int,
    split: bool,
    decode: bool,
    paged: bool,
    lse: bool,
    early: bool,
) -> tuple[Any, ...]:
    """Return `attention_kernel`'s constants, in its order."""
    return (
        spec.gqa_ratio, spec.num_heads, spec.head_size, spec.v_head_size,
        triton.next_power_of_2(max(16, spec.head_size)),
        triton.next_power_of_2(max(16, spec.v_head_size)),
        config.block_m, config.block_n, block_size, split, decode, paged, spec.causal,
        spec.sliding_window or 0, spec.chunk_size or 0, spec.sink_tokens,
        spec.logit_soft_cap is not None, spec.alibi, spec.learned_sinks and not split,
        lse and not split, early and split,
    )  # fmt: skip


def tile_config(spec: LayerSpec, arch: str, phase: str) -> Config:
    """Return the configuration of a phase (prefill, paged, decode) on `arch`."""
    width = triton.next_power_of_2(max(16, spec.head_size, spec.v_head_size))
    config = pick(arch, phase, width, 4 if spec.dtype == "float32" else 2)
    rows = max(config.block_m, triton.next_power_of_2(spec.gqa_ratio))
    return replace(config, block_m=rows)


class TritonAttention(AttentionBackend):
    """Prefill by tiles of a host-made work list, decode by sequence with split-KV."""

    name: ClassVar[str] = "TRITON_ATTN"

    def __init__(self, spec: LayerSpec, device: Device):
        super().__init__(spec, device)
        self.block_dv = triton.next_power_of_2(max(16, spec.v_head_size))
        self.decode_config = tile_config(spec, device.arch, "decode")
        self.prefill_config = tile_config(spec, device.arch, "prefill")
        # The plan lists tiles before it is known where the keys are read from.
        self.paged_config = replace(
            tile_config(spec, device.arch, "paged"), block_m=self.prefill_config.block_m
        )
        self.torch_device = torch.device(str(device.torch_device))
        self.num_sms = (
            torch.cuda.get_device_properties(self.torch_device).multi_processor_count
            if self.torch_device.type == "cuda"
            else 4
        )
        self.early = device.platform == "cuda" and arch_matches("sm_90+", device.arch)
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._parts = torch.empty(0, device=self.torch_device)
        self._part_lse = torch.empty(0, device=self.torch_device)
        self._no_tensor = torch.empty(0, dtype=torch.int32, device=self.torch_device)

    def plan(self, batch: Batch) -> None:
        self.batch = batch
        self.decode = batch.num_decodes == batch.num_seqs and self.spec.role.has_cache
        if self.decode:
            self._plan_splits(batch)
        else:
            self._plan_tiles(batch)

    def _plan_splits(self, batch: Batch) -> None:
        """Split the keys until the chip is full, and size the workspace once for it."""
        spec = self.spec
        longest = batch.max_seq_len
        for limit in (
            spec.sliding_window and spec.sliding_window + spec.sink_tokens,
            spec.chunk_size,
        ):
            longest = min(longest, limit or longest)
        programs = max(1, batch.num_seqs * spec.num_kv_heads)
        wanted = -(-2 * self.num_sms // programs)
        most = -(-longest // MIN_SPLIT_KEYS)
        if spec.graph_capture:  # a captured graph keeps its number of splits whatever the lengths
            most = MAX_SPLITS
        # Powers of two: the merge's tile holds one.
        self.splits = triton.next_power_of_2(max(1, min(wanted, most, MAX_SPLITS)))
        rows = batch.num_seqs * spec.num_heads * self.splits
        if self.splits > 1 and self._part_lse.numel() < rows:
            self._parts = torch.empty(rows * spec.v_head_size, device=self.torch_device)
            self._part_lse = torch.empty(rows, device=self.torch_device)

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
        batch = self.batch
        if cache is None or (
            batch.lens == batch.query_lens and cache.key.dtype == query.dtype and key is not None
        ):
            assert key is not None and value is not None
            self._launch(
                (tiles, self.spec.num_kv_heads, 1), query, key, value, None, params, out, lse
            )
        else:
            grid = (tiles, self.spec.num_kv_heads, 1)
            self._launch(grid, query, cache.key, cache.value, cache, params, out, lse)

    def forward_decode(
        self,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        spec, splits, count = self.spec, self.splits, self.batch.num_seqs
        grid = (count, spec.num_kv_heads, splits)
        self._launch(grid, query, cache.key, cache.value, cache, params, out, lse)
        if splits > 1:
            self._merge(count, cache.key.dtype.itemsize == 1, params, out, lse)

    def _merge(
        self, count: int, quantized: bool, params: LayerParams, out: Tensor, lse: Tensor | None
    ) -> None:
        spec, splits = self.spec, self.splits
        block = merge_block(splits)
        key = ("merge", out.stride(), block, lse is None)
        site = self._sites.get(key)
        if site is None:
            constants = (
                spec.num_heads, spec.v_head_size, self.block_dv, block, spec.learned_sinks,
                lse is not None, self.early,
            )  # fmt: skip
            early = {"launch_pdl": True} if self.early else {}
            site = Site(merge_kernel, out.stride()[:2], constants, {"num_warps": 2} | early)
            self._sites[key] = site
        site(
            (count, spec.num_heads, 1),
            (
                self._parts, self._part_lse, out, out if lse is None else lse,
                self._part_lse if params.sinks is None else params.sinks,
            ),
            (params.v_scale if quantized else 1.0,),
            (0 if lse is None else lse.stride(0), splits),
        )  # fmt: skip

    def _launch(
        self,
        grid: tuple[int, int, int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        spec, batch, none = self.spec, self.batch, self._no_tensor
        quantized = key.dtype.itemsize == 1
        decode = self.decode
        which = (
            query.stride(), key.stride(), value.stride(), out.stride(), key.dtype,
            cache is None, grid[2] > 1, decode, lse is None,
        )  # fmt: skip
        site = self._sites.get(which)
        if site is None:
            site = self._sites[which] = self._site(query, key, value, cache, out, grid[2] > 1, lse)
        table = batch.block_table if cache is not None else None
        site(
            grid,
            (
                query, key, value, out, out if lse is None else lse, self._parts, self._part_lse,
                none if table is None else table, batch.seq_lens,
                none if decode else self.starts,
                none if decode else self.tile_seq, none if decode else self.tile_start,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            (
                spec.scale * (params.k_scale if quantized else 1.0),
                params.v_scale if quantized else 1.0,
                spec.logit_soft_cap or 1.0,
            ),
            (
                0 if lse is None else lse.stride(0), 0 if table is None else table.stride(0), grid[2],
            ),
        )  # fmt: skip

    def _site(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache | None,
        out: Tensor,
        split: bool,
        lse: Tensor | None,
    ) -> Site:
        """Specialise the kernel for these strides and this phase."""
        config = self.decode_config
        if not self.decode:
            config = self.prefill_config if cache is None else self.paged_config
        k, v = key.stride(), value.stride()
        if cache is None:  # packed tokens: one "block" that holds them all
            strides = (0, k[0], k[1], 0, v[0], v[1])
        else:
            strides = (k[0], k[1], k[2], v[0], v[1], v[2])
        constants = attention_constants(
            self.spec, config, 1 if cache is None else cache.block_size, split, self.decode,
            cache is not None, lse is not None, self.early,
        )  # fmt: skip
        return Site(
            attention_kernel, (*query.stride()[:2], *strides, *out.stride()[:2]), constants,
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip
