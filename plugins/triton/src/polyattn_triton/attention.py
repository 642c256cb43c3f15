"""TRITON_ATTN: deals tiles and their keys out on the host, launches the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
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

from polyattn_triton.configs import Config
from polyattn_triton.decode import decode_kernel, merge_kernel
from polyattn_triton.launch import (
    Kept,
    Site,
    Workspace,
    fitting,
    launches_early,
    merge_constants,
    merge_rows,
    multiprocessors,
    to_device,
)
from polyattn_triton.prefill import prefill_kernel
from polyattn_triton.schedule import (
    EVEN,
    Ints,
    Rates,
    Tiles,
    key_tiles,
    max_parts,
    rows_of,
    stretches,
    whole,
)
from polyattn_triton.variants import (
    FEW_ON_ONE,
    FEW_SPLITS,
    MANY_ON_ONE,
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    MOST_FEW_ROWS,
    decode_constants,
    even_splits,
    merges_itself,
    on_one,
    part_rows,
    prefill_constants,
    shared_bytes,
    tile_config,
)

RATES = Rates(item=1, least=2)
"""Key tiles that a tile of queries costs beside its own, and that are worth a program."""


class AttentionPlan(Plan):
    """One step: the way it runs, and what its launches have in common.

    `config`: its tiles'. `rows`: of a tile's part in the workspace. `merge`: whether a second kernel
    merges parts. `variant`: what of all this a compiled kernel depends on. `table`: the block table's
    stride and last column. `fresh`: all keys are the step's own.
    """

    __slots__ = (
        "config", "fresh", "grid", "kept", "merge", "rows", "splits", "table", "variant", "way",
        "work",
    )  # fmt: skip

    def __init__(self, batch: Batch, work: Tensor):
        super().__init__(batch)
        self.way, self.splits, self.rows, self.merge, self.fresh = "decode", 1, 0, False, False
        self.work, self.table = work, (0, 0)
        self.grid: tuple[int, int, int] = (0, 1, 1)
        self.config: Config
        self.kept: Kept
        self.variant: tuple[Any, ...]


class TritonAttention(AttentionBackend):
    """Decode and prefill over tiles of (token, head of group) rows, keys split where that helps."""

    name: ClassVar[str] = "TRITON_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        arch = device.arch
        self.decode_config = tile_config(spec, arch, "decode")
        self.few_config = tile_config(spec, arch, "few")
        self.prefill_config = tile_config(spec, arch, "prefill")
        # The plan lists tiles before it is known where the keys are read from.
        self.paged_config = replace(
            tile_config(spec, arch, "paged"), block_m=self.prefill_config.block_m,
            block_n=self.prefill_config.block_n,
        )  # fmt: skip
        self.torch_device = torch.device(str(device.torch_device))
        self.num_sms = multiprocessors(self.torch_device)
        self.early = launches_early(arch)
        self.rates, self.most_few_rows = RATES, MOST_FEW_ROWS
        self.on_one = 0  # what a tuner sets instead of what is planned
        self.rows = part_rows(spec, self.few_config, False)
        self.itself = merges_itself(spec, arch, self.rows)
        self.quantized = STORAGE_DTYPES[spec.stored_dtype].itemsize == 1
        self.workspace = Workspace(self.torch_device)
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._residents: dict[tuple[Any, ...], int] = {}
        self._none = torch.empty(0, dtype=torch.int32, device=self.torch_device)

    # Planning.

    def plan(self, batch: Batch, reuse: Plan | None = None) -> AttentionPlan:
        """Decide the way, and deal the step's tiles out."""
        plan = AttentionPlan(batch, self._none)
        before = reuse.work if isinstance(reuse, AttentionPlan) else None
        table = batch.block_table
        if table is not None:
            plan.table = (table.stride(0), table.shape[1] - 1)
        if table is not None and batch.all_decode:
            self._plan_decode(plan, before)
        elif table is not None and batch.max_query_len * self.spec.gqa_ratio <= self.most_few_rows:
            self._plan_few(plan, before)
        else:
            self._plan_prefill(plan, before)
        space, none, starts = self.workspace, self._none, batch.query_start_loc
        table = none if table is None else table
        if plan.way in ("prefill", "pieces"):
            keys = self._key_starts(batch) if plan.fresh else none
            plan.kept = Kept(
                space.parts, space.part_lse, table, batch.seq_lens, starts, keys, plan.work
            )
        else:
            plan.kept = Kept(
                space.parts, space.part_lse, space.done, table, batch.seq_lens, starts, plan.work
            )
        config = plan.config
        plan.variant = (
            plan.way, config.block_m, config.block_n, config.num_warps, config.num_stages
        )  # fmt: skip
        return plan

    def _plan_decode(self, plan: AttentionPlan, before: Tensor | None) -> None:
        """One tile a sequence: even splits of even lengths, else stretches."""
        spec, batch = self.spec, plan.batch
        plan.config, plan.rows = self.few_config, self.rows
        lens = np.array(batch.lens, np.int32)
        last = lens - 1
        keys = key_tiles(spec, last, last, lens, plan.config.block_n)
        total, longest = int(keys.sum()), int(keys.max())
        if not spec.graph_capture and longest <= EVEN * total / len(keys) + 1:
            splits = self.splits(batch)
            if self.itself or splits == 1:
                programs = batch.num_seqs * spec.num_kv_heads * splits
                if programs > FEW_ON_ONE * self.num_sms:
                    plan.config = self.decode_config
                plan.grid = (batch.num_seqs, spec.num_kv_heads, splits)
                plan.way, plan.splits = "split" if splits > 1 else "decode", splits
                self._reserve(plan.rows, MANY_ON_ONE * self.num_sms)
                return
        plan.way, plan.merge = "listed", not self.itself
        self._deal(plan, keys, None, before, (total, longest))

    def splits(self, batch: Batch) -> int:
        """Return into how many even splits keys are cut: until the chip is full."""
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
        return max(1, min(wanted, -(-longest // MIN_SPLIT_KEYS), MAX_SPLITS))

    def _plan_few(self, plan: AttentionPlan, before: Tensor | None) -> None:
        """Tiles as high as the longest query needs, by stretches."""
        spec = self.spec
        rows = plan.batch.max_query_len * spec.gqa_ratio
        plan.config = tile_config(spec, self.device.arch, "few", rows)
        plan.way, plan.rows = "few", plan.config.block_m
        plan.merge = not merges_itself(spec, self.device.arch, plan.rows)
        tiles = self._tiles(plan)
        self._deal(plan, tiles.keys, tiles, before)

    def _plan_prefill(self, plan: AttentionPlan, before: Tensor | None) -> None:
        """Whole tiles, the ones with most keys first, where they end together; else stretches."""
        batch, heads = plan.batch, self.spec.num_kv_heads
        plan.fresh = batch.block_table is None or batch.lens == batch.query_lens
        plan.way, plan.config = "prefill", self.prefill_config if plan.fresh else self.paged_config
        tiles = self._tiles(plan)
        if not len(tiles.keys):
            return
        order = whole(tiles.keys, max(1, self._resident(plan) * self.num_sms // heads), self.rates)
        if order is None:
            plan.way, plan.rows, plan.merge = "pieces", plan.config.block_m, True
            self._deal(plan, tiles.keys, tiles, before)
            return
        plan.grid = (len(order), heads, 1)
        work = np.concatenate([tiles.seq[order], tiles.row[order]]).astype(np.int32)
        plan.work = to_device(work, self.torch_device, before)

    def _tiles(self, plan: AttentionPlan) -> Tiles:
        """Cut the queries into tiles, and count the key tiles that each one sees."""
        batch, group, config = plan.batch, self.spec.gqa_ratio, plan.config
        queries, lens = np.array(batch.query_lens), np.array(batch.lens)
        seq, row = rows_of(queries, group, config.block_m)
        context = (lens - queries)[seq]
        last = np.minimum(row + config.block_m, queries[seq] * group) - 1
        keys = key_tiles(
            self.spec, context + row // group, context + last // group, lens[seq], config.block_n
        )
        return Tiles(seq, row, keys)

    def _resident(self, plan: AttentionPlan) -> int:
        """Return how many of a plan's programs a multiprocessor holds at once."""
        key = (plan.way, plan.config, self.on_one)
        found = self._residents.get(key)
        if found is None:
            most = self.on_one or on_one(self.spec, plan.config, plan.way)
            needed = shared_bytes(self.spec, plan.config, plan.way)
            found = self._residents[key] = fitting(self.torch_device, needed, most)
        return found

    def _deal(
        self,
        plan: AttentionPlan,
        keys: Ints,
        tiles: Tiles | None,
        before: Tensor | None,
        most: tuple[int, int] | None = None,
    ) -> None:
        """Give each of a full chip's programs a stretch of the tiles."""
        heads = self.spec.num_kv_heads
        if not len(keys):
            return
        programs = max(1, self._resident(plan) * self.num_sms // heads)
        plan.grid = (programs, heads, 1)
        work = stretches(keys, programs, self.rates, most).work(tiles)
        plan.work = to_device(work, self.torch_device, before)
        self._reserve(plan.rows, max(programs * heads, MANY_ON_ONE * self.num_sms))

    def _reserve(self, rows: int, programs: int) -> None:
        """Have the workspace of a full chip at once: a captured graph goes on writing to it."""
        self.workspace.reserve(max_parts(programs) * rows, self.spec.v_head_size, programs)

    def _key_starts(self, batch: Batch) -> Tensor:
        """Return where sequences' own keys start, on the device."""
        if batch.block_table is not None or (batch.keys_packed and batch.lens == batch.query_lens):
            return batch.query_start_loc
        return to_device(np.array(batch.key_starts, np.int32), self.torch_device, None)

    # Running.

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
        if not plan.grid[0]:
            return
        if plan.way in ("prefill", "pieces"):
            self._prefill(plan, query, key, value, cache, params, out, lse)
        else:
            assert cache is not None
            self._decode(plan, query, cache, params, out, lse)
        if plan.merge:
            v_scale = params.v_scale if self.quantized and cache is not None else 1.0
            self._merge(plan, params, out, lse, v_scale)

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
        spec, none = self.spec, self._none
        packed = plan.fresh and (
            cache is None or (cache.key.dtype == query.dtype and key is not None)
        )
        if packed:
            cache = None
        else:
            assert cache is not None
            key, value = cache.key, cache.value
        assert key is not None and value is not None
        which = (plan.variant, query.stride(), key.stride(), value.stride(), out.stride(), key.dtype,
                 packed, lse is None)  # fmt: skip
        site = self._sites.get(which)
        if site is None:
            config = self.prefill_config if packed else self.paged_config
            block_size = 1 if cache is None else cache.block_size
            constants = prefill_constants(
                spec, config, block_size, not packed, plan.way == "pieces", lse is not None,
                self.device.arch,
            )  # fmt: skip
            site = self._sites[which] = _site(
                prefill_kernel, query, key, value, out, constants, config, packed
            )
        site(
            plan.grid,
            (
                query, key, value, out, out if lse is None else lse,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            self._factors(self.quantized and not packed, params),
            (0 if lse is None else lse.stride(0), plan.table[0]),
            plan.kept,
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
        none = self._none
        which = (plan.variant, query.stride(), out.stride(), cache.strides, lse is None)
        site = self._sites.get(which)
        if site is None:
            key, value = cache.key, cache.value
            constants = decode_constants(
                self.spec, plan.config, cache.block_size, plan.way, lse is not None,
                self.device.arch, key.stride() == value.stride(),
            )  # fmt: skip
            site = self._sites[which] = _site(
                decode_kernel, query, key, value, out, constants, plan.config, False
            )
        site(
            plan.grid,
            (
                query, cache.key, cache.value, out, out if lse is None else lse,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
            ),
            self._factors(self.quantized, params),
            (0 if lse is None else lse.stride(0), *plan.table, plan.splits),
            plan.kept,
        )  # fmt: skip

    def _factors(self, quantized: bool, params: LayerParams) -> tuple[float, float, float]:
        """Return the scale of logits and of values, and the soft cap."""
        scale, soft_cap = self.spec.scale, self.spec.logit_soft_cap or 1.0
        if not quantized:
            return scale, 1.0, soft_cap
        return scale * params.k_scale, params.v_scale, soft_cap

    def _merge(
        self,
        plan: AttentionPlan,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
        v_scale: float,
    ) -> None:
        spec = self.spec
        # The plan's own buffers: a later plan may have made the workspace grow.
        parts, part_lse = plan.kept.tensors[:2]
        key = ("merge", plan.way, plan.rows, out.stride(), lse is None)
        site = self._sites.get(key)
        if site is None:
            constants = merge_constants(
                spec.gqa_ratio, spec.v_head_size, plan.rows, plan.way != "listed",
                plan.way == "listed", spec.learned_sinks, lse is not None, self.early,
            )  # fmt: skip
            early = {"launch_pdl": True} if self.early else {}
            site = Site(merge_kernel, out.stride()[:2], constants, {"num_warps": 4} | early)
            self._sites[key] = site
        rows = merge_rows(plan.rows, spec.v_head_size)
        site(
            (plan.grid[0], -(-plan.rows // rows), spec.num_kv_heads),
            (
                parts, part_lse, out, out if lse is None else lse,
                part_lse if params.sinks is None else params.sinks,
                plan.batch.seq_lens, plan.batch.query_start_loc, plan.work,
            ),
            (v_scale,),
            (0 if lse is None else lse.stride(0),),
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
