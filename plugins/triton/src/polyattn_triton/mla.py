"""TRITON_MLA and TRITON_MLA_SPARSE: deal tiles and their keys out on the host, launch the kernel."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import numpy as np
import torch
import triton
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    Reads,
    SparseBackend,
    in_turn,
)
from torch import Tensor

from polyattn_triton.configs import MLAConfig, pick_mla
from polyattn_triton.kernels.choice import chosen_places_kernel
from polyattn_triton.kernels.mla import mla_kernel
from polyattn_triton.kernels.parts import merge_kernel
from polyattn_triton.launch import (
    Launcher,
    Merge,
    Workspace,
    fitting,
    launches_early,
    merge_constants,
    merge_options,
    multiprocessors,
    power,
)
from polyattn_triton.plan import LatentPlan, Way
from polyattn_triton.reading import latent_reads
from polyattn_triton.schedule import (
    ROOM,
    Line,
    Rates,
    Tiles,
    in_lanes,
    launches_of,
    max_parts,
    rows_of,
    segments,
    stretches,
    whole,
)

HALF, ROPE = 256, 64
"""Columns of a latent that are copied at once: of the latent proper, and what is rotated."""
FEW_HEADS = 32
"""Heads at most of Hopper's kernels whose tiles lie on their sides."""
FEW_HEADS_OPTIONS = {"num_warps": 4, "maxnreg": 128}
"""Their launch options: two programs share a multiprocessor's registers."""
PLACES = 512
"""Entries that a program places."""
SEGMENT = 32
"""Keys of a segment for each row of a tile, where bits must not follow from the step: a part, which is
written and read in float32, is a ninth of 16-bit latents of 576."""
RATES = Rates(item=2, least=2)
"""A tile of queries is loaded, and the pipeline starts anew; nothing else runs meanwhile."""
ROLES_RATES = Rates(item=4, least=0)
"""The same of Hopper's kernel with roles, whose pipeline is deeper."""
FEW_HEADS_RATES = Rates(item=1, least=0)
"""The same for its kernels for few heads, beside which another program runs."""
try:
    from polyattn_triton.hopper.choice import DEFAULT_WARPS, box_rows
    from polyattn_triton.hopper.descriptors import described
    from polyattn_triton.hopper.few_heads import few_heads_kernel
    from polyattn_triton.hopper.latent_bytes import latent_bytes_kernel
    from polyattn_triton.hopper.latents import latents_kernel
    from polyattn_triton.hopper.mla import mla_hopper_kernel as mla_hopper_kernel
except ImportError:  # a Triton whose Gluon lacks what the kernel needs: the portable one serves
    mla_hopper_kernel = latents_kernel = few_heads_kernel = latent_bytes_kernel = None

_mla, _merge = Launcher(mla_kernel), Launcher(merge_kernel)
_places = Launcher(chosen_places_kernel)
_mla_hopper, _latents = Launcher(mla_hopper_kernel), Launcher(latents_kernel)
_few_heads, _latent_bytes = Launcher(few_heads_kernel), Launcher(latent_bytes_kernel)


def mla_config(spec: LayerSpec, arch: str) -> MLAConfig:
    """Return the configuration, of the kernels that this Triton can compile."""
    gluon = mla_hopper_kernel is not None
    if not gluon and pick_mla(spec, arch, gluon=True).hopper:
        logging.getLogger("polyattn").warning(
            "TRITON_MLA runs its portable kernel on %s, a third slower: Triton %s's Gluon lacks what "
            "the kernel for Hopper needs; install triton 3.6",
            arch,
            triton.__version__,
        )
    return pick_mla(spec, arch, gluon)


def mla_constants(
    spec: LayerSpec, config: MLAConfig, block_size: int, way: Way, sparse: bool, lse: bool,
    early: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the kernel's constants, in its order."""
    assert spec.latent is not None
    rank, rope = spec.latent.rank, spec.latent.rope_head_size
    tiles = (
        config.block_h, config.block_n, block_size, way.split, sparse, way.few, lse,
        early and way.split,
    )  # fmt: skip
    if config.hopper:
        return (spec.num_heads, rank, rope, *tiles)
    return (spec.num_heads, rank, rope, power(rank), power(rope), *tiles, config.apart)


def latents_constants(
    spec: LayerSpec, block_size: int, way: Way, lse: bool
) -> tuple[int, int, int, bool]:
    """Return the constants of Hopper's kernel with roles, in its order."""
    return spec.num_heads, block_size, way.few, lse


def holds_whole_tiles(config: MLAConfig, cache: CacheFormat | None) -> bool:
    """Whether blocks hold whole tiles of keys.

    For others ptxas makes code of `hopper.latent_bytes` that reads a register which nothing wrote.
    """
    return cache is not None and cache.block_size % config.block_n == 0


class Kernels:
    """What both backends hold: the kernel that fits, and a workspace for parts of tiles."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        assert spec.latent is not None
        self.spec, self.rank = spec, spec.latent.rank
        self.config = mla_config(spec, device.arch)
        roles = self.config.roles and spec.sparse is None
        whole_tiles = roles and holds_whole_tiles(self.config, cache)
        self.few_heads = whole_tiles and spec.num_heads <= FEW_HEADS
        self.bytes = spec.stored_dtype != spec.dtype
        self.rows_by_roles = roles and not self.bytes
        self.halves = whole_tiles and self.bytes and not self.few_heads
        self.kernel = _mla_hopper if self.config.hopper else _mla
        self.torch_device = torch.device(str(device.torch_device))
        self.programs = multiprocessors(self.torch_device) * self._on_one()
        self.early = launches_early(device.arch)
        self.workspace = Workspace(self.torch_device)
        self._none = torch.empty(0, dtype=torch.int32, device=self.torch_device)

    def _on_one(self) -> int:
        """Return how many programs run on a multiprocessor: one of high tiles takes it whole."""
        config, spec = self.config, self.spec
        if config.block_h > 16:
            return 1
        assert spec.latent is not None
        item = STORAGE_DTYPES[spec.dtype].itemsize
        rows = config.block_h + config.num_stages * config.block_n
        return fitting(self.torch_device, rows * spec.latent.size * item, 2)

    def plan(self, batch: Batch, tiles: Tiles, few: int, reuse: Plan | None) -> LatentPlan:
        """Deal tiles out whole where they end together, else a stretch of them to each program.

        A captured graph's programs always take stretches: lengths that come later may need it. Of
        prompts, so may other tiles: its buffer has room for as many as any prompts have.
        """
        before = reuse.work if isinstance(reuse, LatentPlan) else None
        count, programs = len(tiles.keys), self.programs
        if not count:
            return LatentPlan(batch, Way(False, few), 0, self._none)
        if self.spec.batch_invariant:
            return self._in_segments(batch, tiles, few)
        few_heads = self.few_heads and not few
        if few_heads:
            programs *= 2
        halves = self.halves and not few
        roles = few_heads or halves or self.rows_by_roles
        cuts = roles or self.spec.graph_capture
        order = None if cuts else whole(tiles.keys, programs, RATES)
        if order is not None:
            work = np.concatenate([tiles.seq[order], tiles.row[order]]).astype(np.int32)
            return LatentPlan(batch, Way(False, few), count, batch.upload(work, before))
        self.workspace.reserve(max_parts(programs) * self.config.block_h, self.rank, 0)
        if roles:
            rates = FEW_HEADS_RATES if few_heads else RATES if halves else ROLES_RATES
            dealt, tiles = in_lanes(tiles, programs, rates)
        else:
            dealt = stretches(Line.of(tiles.keys, RATES.item), programs, RATES)
        # A captured graph's grid serves later steps, whatever tiles and parts these have.
        cut = (programs, programs) if self.spec.graph_capture else (count, dealt.parts)
        most = count
        if batch.num_contexts is not None:
            most = batch.num_tokens * self.spec.num_heads // self.config.block_h + batch.num_seqs
        work = dealt.work(tiles)
        room = len(work) + 3 * max(0, most - count)
        return LatentPlan(
            batch,
            Way(True, few),
            programs,
            batch.upload(work, before, room),
            Merge(programs, *cut, narrow=roles and self.bytes)
            if self.spec.graph_capture or dealt.parts > 1
            else None,
            roles,
        )

    def _in_segments(self, batch: Batch, tiles: Tiles, few: int) -> LatentPlan:
        """Cut each tile after as many keys, whatever else is in the step; a program has one segment."""
        height = self.config.block_h
        each = max(1, SEGMENT * height // self.config.block_n)
        parts = segments(tiles.keys, each)
        ends = parts.line[1:] // each
        plans = []
        for some in launches_of(ends, ROOM // (8 * height * (self.rank + 1))):
            mine = Tiles(tiles.seq[some], tiles.row[some], tiles.keys[some])
            dealt = segments(mine.keys, each)
            work = batch.upload(dealt.work(mine))
            merging = None
            if dealt.parts > 1:  # as many at a time whatever other tiles have
                merging = Merge(dealt.programs, len(some), dealt.parts, alike=1)
                self.workspace.reserve(max_parts(dealt.programs) * height, self.rank, 0)
            plans.append(LatentPlan(batch, Way(True, few), dealt.programs, work, merging))
        plans[0].others = plans[1:]
        return plans[0]

    def launch(
        self,
        plan: LatentPlan,
        query: Tensor,
        cache: KVCache,
        slots: Tensor | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend to the sequences' rows, or to those at `slots`, and merge."""
        if not plan.grid:
            return
        for other in plan.others:
            self.launch(other, query, cache, slots, params, out, lse)
        spec, config, none, space = self.spec, self.config, self._none, self.workspace
        quantized = cache.key.dtype.itemsize == 1
        v_scale = params.k_scale if quantized else 1.0
        table = plan.batch.block_table if slots is None else slots
        assert table is not None
        k, lse_t = cache.key.stride(), 0 if lse is None else lse.stride(0)
        starts = plan.batch.query_start_loc if plan.way.few else none
        parts = space.narrow if self.bytes else space.parts
        if not (plan.roles and self._by_roles(plan, query, cache, v_scale, out, lse, parts)):
            parts = space.parts
            self.kernel(
                (plan.grid, 1, 1),
                (
                    query, cache.key, out, out if lse is None else lse, space.parts, space.part_lse,
                    table if slots is None else none, none if slots is None else slots,
                    plan.batch.seq_lens, starts, plan.work,
                ),
                (spec.scale * v_scale, v_scale),
                (query.stride(0), query.stride(1), k[0], k[1], out.stride(0), out.stride(1)),
                (lse_t, table.stride(0)),
                mla_constants(
                    spec, config, cache.block_size, plan.way, slots is not None, lse is not None,
                    self.early,
                ),
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )  # fmt: skip
        if plan.merging is None:
            return
        height = config.block_h
        rows = height if plan.way.few else min(height, spec.num_heads)  # of a tile that are there
        _merge(
            plan.merging.grid(rows, 1, self.rank),
            (
                parts, space.part_lse, out, out if lse is None else lse, space.part_lse,
                space.part_lse, space.part_lse, starts, plan.work,
            ),
            (v_scale,),
            (out.stride(0), out.stride(1)),
            (lse_t, plan.grid, int(plan.merging.by_tile)),
            merge_constants(
                plan.merging, spec.num_heads, self.rank, height, True, not plan.way.few, False,
                lse is not None, self.early,
            ),
            merge_options(plan.merging, self.rank, self.early),
        )  # fmt: skip

    def _by_roles(
        self,
        plan: LatentPlan,
        query: Tensor,
        cache: KVCache,
        v_scale: float,
        out: Tensor,
        lse: Tensor | None,
        parts: Tensor,
    ) -> bool:
        """Attend by Hopper's kernel with roles; False: nothing was done, it can't take these tensors."""
        spec, table, space = self.spec, plan.batch.block_table, self.workspace
        box = box_rows(self.config.block_n, cache.block_size)
        boxes = box and latent_boxes(cache.key, box)
        if not boxes:
            return False
        assert table is not None
        kernel, options = _latents, {"num_warps": DEFAULT_WARPS}
        if (self.few_heads and not plan.way.few) or self.bytes:
            kernel = _latent_bytes if self.bytes else _few_heads
            options = FEW_HEADS_OPTIONS
        constants = latents_constants(spec, cache.block_size, plan.way, lse is not None)
        wide, narrow, block = boxes
        kernel(
            (plan.grid, 1 if self.few_heads or not self.bytes else 2, 1),
            (
                query, out, out if lse is None else lse, parts, space.part_lse, table,
                plan.batch.seq_lens, plan.batch.query_start_loc, plan.work,
            ),
            (spec.scale * v_scale, v_scale),
            (query.stride(0), query.stride(1), block, out.stride(0), out.stride(1)),
            (wide, narrow, 0 if lse is None else lse.stride(0), table.stride(0), plan.grid),
            constants,
            options | {"launch_pdl": True},
        )  # fmt: skip
        return True


def latent_boxes(key: Tensor, box: int) -> tuple[Any, Any, int] | None:
    """Return copies of so many rows of latents' columns and of rotated columns, and a block's rows."""
    widths = (HALF, ROPE)
    if key.dtype.itemsize == 1:
        if any(stride % 2 for stride in key.stride()[:-1]) or key.storage_offset() % 2:
            return None
        key, widths = key.view(torch.int16), (HALF, ROPE // 2)
    wide, narrow = (described(key, box, width) for width in widths)
    if wide is None or narrow is None:
        return None
    return wide[0], narrow[0], wide[1].block


class TritonMLA(AttentionBackend):
    """Absorbed decode over the latent cache, of one query token a sequence or a few."""

    name: ClassVar[str] = "TRITON_MLA"
    reads_tensors = False

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.kernels = Kernels(spec, cache, device)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> LatentPlan:
        """Deal (token, head) rows and the keys that they see out to the programs."""
        config, heads = self.kernels.config, self.spec.num_heads
        few = 0
        if self.spec.batch_invariant or not batch.all_decode or batch.num_contexts is not None:
            few = 1 if self.spec_of(batch).causal else 2
        queries, lens = np.array(batch.query_lens, np.int64), np.array(batch.lens, np.int64)
        seq, row = rows_of(queries, heads, config.block_h)
        last = np.minimum(row + config.block_h, queries[seq] * heads) - 1
        seen = lens[seq] if few == 2 else (lens - queries)[seq] + last // heads + 1
        keys = np.maximum(-(-seen // config.block_n), 0)
        return self.kernels.plan(batch, Tiles(seq, row, keys), few, reuse)

    def reads(self, plan: Plan, batch: Batch) -> Reads:
        assert isinstance(plan, LatentPlan)
        kernels = self.kernels
        return in_turn(
            [
                latent_reads(kernels.spec, kernels.config, kernels.workspace, launch, batch)
                for launch in (*plan.others, plan)
            ]
        )

    def run(self, plan: Plan, frame: Frame) -> None:
        """Attend as planned."""
        assert frame.cache is not None and isinstance(plan, LatentPlan)
        self.kernels.launch(
            plan, frame.query, frame.cache, None, frame.params, frame.out, frame.lse
        )


class TritonMLASparse(SparseBackend):
    """Attention to chosen rows of the latent cache."""

    name: ClassVar[str] = "TRITON_MLA_SPARSE"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        assert spec.sparse is not None
        self.kernels, self.topk = Kernels(spec, cache, device), spec.sparse.most

    def place(
        self, spec: LayerSpec, choice: Tensor, batch: Batch, block_size: int, first: int
    ) -> Tensor:
        sparse, table = spec.sparse, batch.block_table
        assert sparse is not None
        if sparse.physical or table is None or not table.shape[1] or not len(choice):
            return super().place(spec, choice, batch, block_size, first)
        table = table if table.stride(1) == 1 else table.contiguous()
        ids = choice.contiguous()
        count = ids.shape[2] * sparse.granularity
        out = torch.empty(len(ids), count, dtype=torch.int32, device=ids.device)
        _places(
            (len(ids), -(-count // PLACES), 1),
            (ids, table, batch.query_start_loc, batch.seq_lens, out),
            (),
            (),
            (table.stride(0), first, batch.num_seqs, ids.shape[2], table.shape[1]),
            (PLACES, sparse.granularity, sparse.tokens_per_entry, block_size, spec.causal,
             batch.all_decode),
            {"num_warps": 4},
        )  # fmt: skip
        return out

    def plan(self, batch: Batch, reuse: Plan | None = None) -> LatentPlan:
        """Deal each token's rows out with its chosen keys."""
        config, ones = self.kernels.config, np.ones(batch.num_tokens, np.int64)
        seq, row = rows_of(ones, self.spec.num_heads, config.block_h)
        keys = np.full(len(seq), -(-self.topk // config.block_n))
        return self.kernels.plan(batch, Tiles(seq, row, keys), 0, reuse)

    def reads(self, plan: Plan, batch: Batch) -> Reads:
        """Return the reads of each token's choice, whose places are the keys of a sequence."""
        assert isinstance(plan, LatentPlan)
        kernels, count = self.kernels, batch.num_tokens
        spec = self.spec.replace(kind="mla", sparse=None)
        chosen = Batch.from_lens([1] * count, [self.topk] * count)
        launches = (*plan.others, plan)
        every = [latent_reads(spec, kernels.config, kernels.workspace, p, chosen) for p in launches]
        reads = in_turn(every)
        reads.batch = chosen
        return reads

    def run(self, plan: LatentPlan, frame: Frame) -> None:
        """Attend as planned."""
        assert frame.cache is not None and frame.choice is not None
        rows, params = frame.choice.contiguous(), frame.params
        self.kernels.launch(plan, frame.query, frame.cache, rows, params, frame.out, frame.lse)
