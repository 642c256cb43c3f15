"""TRITON_ATTN: plans tiles and splits on the host, launches the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
)
from torch import Tensor

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


class AttentionPlan(Plan):
    """One step: a decode's splits and grid, or a prefill's tiles, and what its launches share."""

    __slots__ = ("few", "grid", "kept", "key_starts", "splits", "table", "tile_seq", "tile_start")

    splits: int
    few: bool
    kept: Kept
    table: tuple[int, int]
    grid: tuple[int, int, int]
    tile_seq: Tensor | None
    tile_start: Tensor
    key_starts: Tensor


class TritonAttention(AttentionBackend):
    """Prefill by tiles of a host-made work list, decode by sequence with split-KV."""

    name: ClassVar[str] = "TRITON_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
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

    def plan(self, batch: Batch, reuse: Plan | None = None) -> AttentionPlan:
        """Split a decode's keys, list a prefill's tiles."""
        plan = AttentionPlan(batch)
        plan.tile_seq = None
        if batch.all_decode and batch.block_table is not None:
            self._settle(plan, self._splits(batch))
        else:
            self._plan_tiles(plan)
        return plan

    def _splits(self, batch: Batch) -> int:
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
        return max(1, min(wanted, most, MAX_SPLITS))

    def _settle(self, plan: AttentionPlan, splits: int) -> None:
        """Keep what a step's launches have in common."""
        batch = plan.batch
        programs = batch.num_seqs * self.spec.num_kv_heads * splits
        plan.splits = splits
        plan.few = programs <= FEW_ON_ONE * self.num_sms
        if splits > 1 and not self._done.numel():
            self._allocate()
        table = batch.block_table
        assert table is not None
        plan.kept = Kept(self._parts, self._part_lse, self._done, table, batch.seq_lens)
        plan.table = table.stride(0), table.shape[1] - 1
        plan.grid = (batch.num_seqs, self.spec.num_kv_heads, splits)

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

    def _plan_tiles(self, plan: AttentionPlan) -> None:
        """List (sequence, first query) of every tile, the ones with most keys first."""
        batch = plan.batch
        step = self.prefill_config.block_m // self.spec.gqa_ratio
        tiles = [
            (batch.lens[seq] - length + start, seq, start)
            for seq, length in enumerate(batch.query_lens)
            for start in range(0, length, step)
        ]
        tiles.sort(reverse=True)
        packed = torch.tensor(
            [[t[1] for t in tiles], [t[2] for t in tiles]], dtype=torch.int32
        ).view(2, -1)
        starts = torch.tensor(batch.key_starts, dtype=torch.int32)
        if self.torch_device.type == "cuda":
            packed = packed.pin_memory().to(self.torch_device, non_blocking=True)
            starts = starts.pin_memory().to(self.torch_device, non_blocking=True)
        plan.tile_seq, plan.tile_start = packed
        plan.key_starts = starts

    def run(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend as planned."""
        assert isinstance(plan, AttentionPlan)
        if plan.tile_seq is None:
            assert cache is not None
            self._decode(plan, query, cache, params, out, lse)
        elif len(plan.tile_seq):
            self._prefill(plan, query, key, value, cache, params, out, lse)

    def _prefill(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert plan.tile_seq is not None
        batch, spec, none = plan.batch, self.spec, self._no_tensor
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
            (len(plan.tile_seq), spec.num_kv_heads, 1),
            (
                query, key, value, out, out if lse is None else lse,
                none if table is None else table, batch.seq_lens, batch.query_start_loc,
                plan.key_starts, plan.tile_seq, plan.tile_start,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            self._factors(self.quantized and not packed, params),
            (0 if lse is None else lse.stride(0), 0 if table is None else table.stride(0)),
        )  # fmt: skip

    def _decode(
        self,
        plan: AttentionPlan,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        splits, none = plan.splits, self._no_tensor
        which = (query.stride(), out.stride(), cache.strides, splits > 1, plan.few, lse is None)
        site = self._sites.get(which)
        if site is None:
            site = self._sites[which] = self._decode_site(plan, query, cache, out, lse is not None)
        site(
            plan.grid,
            (
                query, cache.key, cache.value, out, out if lse is None else lse,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            self._factors(self.quantized, params),
            (0 if lse is None else lse.stride(0), *plan.table, splits),
            plan.kept,
        )  # fmt: skip
        if splits > 1 and not self.merges_itself:
            self._merge(plan, params, out, lse)

    def _decode_site(
        self, plan: AttentionPlan, query: Tensor, cache: KVCache, out: Tensor, lse: bool
    ) -> Site:
        key, value, split = cache.key, cache.value, plan.splits > 1
        config = self.few_config if plan.few else self.decode_config
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

    def _merge(
        self, plan: AttentionPlan, params: LayerParams, out: Tensor, lse: Tensor | None
    ) -> None:
        spec, splits = self.spec, plan.splits
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
            (plan.batch.num_seqs, spec.num_heads, 1),
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
