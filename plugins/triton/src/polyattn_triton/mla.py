"""TRITON_MLA and TRITON_MLA_SPARSE: plan splits on the host, launch the kernel."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    SparseBackend,
    at_least,
)
from torch import Tensor

from polyattn_triton.configs import MLAConfig, pick_mla
from polyattn_triton.decode import merge_kernel
from polyattn_triton.launch import (
    Launcher,
    launches_early,
    merge_constants,
    multiprocessors,
    power,
)
from polyattn_triton.mla_kernels import mla_kernel

MIN_SPLIT_ROWS = 128
MAX_SPLITS = 64
SPLIT_TILES = 3
"""What a program costs beside its tiles, in tiles: its query, its pipeline's start, its merge."""
try:
    from polyattn_triton.mla_hopper import mla_hopper_kernel
except ImportError:  # a Triton whose Gluon lacks what the kernel needs: the portable one serves
    mla_hopper_kernel = None

_mla, _merge = Launcher(mla_kernel), Launcher(merge_kernel)
_mla_hopper = Launcher(mla_hopper_kernel)


def mla_config(spec: LayerSpec, arch: str) -> MLAConfig:
    """Return the configuration, of the kernels that this Triton can compile."""
    gluon = mla_hopper_kernel is not None
    if not gluon and pick_mla(spec, arch, gluon=True).hopper:
        logging.getLogger("polyattn").warning(
            "TRITON_MLA runs its portable kernel on %s, a third slower: Triton %s's Gluon lacks what "
            "the kernel for Hopper needs; install triton 3.6",
            arch, triton.__version__,
        )  # fmt: skip
    return pick_mla(spec, arch, gluon)


def mla_constants(
    spec: LayerSpec,
    config: MLAConfig,
    block_size: int,
    split: bool,
    sparse: bool,
    lse: bool,
    early: bool,
) -> tuple[Any, ...]:
    """Return the kernel's constants, in its order."""
    assert spec.latent is not None
    rank, rope = spec.latent.rank, spec.latent.rope_head_size
    tiles = (
        config.block_h, config.block_n, block_size, split, sparse, lse and not split,
        early and split,
    )  # fmt: skip
    if config.hopper:
        return (spec.num_heads, rank, rope, *tiles)
    return (spec.num_heads, rank, rope, power(rank), power(rope), *tiles, config.apart)


class LatentPlan(Plan):
    """One step: in how many splits its rows are read."""

    __slots__ = ("splits",)

    splits: int


class Kernels:
    """What both backends hold: the kernel that fits, and a workspace for splits."""

    def __init__(self, spec: LayerSpec, device: Device):
        assert spec.latent is not None
        self.spec, self.rank = spec, spec.latent.rank
        self.config = mla_config(spec, device.arch)
        self.kernel = _mla_hopper if self.config.hopper else _mla
        self.torch_device = torch.device(str(device.torch_device))
        self.num_sms = multiprocessors(self.torch_device)
        self.early = launches_early(device.arch)
        self.head_blocks = -(-spec.num_heads // self.config.block_h)
        self._parts = torch.empty(0, device=self.torch_device)
        self._part_lse = torch.empty(0, device=self.torch_device)
        self._outgrown: list[Tensor] = []
        self._none = torch.empty(0, dtype=torch.int32, device=self.torch_device)

    def plan(self, batch: Batch, rows: int) -> LatentPlan:
        """Split the rows so that the last wave of programs ends first; size the workspace for it."""
        plan, tokens = LatentPlan(batch), batch.num_tokens
        programs, block = max(1, tokens * self.head_blocks), self.config.block_n
        plan.splits, least = 1, None
        splits = 1
        while splits <= MAX_SPLITS and (splits == 1 or rows // splits >= MIN_SPLIT_ROWS):
            waves = -(-programs * splits // self.num_sms)
            cost = waves * (-(-rows // splits) / block + SPLIT_TILES)
            if least is None or cost < least:
                plan.splits, least = splits, cost
            splits *= 2
        count = tokens * self.spec.num_heads * plan.splits
        if plan.splits > 1:
            self._parts = at_least(self._parts, count * self.rank, self._outgrown)
            self._part_lse = at_least(self._part_lse, count, self._outgrown)
        return plan

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
        spec, config, none, splits = self.spec, self.config, self._none, plan.splits
        quantized = cache.key.dtype.itemsize == 1
        v_scale = params.k_scale if quantized else 1.0
        table = plan.batch.block_table if slots is None else slots
        assert table is not None
        k, lse_t = cache.key.stride(), 0 if lse is None else lse.stride(0)
        self.kernel(
            (len(query), self.head_blocks, splits),
            (
                query, cache.key, out, out if lse is None else lse, self._parts, self._part_lse,
                table if slots is None else none, none if slots is None else slots,
                plan.batch.seq_lens,
            ),
            (spec.scale * v_scale, v_scale),
            (query.stride(0), query.stride(1), k[0], k[1], out.stride(0), out.stride(1)),
            (lse_t, table.stride(0), splits),
            mla_constants(
                spec, config, cache.block_size, splits > 1, slots is not None, lse is not None,
                self.early,
            ),
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip
        if splits == 1:
            return
        _merge(
            (len(query), spec.num_heads, 1),
            (self._parts, self._part_lse, out, out if lse is None else lse, self._part_lse),
            (v_scale,),
            (out.stride(0), out.stride(1)),
            (lse_t, splits),
            merge_constants(spec.num_heads, self.rank, splits, False, lse is not None, self.early),
            {"num_warps": 4} | ({"launch_pdl": True} if self.early else {}),
        )  # fmt: skip


class TritonMLA(AttentionBackend):
    """Absorbed decode over the latent cache."""

    name: ClassVar[str] = "TRITON_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.kernels = Kernels(spec, device)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> LatentPlan:
        """Split the longest sequence's rows."""
        rows = batch.max_seq_len
        if self.spec.graph_capture:  # a captured graph keeps its number of splits
            rows = MAX_SPLITS * MIN_SPLIT_ROWS
        return self.kernels.plan(batch, rows)

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
        assert cache is not None and isinstance(plan, LatentPlan)
        self.kernels.launch(plan, query, cache, None, params, out, lse)


class TritonMLASparse(SparseBackend):
    """Attention to chosen rows of the latent cache."""

    name: ClassVar[str] = "TRITON_MLA_SPARSE"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        assert spec.latent is not None and spec.latent.topk
        self.kernels, self.topk = Kernels(spec, device), spec.latent.topk

    def plan(self, batch: Batch, reuse: Plan | None = None) -> LatentPlan:
        """Split each token's chosen rows."""
        return self.kernels.plan(batch, self.topk)

    def run(
        self,
        plan: Plan,
        query: Tensor,
        slots: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend as planned."""
        assert isinstance(plan, LatentPlan)
        self.kernels.launch(plan, query, cache, slots.contiguous(), params, out, lse)
