"""How does TRITON_ATTN read shared keys once? A launch over a forest's pieces, and one that merges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from polyattn.kernel import Batch, Device, KVCache, LayerParams, LayerSpec, Plan, SharedRun
from torch import Tensor

from polyattn_triton.configs import PrefixConfig
from polyattn_triton.functions.rows import NO_ROWS, Rows
from polyattn_triton.kernels.prefix import merge_parts_kernel, prefix_kernel
from polyattn_triton.launch import Kept, Site, Workspace, fitting, launches_early, power
from polyattn_triton.plan import StepPlan
from polyattn_triton.prefix_schedule import (
    MOST_LEVELS,
    Shape,
    Tokens,
    cut,
    fastest,
    room_for,
    tiles_of,
    work_of,
)
from polyattn_triton.variants import (
    parts_constants,
    prefix_bytes,
    prefix_constants,
    prefix_tiles,
    rows_merged,
)


class PrefixPlan(StepPlan):
    """One step of decodes over shared keys: its grid, its work and where in it what lies.

    `several`: some rows have several tokens.
    """

    __slots__ = (
        "config",
        "grid",
        "kept",
        "merging",
        "offsets",
        "places",
        "several",
        "table",
        "work",
    )

    def __init__(self, batch: Batch, config: PrefixConfig):
        super().__init__(batch)
        self.config = config
        self.grid: tuple[int, int, int]
        self.work: Tensor
        self.offsets: tuple[int, int, int, int]
        self.table, self.places, self.several = (0, 0), 0, False
        self.kept: Kept
        self.merging: Kept


class PrefixStep(NamedTuple):
    """What a launch takes beside its plan; scales as `TritonAttention._scales` returns them."""

    query: Tensor
    cache: KVCache
    params: LayerParams
    out: Tensor
    lse: Tensor | None
    scales: tuple[Tensor, Tensor, Tensor, Tensor]
    factors: tuple[float, float, float]


class PrefixLauncher:
    """Plans and launches for one backend; its workspace is the backend's own."""

    def __init__(
        self, spec: LayerSpec, block_size: int, device: Device, num_sms: int, workspace: Workspace
    ):
        self.spec, self.block_size, self.device = spec, block_size, device
        self.num_sms, self.workspace = num_sms, workspace
        self.torch_device = torch.device(str(device.torch_device))
        self.early = launches_early(device.arch)
        self.configs = prefix_tiles(spec, device.arch)
        self.small = power(spec.gqa_ratio)
        self._none = torch.empty(0, dtype=torch.int32, device=self.torch_device)
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._programs: dict[PrefixConfig, int] = {}

    def plan(self, batch: Batch, reuse: Plan | None = None) -> PrefixPlan:
        """Deal the pieces of a batch with a `shared_prefix` out to a full chip's programs.

        What is captured has room for any forest of `MOST_LEVELS` levels; of a deeper one the rest is
        each row's own.
        """
        spec, rows = self.spec, batch.num_seqs
        levels, table = batch.shared_prefix, batch.block_table
        assert levels is not None and table is not None
        tokens = Tokens.of(
            batch.host_lens.astype(np.int32), batch.host_query_lens, spec.sliding_window or 0
        )
        judged = levels
        if spec.graph_capture:
            levels = levels[:MOST_LEVELS]
            # The graph keeps its kernel: that for a run of all rows, as long as the table is wide.
            judged = ((SharedRun(tuple(range(rows)), 0, table.shape[1]),),)
        config = fastest(judged, tokens.count, self.block_size, spec.gqa_ratio, self.configs)
        shape = Shape(spec.gqa_ratio, self.small, config)
        programs = self.programs(config)
        room = room_for(rows, programs, shape) if spec.graph_capture else None
        tiles = tiles_of(levels, tokens, self.block_size, shape)
        pieces = cut(tiles, shape, programs)
        work = work_of(tiles, pieces, shape, batch.num_tokens, programs, room)
        plan = PrefixPlan(batch, config)
        plan.grid = (programs, spec.num_kv_heads, 1)
        before = reuse.work if isinstance(reuse, PrefixPlan) else None
        plan.several, array = not batch.all_decode, work.array
        if plan.several or spec.sliding_window or spec.alibi:
            array = np.concatenate((array, tokens.positions().astype(np.int32)))
        plan.work = batch.upload(array, before)
        plan.places = len(work.array)
        plan.offsets = (work.bounds, work.parts, work.list, work.part_rows)
        plan.table = (table.stride(0), table.shape[1] - 1)
        space = self.workspace
        space.reserve(work.part_rows * spec.num_kv_heads, spec.v_head_size, 0)
        plan.kept = Kept((space.parts, space.part_lse, table, plan.work))
        plan.merging = Kept((space.parts, space.part_lse, plan.work))
        return plan

    def programs(self, config: PrefixConfig) -> int:
        """Return how many programs of each KV head fill the chip."""
        most = self._programs.get(config)
        if most is None:
            needed = prefix_bytes(self.spec, config)
            on_one = fitting(self.torch_device, needed, config.on_one)
            most = max(1, on_one * self.num_sms // self.spec.num_kv_heads)
            self._programs[config] = most
        return most

    def run(self, plan: PrefixPlan, step: PrefixStep) -> None:
        """Attend to all pieces, then merge each row's parts."""
        spec, cache, params = self.spec, step.cache, step.params
        bounds, _, _, part_rows = plan.offsets
        which: tuple[Any, ...] = (
            plan.config,
            plan.several,
            step.query.stride(),
            step.query.dtype,
            cache.strides,
            cache.alignment,
        )
        site = self._sites.get(which)
        if site is None:
            key, value = cache.key.stride(), cache.value.stride()
            config = plan.config
            read = Rows.of(cache.format, cache.alignment, spec.dtype)
            constants = prefix_constants(
                spec,
                config,
                cache.block_size,
                self.device.arch,
                key == value,
                NO_ROWS if read is None else read.constants(apart=False),
                plan.several,
            )
            site = self._sites[which] = Site(
                prefix_kernel,
                (*step.query.stride()[:2], *key[:3], *value[:3]),
                constants,
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )
        scale, _, soft_cap = step.factors
        slopes = self._none if params.alibi_slopes is None else params.alibi_slopes
        site(
            plan.grid,
            (step.query, cache.key, cache.value, slopes, *step.scales[:2]),
            (scale, soft_cap),
            (*plan.table, bounds, part_rows, plan.places),
            plan.kept,
        )
        self._merge(plan, step)

    def _merge(self, plan: PrefixPlan, step: PrefixStep) -> None:
        spec, sinks, none = self.spec, step.params.sinks, self._none
        _, parts, listed, part_rows = plan.offsets
        out, lse = step.out, step.lse
        which: tuple[Any, ...] = ("merge", out.stride(), out.dtype, lse is None)
        site = self._sites.get(which)
        if site is None:
            early = {"launch_pdl": True} if self.early else {}
            constants = parts_constants(spec, lse is not None, self.early)
            site = Site(merge_parts_kernel, out.stride()[:2], constants, {"num_warps": 4} | early)
            self._sites[which] = site
        rows = rows_merged(spec)
        site(
            (plan.batch.num_tokens, -(-spec.gqa_ratio // rows), spec.num_kv_heads),
            (out, out if lse is None else lse, none if sinks is None else sinks, *step.scales[2:]),
            (step.factors[1],),
            (0 if lse is None else lse.stride(0), parts, listed, part_rows),
            plan.merging,
        )
