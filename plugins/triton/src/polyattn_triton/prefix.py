"""How does TRITON_ATTN read shared keys once? A launch over a forest's pieces, and one that merges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from polyattn.kernel import Batch, Device, KVCache, LayerParams, LayerSpec, Plan
from torch import Tensor

from polyattn_triton.launch import (
    Kept,
    Site,
    Workspace,
    fitting,
    launches_early,
    to_device,
)
from polyattn_triton.prefix_kernels import merge_parts_kernel, prefix_kernel
from polyattn_triton.prefix_schedule import (
    MOST_LEVELS,
    Heights,
    cut,
    room_for,
    tallest,
    tiles_of,
    work_of,
)
from polyattn_triton.variants import (
    heights_of,
    parts_constants,
    prefix_config,
    prefix_constants,
    prefix_on_one,
    rows_merged,
    shared_bytes,
)


class PrefixPlan(Plan):
    """One step of decodes over shared keys: its grid, its work and where in it what lies."""

    __slots__ = ("grid", "heights", "kept", "merging", "offsets", "table", "work")

    def __init__(self, batch: Batch, heights: Heights):
        super().__init__(batch)
        self.heights = heights
        self.grid: tuple[int, int, int]
        self.work: Tensor
        self.offsets: tuple[int, int, int, int]
        self.table = (0, 0)
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
        self.heights = heights_of(spec, device.arch)
        self._none = torch.empty(0, dtype=torch.int32, device=self.torch_device)
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._programs: dict[Heights, int] = {}

    def plan(self, batch: Batch, reuse: Plan | None = None) -> PrefixPlan:
        """Deal the pieces of a batch with a `shared_prefix` out to a full chip's programs.

        What is captured has room for any forest of `MOST_LEVELS` levels; of a deeper one the rest is
        each row's own.
        """
        spec, rows = self.spec, batch.num_seqs
        levels, table = batch.shared_prefix, batch.block_table
        assert levels is not None and table is not None
        if spec.graph_capture:
            levels = levels[:MOST_LEVELS]
            # As high as one run of all rows wants: the graph keeps its kernel.
            heights = tallest((rows,), (1,), spec.gqa_ratio, self.heights)
        else:
            runs = [run for level in levels for run in level]
            counts = [len(run.rows) for run in runs]
            heights = tallest(counts, [run.count for run in runs], spec.gqa_ratio, self.heights)
        programs = self.programs(heights)
        room = room_for(rows, programs, heights) if spec.graph_capture else None
        block = prefix_config(spec, self.device.arch, heights.tall).block_n
        tiles = tiles_of(levels, np.array(batch.lens, np.int32), self.block_size, heights)
        pieces = cut(tiles, heights, block, programs)
        work = work_of(tiles, pieces, spec.gqa_ratio, block, rows, programs, room)
        plan = PrefixPlan(batch, heights)
        plan.grid = (programs, spec.num_kv_heads, 1)
        before = reuse.work if isinstance(reuse, PrefixPlan) else None
        plan.work = to_device(work.array, self.torch_device, before)
        plan.offsets = (work.bounds, work.parts, work.list, work.part_rows)
        plan.table = (table.stride(0), table.shape[1] - 1)
        space = self.workspace
        space.reserve(work.part_rows * spec.num_kv_heads, spec.v_head_size, 0)
        plan.kept = Kept(space.parts, space.part_lse, table, batch.seq_lens, plan.work)
        plan.merging = Kept(space.parts, space.part_lse, plan.work)
        return plan

    def programs(self, heights: Heights) -> int:
        """Return how many programs of each KV head fill the chip."""
        found = self._programs.get(heights)
        if found is None:
            config = prefix_config(self.spec, self.device.arch, heights.tall)
            most = prefix_on_one(self.spec, config)
            on_one = fitting(self.torch_device, shared_bytes(self.spec, config, "few"), most)
            found = max(1, on_one * self.num_sms // self.spec.num_kv_heads)
            self._programs[heights] = found
        return found

    def run(self, plan: PrefixPlan, step: PrefixStep) -> None:
        """Attend to all pieces, then merge each row's parts."""
        spec, cache, params = self.spec, step.cache, step.params
        bounds, parts, listed, part_rows = plan.offsets
        which = (plan.heights, step.query.stride(), step.query.dtype, cache.strides)
        site = self._sites.get(which)
        if site is None:
            key, value = cache.key.stride(), cache.value.stride()
            config = prefix_config(spec, self.device.arch, plan.heights.tall)
            constants = prefix_constants(
                spec, config, plan.heights.small, cache.block_size, self.device.arch, key == value
            )
            site = self._sites[which] = Site(
                prefix_kernel, (*step.query.stride()[:2], *key[:3], *value[:3]), constants,
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )  # fmt: skip
        scale, v_scale, soft_cap = step.factors
        site(
            plan.grid, (step.query, cache.key, cache.value, *step.scales[:2]), (scale, soft_cap),
            (*plan.table, bounds, part_rows), plan.kept,
        )  # fmt: skip
        out, lse = step.out, step.lse
        which = ("merge", out.stride(), out.dtype, lse is None)
        site = self._sites.get(which)
        if site is None:
            early = {"launch_pdl": True} if self.early else {}
            constants = parts_constants(spec, lse is not None, self.early)
            site = Site(merge_parts_kernel, out.stride()[:2], constants, {"num_warps": 4} | early)
            self._sites[which] = site
        rows = rows_merged(spec)
        none = self._none
        site(
            (plan.batch.num_seqs, -(-spec.gqa_ratio // rows), spec.num_kv_heads),
            (
                out, out if lse is None else lse, none if params.sinks is None else params.sinks,
                *step.scales[2:],
            ),
            (v_scale,),
            (0 if lse is None else lse.stride(0), parts, listed, part_rows),
            plan.merging,
        )  # fmt: skip
