"""How does TRITON_SCAN run Mamba-1's prefill? Sequences whole, or few long ones in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from polyattn.kernel import AttentionKind, LayerSpec, at_least
from torch import Tensor

from polyattn_triton.configs import pick_scan
from polyattn_triton.launch import Launcher, multiprocessors
from polyattn_triton.selective_kernels import selective_kernel

PROGRAMS = 8
"""Programs of one warp on a multiprocessor between which pieces are dealt."""
SCHEDULERS = 4
"""Of a multiprocessor."""
LEAST_PIECE = 64
"""Tokens of a piece at least: shorter ones would read more states than tokens."""
CHANNELS = {128: 1.0, 64: 0.6, 32: 0.4}
"""Channels of a program, and the time of its token when it has a scheduler to itself: lanes with more
channels share more of what isn't a state's.
"""
TWICE = 1.9
"""What pieces cost of whole sequences, since all but their outputs are computed twice."""
MOST_STATES = 64
"""States of a channel that a lane holds in registers at most."""
_selective = Launcher(selective_kernel)


def state_groups(states: int) -> tuple[int, int]:
    """Return in how many lanes a channel's states are, and how many are in each."""
    groups = max(1, triton.next_power_of_2(triton.cdiv(states, MOST_STATES)))
    return groups, triton.cdiv(states, groups)


def channel_sizes(states: int) -> tuple[int, ...]:
    """Return the channels that a program of one warp can take, most first."""
    groups, held = state_groups(states)
    most = max(1, 4 * 16 // triton.next_power_of_2(held)) * 32
    return tuple(max(1, size // groups) for size in CHANNELS if size <= max(32, most))


def words_of(b: Tensor, c: Tensor, states: int) -> int:
    """Return how many elements of B and C lie in words of 8 bytes that a token's states fill, or 1."""
    size = 8 // b.element_size()
    if state_groups(states)[1] % size or (b.data_ptr() | c.data_ptr()) % 8:
        return 1
    return 1 if b.stride(0) % size or c.stride(0) % size else size


def widest_words(spec: LayerSpec) -> int:
    """Return what `words_of` returns of aligned tensors."""
    assert spec.recurrent is not None
    size = 2 if spec.dtype == "float32" else 4
    return 1 if state_groups(spec.recurrent.state_size)[1] % size else size


def selective_constants(
    spec: LayerSpec, channels: int, words: int, tokens: int, has: tuple[bool, bool], part: str
) -> tuple[Any, ...]:
    """Return `selective_kernel`'s constants, in its order.

    `channels` of a program, `words`: elements of B and C that are loaded at once; `tokens` loaded
    ahead; `has`: whether D and dt_bias are there.
    """
    form = spec.recurrent
    assert form is not None
    return (
        spec.num_heads, form.state_size, channels, *state_groups(form.state_size), words, tokens,
        *has, form.dt_softplus, part,
    )  # fmt: skip


def way_of(
    counts: Sequence[int], width: int, sizes: Sequence[int], slots: int, pieces: bool
) -> tuple[int, int]:
    """Return the channels of a program, and the tokens of a piece, 0 where sequences stay whole.

    `counts`: tokens of each sequence; `width`: channels of the layer; `sizes`: channels that a program
    can take; `slots`: schedulers that run programs side by side; `pieces`: whether there may be any.
    The least predicted time, in tokens of a program of most channels, is taken.
    """
    total, longest = sum(counts), max(counts, default=0)
    relative = list(CHANNELS.values())
    ways = []
    for size, cost in zip(sizes, relative, strict=False):
        work = total * triton.cdiv(width, size) / slots
        ways.append((cost * max(longest, work), size, 0))
        dealt = max(LEAST_PIECE, math.ceil(work / (PROGRAMS / SCHEDULERS)))
        if pieces and dealt < longest:
            ways.append((TWICE * cost * max(dealt, work), size, dealt))
    return min(ways, key=lambda way: way[0])[1:]


class Pieces:
    """A step's sequences cut into pieces: on the device, each one's sequence and first token."""

    def __init__(self, counts: Sequence[int], size: int, device: torch.device):
        starts = [(i, at) for i, count in enumerate(counts) for at in range(0, count, size)]
        packed = torch.tensor(starts, dtype=torch.int32).view(-1, 2).T.contiguous()
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        self.count, self.size = len(starts), size
        self.seq, self.start = packed


class Cut(NamedTuple):
    """How a step runs: channels of a program, and its pieces, None where sequences stay whole."""

    channels: int
    pieces: Pieces | None


class Selective:
    """Plans and launches the prefill; holds what pieces leave. One stream uses it at a time."""

    def __init__(self, spec: LayerSpec, arch: str, device: torch.device):
        assert spec.recurrent is not None
        self.spec, self.device = spec, device
        self.config = pick_scan(arch, AttentionKind.MAMBA1, "prefill")
        self.none = torch.empty(0, device=device)
        self.whole = torch.empty(0, dtype=torch.int32, device=device)
        self.left = self.steps = self.none
        self._outgrown: list[Tensor] = []

    def cut(self, counts: Sequence[int]) -> Cut:
        """Return how a step's sequences run.

        A layer whose bits may not depend on the batch has them whole.
        """
        spec = self.spec
        assert spec.recurrent is not None
        sizes = channel_sizes(spec.recurrent.state_size)
        slots = SCHEDULERS * multiprocessors(self.device)
        channels, size = way_of(counts, spec.num_heads, sizes, slots, not spec.batch_invariant)
        return Cut(channels, Pieces(counts, size, self.device) if size else None)

    def __call__(
        self,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        out: Tensor,
        states: Tensor,
        meta: tuple[Tensor, Tensor, Tensor],
        cut: Cut,
    ) -> None:
        """Run a step. `inputs`: x, dt, B, C; `meta`: the sequences' starts, lengths and slots."""
        spec, form, none, config = self.spec, self.spec.recurrent, self.none, self.config
        assert form is not None
        x, dt, B, C = inputs
        has = ("D" in params, "dt_bias" in params)
        parts: tuple[str, ...] = ("whole",)
        cells = (self.whole, self.whole)
        programs, size, pieces = meta[2].numel(), 0, cut.pieces
        if pieces is not None:
            parts, cells, programs = ("left", "out"), (pieces.seq, pieces.start), pieces.count
            size, channels = pieces.size, spec.num_heads
            self.left = at_least(self.left, programs * channels * form.state_size, self._outgrown)
            self.steps = at_least(self.steps, programs * channels, self._outgrown)
        words = words_of(B, C, form.state_size)
        for part in parts:
            _selective(
                (programs, triton.cdiv(spec.num_heads, cut.channels), 1),
                (
                    x, dt, params["A"], B, C, params.get("D", none), params.get("dt_bias", none),
                    out, states, self.left, self.steps, *meta, *cells,
                ),
                (), tuple(t.stride(0) for t in (x, dt, B, C, out, states)), (size,),
                selective_constants(spec, cut.channels, words, config.chunk, has, part),
                {"num_warps": config.num_warps, "num_stages": config.num_stages},
            )  # fmt: skip
