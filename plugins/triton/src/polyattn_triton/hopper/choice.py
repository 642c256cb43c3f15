"""Which prefills Hopper's own kernel serves, and its launch arguments.

Plain layers, causal (with a window or without) or not: no chunks, sinks, soft cap or ALiBi, 16 bits
throughout; caches of 8 and of 4 bits by copies (`widening`). It calls a variant's `score_mod` where all
that the function reads is a row's and nothing is hidden. The portable kernel (`prefill`) serves all
others, and tensors that TMA can't describe, by a plan with its own tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from polyattn.kernel import LayerSpec, arch_matches
from torch import Tensor

from polyattn_triton import launch
from polyattn_triton.configs import HOPPER, HOPPER_PIPES, SLOWER_BY_TOKEN, Config, Pipe
from polyattn_triton.functions.pointwise import NOTHING, Generated
from polyattn_triton.hopper.widening import is_exact, widening
from polyattn_triton.launch import Site
from polyattn_triton.schedule import EVEN, Ints, fullest

if TYPE_CHECKING:
    from polyattn_triton.plan import AttentionPlan

try:
    from polyattn_triton.hopper.descriptors import described
    from polyattn_triton.hopper.prefill import prefill_hopper_kernel
except ImportError:  # a Triton whose Gluon lacks what the kernel needs: the portable one serves
    prefill_hopper_kernel = None

DEFAULT_WARPS = 4
"""Of a program's: the others are those of the kernel's own partitions."""
BYTES = 2
"""Of an element."""
CACHED = 0.7
"""Of the L2, what keys and values that are read again may take."""
FEWEST_ROWS = 8
"""Of a block. One copy begins where shared memory's swizzle does."""


def is_plain(spec: LayerSpec, generated: Generated | None = None) -> bool:
    """Whether the kernel computes everything that a layer needs. `generated`: its functions.

    What it reads may have to be copied before: a cache of 8 or 4 bits, and queries that come so.
    """
    odd = (
        spec.window_right, spec.chunk_size, spec.sink_tokens, spec.logit_soft_cap, spec.alibi,
        spec.learned_sinks, spec.variant is not None and (generated is None or not generated.by_row),
        spec.mask, spec.rope,
    )  # fmt: skip
    return (
        not any(odd)
        and (spec.causal or not spec.sliding_window)
        and spec.dtype in ("bfloat16", "float16")
        and (spec.stored_dtype == spec.dtype or is_exact(spec))
        and (spec.out_dtype, spec.scales) == ("auto", "number")
        and spec.head_size == spec.v_head_size
    )


def hopper_config(spec: LayerSpec, arch: str, generated: Generated | None = None) -> Config | None:
    """Return the tiles of Hopper's own kernel, or None where it doesn't serve this layer."""
    config = HOPPER.get(spec.head_size)
    if config is None or not arch_matches("sm_90", arch) or not is_plain(spec, generated):
        return None
    if prefill_hopper_kernel is None:
        logging.getLogger("polyattn").warning(
            "TRITON_ATTN runs its portable prefill on %s, a third slower: Triton %s's Gluon lacks what "
            "the kernel for Hopper needs; install triton 3.6",
            arch,
            triton.__version__,
        )
        return None
    return config


def box_rows(tile: int, block_size: int) -> int | None:
    """Return how many of a tile's keys are copied at once from blocks of this size (0: by token)."""
    if not block_size:
        return tile
    if block_size < FEWEST_ROWS or block_size & (block_size - 1):
        return None
    return min(block_size, tile)


def hopper_constants(
    spec: LayerSpec, config: Config, pipe: Pipe, block_size: int, split: bool, lse: bool,
    functions: tuple[Any, ...] = NOTHING,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `prefill_hopper_kernel`'s constants, in its order. `block_size`: 0 for keys by token.

    `functions`: `Generated.constants`.
    """
    return (
        spec.gqa_ratio, spec.num_kv_heads, spec.head_size, config.block_m, config.block_n,
        block_size or 1, bool(block_size), spec.causal, spec.sliding_window or 0, lse, split,
        pipe.stages, pipe.turns, pipe.queries, *functions,
    )  # fmt: skip


class HopperPrefill:
    """Launches the kernel for the tensors that it can take.

    `programs`: as many as run at once. `cached`: bytes of keys and values that the L2 keeps.
    """

    def __init__(
        self,
        spec: LayerSpec,
        config: Config,
        programs: int,
        cached: int,
        generated: Generated | None = None,
    ):
        self.generated = generated
        self.config, self.programs, self.heads = config, programs, spec.num_kv_heads
        self.pipes = HOPPER_PIPES[spec.head_size]
        self.cached, self.token_bytes = cached, 2 * spec.head_size * BYTES
        self.by_token = spec.head_size not in SLOWER_BY_TOKEN
        self._sites: dict[tuple[Any, ...], Site] = {}

    def takes(self, plan: AttentionPlan, spec: LayerSpec) -> bool:
        """Whether a step is worth a plan for the kernel; the plan is told which tokens are copied for it.

        `spec`: the layer as this step has it, which may ask for no causality. Copies lie by token. Nor
        are they made for functions: both kernels would be compiled for each.
        """
        if not is_plain(spec, self.generated):
            return False
        if (spec.stored_dtype, spec.qkv_dtype) == (spec.dtype, "auto"):
            return self.by_token or not plan.fresh
        if self.generated is None and self.by_token:
            plan.widening = widening(spec, plan.batch, self.config.block_n)
        return plan.widening is not None

    def heads_at_once(self, lens: Sequence[int], costs: Ints) -> int:
        """Return how many KV heads' tiles run side by side: as many as the L2 has room for.

        A divisor of their number; tiles of one head read the same keys. More where the last heads'
        longest tiles would end late: `costs` are those of a head, in key tiles, in their order.
        """
        room, heads = max(1, self.cached // max(1, sum(lens) * self.token_bytes)), self.heads
        if room >= heads:
            return heads
        fitting = [n for n in range(1, heads) if heads % n == 0]
        some = max(n for n in fitting if n <= room)
        mean = int(costs.sum()) * heads / self.programs
        for n in fitting[fitting.index(some) :]:
            before = mean * (1 - n / heads)  # when the last heads begin at the latest
            if before + int(costs[0]) <= EVEN * mean:
                return n
            if fullest(costs, heads, n, self.programs) <= EVEN * mean + 1:
                return n
        return self.heads

    def __call__(
        self,
        plan: AttentionPlan,
        spec: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor | None,
        factors: tuple[float, float],
        inputs: Tensor,
        read: tuple[Any, Any] = (None, None),
    ) -> bool:
        """Attend as planned, to blocks or to keys by token; False: nothing was done.

        `factors`: of the logits and of the outputs; `inputs`: where what functions read lies. `read`: how
        rows of bytes are copied.
        """
        if query.dtype.itemsize == 1:
            query = query.to(out.dtype)
        q = query.stride()
        # Queries are copied 16 bytes at a time.
        if query.data_ptr() % 16 or q[0] % 16 or q[1] % 16:
            return False
        if plan.widening is not None:
            size = spec.head_size
            key, value = plan.widening.copies(plan.batch, key, value, query.dtype, size, read)
        block_size = key.shape[1] if key.dim() == 4 else 0
        box = box_rows(self.config.block_n, block_size)
        k, v = (None, None) if box is None else (described(key, box), described(value, box))
        if k is None or v is None:
            return False
        split = plan.way == "pieces"
        strides = (q[0], q[1], *k[1], *v[1], *out.stride()[:2])
        which = (strides, query.dtype, block_size, split, lse is None, spec.causal)
        site = self._sites.get(which)
        if site is None:
            site = self._sites[which] = Site(
                prefill_hopper_kernel, strides,
                hopper_constants(
                    spec, self.config, self.pipes[split], block_size, split, lse is not None,
                    NOTHING if self.generated is None else self.generated.constants,
                ),
                {"num_warps": DEFAULT_WARPS},
            )  # fmt: skip
        tiles, heads, _ = plan.grid
        # Dealt out beforehand where all heads go at once, else by the device: each few heads' tiles
        # begin with long ones again, and what is dealt doesn't end together.
        jobs = tiles * heads
        programs = (min(self.programs, jobs) if plan.at_once == heads else jobs, 1, 1)
        site(
            plan.grid if split else programs,
            (query, out, out if lse is None else lse, inputs),
            factors,
            (k[0], v[0], 0 if lse is None else lse.stride(0), plan.table[0], tiles, plan.at_once),
            plan.kept,
        )
        return True


def hopper_prefill(
    spec: LayerSpec, arch: str, device: torch.device, generated: Generated | None = None
) -> HopperPrefill | None:
    """Return what launches the kernel for a layer on this device, if it serves that."""
    config = hopper_config(spec, arch, generated)
    gpu = launch.facts(device)
    if config is None or gpu is None:
        return None
    cached = int(CACHED * gpu.L2_cache_size)
    return HopperPrefill(spec, config, gpu.multi_processor_count, cached, generated)
