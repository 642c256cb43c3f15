"""How does TRITON_SCAN run Mamba-1's prefill? Sequences whole, or few long ones in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from polyattn.kernel import AttentionKind, LayerSpec, at_least
from torch import Tensor

from polyattn_triton.configs import ScanConfig, pick_scan
from polyattn_triton.launch import Launcher, multiprocessors
from polyattn_triton.selective_kernels import selective_kernel

PROGRAMS = 8
"""Programs of one warp that keep a multiprocessor at work."""
LEAST_PIECE = 64
"""Tokens of a piece at least: shorter ones would read more states than tokens."""
WORTH = 3
"""How often more programs must run at once before pieces, whose tokens are computed twice, pay."""
_selective = Launcher(selective_kernel)


def channels_at_once(spec: LayerSpec, config: ScanConfig) -> int:
    """Return the channels of a program, fewer where states are larger than Mamba's 16."""
    assert spec.recurrent is not None
    states = triton.next_power_of_2(spec.recurrent.state_size)
    return int(min(config.block_v, max(16, 16 * config.block_v // states)))


def selective_constants(
    spec: LayerSpec, config: ScanConfig, has: tuple[bool, bool], part: str
) -> tuple[Any, ...]:
    """Return `selective_kernel`'s constants, in its order. `has`: whether D and dt_bias are there."""
    form = spec.recurrent
    assert form is not None
    return (
        spec.num_heads, form.state_size, channels_at_once(spec, config),
        triton.next_power_of_2(form.state_size), config.chunk, *has, form.dt_softplus, form.gated,
        spec.num_heads // form.channel_groups, part,
    )  # fmt: skip


def piece_tokens(counts: Sequence[int], blocks: int, programs: int) -> int:
    """Return how many tokens a piece has, 0 where sequences stay whole.

    `counts`: tokens of each sequence; `blocks`: programs of each piece; `programs`: how many run at
    once.
    """
    total, longest = sum(counts), max(counts, default=0)
    if total * blocks * WORTH > programs * longest:
        return 0
    size = max(LEAST_PIECE, triton.cdiv(total * blocks, programs))
    return size if size < longest else 0


def mamba1_strides(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, out: Tensor, states: Tensor
) -> tuple[int, ...]:
    """Return the strides that Mamba-1's kernels take: by token, of B and C by group too."""
    by_group = [t.stride(1) if t.dim() == 3 else 0 for t in (B, C)]
    return (
        x.stride(0), dt.stride(0), B.stride(0), by_group[0], C.stride(0), by_group[1], z.stride(0),
        out.stride(0), states.stride(0),
    )  # fmt: skip


class Pieces:
    """A step's sequences cut into pieces: on the device, each one's sequence and first token."""

    def __init__(self, counts: Sequence[int], size: int, device: torch.device):
        starts = [(i, at) for i, count in enumerate(counts) for at in range(0, count, size)]
        packed = torch.tensor(starts, dtype=torch.int32).view(-1, 2).T.contiguous()
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        self.count, self.size = len(starts), size
        self.seq, self.start = packed


class Selective:
    """Plans and launches the prefill; holds what pieces leave. One stream uses it at a time."""

    def __init__(self, spec: LayerSpec, arch: str, device: torch.device):
        assert spec.recurrent is not None
        self.spec, self.device = spec, device
        self.config = pick_scan(arch, AttentionKind.MAMBA1, "prefill")
        self.blocks = triton.cdiv(spec.num_heads, channels_at_once(spec, self.config))
        self.none = torch.empty(0, device=device)
        self.whole = torch.empty(0, dtype=torch.int32, device=device)
        self.left = self.steps = self.none
        self._outgrown: list[Tensor] = []

    def cut(self, counts: Sequence[int]) -> Pieces | None:
        """Return the pieces of a step's sequences, None where they stay whole.

        A layer whose bits may not depend on the batch has them whole.
        """
        if self.spec.batch_invariant:
            return None
        size = piece_tokens(counts, self.blocks, PROGRAMS * multiprocessors(self.device))
        return Pieces(counts, size, self.device) if size else None

    def __call__(
        self,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        out: Tensor,
        states: Tensor,
        meta: tuple[Tensor, Tensor, Tensor],
        pieces: Pieces | None,
    ) -> None:
        """Run a step. `inputs`: x, dt, B, C, z (or any); `meta`: sequences' starts, lengths and slots."""
        spec, form, none, config = self.spec, self.spec.recurrent, self.none, self.config
        assert form is not None
        x, dt, B, C, z = inputs
        has = ("D" in params, "dt_bias" in params)
        parts: tuple[str, ...] = ("whole",)
        cells = (self.whole, self.whole)
        programs, size = meta[2].numel(), 0
        if pieces is not None:
            parts, cells, programs = ("left", "out"), (pieces.seq, pieces.start), pieces.count
            size, channels = pieces.size, spec.num_heads
            self.left = at_least(self.left, programs * channels * form.state_size, self._outgrown)
            self.steps = at_least(self.steps, programs * channels, self._outgrown)
        for part in parts:
            _selective(
                (programs, self.blocks, 1),
                (
                    x, dt, params["A"], B, C, params.get("D", none), params.get("dt_bias", none),
                    z, out, states, self.left, self.steps, *meta, *cells,
                ),
                (), mamba1_strides(x, dt, B, C, z, out, states), (size,),
                selective_constants(spec, config, has, part),
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )  # fmt: skip
