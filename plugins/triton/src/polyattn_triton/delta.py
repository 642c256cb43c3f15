"""How does Triton run prompts of the gated delta rule? Its chunks are solved, then walked."""

from __future__ import annotations

from typing import Any

import torch
from polyattn.kernel import STORAGE_DTYPES, LayerSpec, at_least
from torch import Tensor

from polyattn_triton.configs import prompt_config
from polyattn_triton.kernels.delta import delta_kernel, system_kernel
from polyattn_triton.launch import Launcher, power
from polyattn_triton.selective import Pieces
from polyattn_triton.walk import Walk

FACTORS = 4
"""Of a token and head, float32."""
SYSTEM_OPTIONS = {"num_warps": 4, "num_stages": 1}
_system, _delta = Launcher(system_kernel), Launcher(delta_kernel)


def system_constants(spec: LayerSpec, arch: str) -> tuple[Any, ...]:
    """Return `system_kernel`'s constants, in its order."""
    assert spec.recurrent is not None
    keys, each = spec.head_size, spec.num_heads // spec.num_kv_heads
    return each, keys, power(keys), prompt_config(spec, arch).chunk, spec.recurrent.qk_norm


def delta_constants(spec: LayerSpec, arch: str, part: str = "whole") -> tuple[Any, ...]:
    """Return `delta_kernel`'s constants, in its order. `part`: of pieces "left" or "out"."""
    keys, values = spec.head_size, spec.v_head_size
    config, each = prompt_config(spec, arch), spec.num_heads // spec.num_kv_heads
    return each, keys, values, power(keys), min(config.block_v, power(values)), config.chunk, part


class Deltas:
    """Launches a prefill; holds the chunks' systems. One stream uses it at a time."""

    def __init__(self, spec: LayerSpec, arch: str, device: torch.device):
        self.spec, self.arch = spec, arch
        self.row = 2 * prompt_config(spec, arch).chunk
        self.work = torch.empty(0, dtype=STORAGE_DTYPES[spec.dtype], device=device)
        self.factors = torch.empty(0, dtype=torch.float32, device=device)
        self.walk = Walk(spec, arch, device)
        self._outgrown: list[Tensor] = []

    def __call__(
        self,
        tensors: tuple[Tensor, ...],
        out: Tensor,
        states: Tensor,
        meta: tuple[Tensor, Tensor, Tensor],
        chunks: Pieces,
        pieces: Pieces | None,
    ) -> None:
        """Run a step. `tensors`: q, k, v, g, beta; `meta`: sequences' starts, lengths and slots.

        `pieces`: of sequences that are walked side by side; None: whole ones.
        """
        spec, (q, k, v, g, beta) = self.spec, tensors
        heads, tokens, (starts, _, slots) = spec.num_heads, len(q), meta
        self.work = work = at_least(self.work, tokens * heads * self.row, self._outgrown)
        self.factors = factors = at_least(self.factors, tokens * heads * FACTORS, self._outgrown)
        of_keys = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
        along = (heads * self.row, self.row)
        _system(
            (chunks.count, heads, 1),
            (q, k, g, beta, work, factors, starts, slots, chunks.seq, chunks.start),
            (), (*of_keys, g.stride(0), beta.stride(0), *along), (tokens,),
            system_constants(spec, self.arch), SYSTEM_OPTIONS,
        )  # fmt: skip
        config = prompt_config(spec, self.arch)
        for part, grid, left, cells, size in self.walk.launches(slots.numel(), pieces):
            _delta(
                grid, (q, k, v, work, factors, out, states, left, *meta, *cells), (spec.scale,),
                (
                    *of_keys, v.stride(0), v.stride(1), *along, out.stride(0), out.stride(1),
                    states.stride(0), states.stride(1),
                ),
                (tokens, size), delta_constants(spec, self.arch, part),
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )  # fmt: skip
