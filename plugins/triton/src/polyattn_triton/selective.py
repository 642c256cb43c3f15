"""How does TRITON_SCAN run Mamba-1's prefill? Sequences whole, or few long ones in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from polyattn.kernel import Batch, LayerSpec, at_least
from torch import Tensor

from polyattn_triton.configs import SELECTIVE, SelectiveConfig
from polyattn_triton.kernels.selective import selective_kernel
from polyattn_triton.launch import Launcher, multiprocessors

SCHEDULERS = 4
"""Of a multiprocessor, with programs of one warp."""
ON_ONE = (1, 2)
"""How many of them share a scheduler where sequences are cut to pieces."""
LEAST_PIECE = 64
"""Tokens of a piece at least: shorter ones would read more states than tokens."""
TWICE = 1.9
"""What a piece's token costs of a whole sequence's, since all but outputs are computed twice."""
CARRY = 3.0
"""What a piece costs beside, for each that comes before it, in units of `SelectiveConfig`."""
MOST_STATES = 64
"""States of a channel that a lane holds in registers at most."""
WIDENED_AHEAD = 4
"""Tokens ahead of a program of whole sequences, two channels a lane, which takes B and C in float32: two
channels are few to widen them for (H100, 8 x 4,096 of Jamba's: 1,806 us for 2,127)."""
OPTIONS = {"num_warps": 1, "num_stages": 1}
_selective = Launcher(selective_kernel)


def state_groups(states: int) -> tuple[int, int]:
    """Return in how many lanes a channel's states are, and how many are in each."""
    groups = max(1, triton.next_power_of_2(triton.cdiv(states, MOST_STATES)))
    return groups, triton.cdiv(states, groups)


def selective_configs(states: int) -> tuple[SelectiveConfig, ...]:
    """Return the configurations that a layer of so many states can run in, fastest first.

    Registers hold what they do of 16 states a channel: with more, fewer channels and tokens.
    """
    groups, held = state_groups(states)
    more = max(1, triton.next_power_of_2(held) // 16)
    return tuple(
        replace(
            config, channels=max(1, config.channels // groups), ahead=max(1, config.ahead // more)
        )
        for config in SELECTIVE
        if config.channels <= max(32, 128 // more)
    )


def words_of(b: Tensor, c: Tensor, states: int) -> int:
    """Return how many elements of B and C lie in words of 8 bytes that a token's states fill, or 1."""
    size = 8 // b.element_size()
    if state_groups(states)[1] % size or (b.data_ptr() | c.data_ptr()) % 8:
        return 1
    return 1 if any(step % size for t in (b, c) for step in t.stride()[:-1]) else size


def widest_words(spec: LayerSpec) -> int:
    """Return what `words_of` returns of aligned tensors."""
    assert spec.recurrent is not None
    size = 2 if spec.dtype == "float32" or spec.recurrent.bc_in_float32 else 4
    return 1 if state_groups(spec.recurrent.state_size)[1] % size else size


def selective_constants(
    spec: LayerSpec, config: SelectiveConfig, words: int, has: tuple[bool, bool], part: str
) -> tuple[Any, ...]:
    """Return `selective_kernel`'s constants, in its order.

    `words`: elements of B and C that are loaded at once; `has`: whether D and dt_bias are there.
    """
    form = spec.recurrent
    assert form is not None
    return (
        spec.num_heads, form.state_size, config.channels, *state_groups(form.state_size), words,
        config.ahead, *has, form.dt_softplus, form.gated, spec.num_heads // form.channel_groups, part,
    )  # fmt: skip


def way_of(
    counts: Sequence[int], width: int, configs: Sequence[SelectiveConfig], slots: int, pieces: bool
) -> tuple[SelectiveConfig, int]:
    """Return the configuration of least predicted time, and the tokens of a piece, 0 for none.

    `counts`: tokens of each sequence; `width`: channels of the layer; `slots`: schedulers that run
    programs side by side; `pieces`: whether sequences may be cut.
    """
    total, longest = sum(counts), max(counts, default=0)
    ways = []
    for config in configs:
        blocks = triton.cdiv(width, config.channels)
        shared = total * blocks / max(1, longest * slots)
        ways.append((longest * max(config.alone, config.full * shared), config, 0))
        for on_one in ON_ONE if pieces else ():
            tokens = max(LEAST_PIECE, triton.cdiv(total * blocks, slots * on_one))
            if tokens < longest:
                shared = total * blocks / (tokens * slots)
                each = TWICE * tokens * max(config.alone, config.full * shared)
                ways.append((each + CARRY * longest / tokens, config, tokens))
    return min(ways, key=lambda way: way[0])[1:]


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
    """A step's sequences cut into pieces: on the device, each one's sequence and first token.

    A captured step has as many as any lengths of its prompts need. Those that a step leaves over are of
    the last row, which has no slot: their programs end at once.
    """

    def __init__(self, batch: Batch, size: int):
        self.size = size
        starts = self._starts(batch)
        self.count = len(starts)
        if batch.num_contexts is not None:
            prompts = batch.num_seqs - 1
            self.count = (batch.num_tokens + prompts * (size - 1)) // size
        self._packed = batch.upload(self._filled(starts, batch))
        self.seq, self.start = self._packed.view(2, -1)

    def fill(self, batch: Batch) -> None:
        """Replace the pieces by those of a later step of the same captured room."""
        batch.upload(self._filled(self._starts(batch), batch), self._packed)

    def _starts(self, batch: Batch) -> list[tuple[int, int]]:
        counts = batch.query_lens if batch.num_contexts is None else batch.query_lens[:-1]
        return [(i, at) for i, count in enumerate(counts) for at in range(0, count, self.size)]

    def _filled(self, starts: list[tuple[int, int]], batch: Batch) -> NDArray[np.int32]:
        starts = starts + [(batch.num_seqs - 1, 0)] * (self.count - len(starts))
        return np.array(starts, dtype=np.int32).reshape(-1, 2).T.ravel()


class Selective:
    """Plans and launches the prefill; holds what pieces leave. One stream uses it at a time."""

    def __init__(self, spec: LayerSpec, device: torch.device):
        assert spec.recurrent is not None
        self.spec, self.device = spec, device
        self.configs = selective_configs(spec.recurrent.state_size)
        self.none = torch.empty(0, dtype=torch.float32, device=device)
        self.whole = torch.empty(0, dtype=torch.int32, device=device)
        self.left = self.steps = self.none
        self._outgrown: list[Tensor] = []

    def cut(self, batch: Batch) -> tuple[SelectiveConfig, Pieces | None]:
        """Return the configuration in which a step runs, and its pieces, None of whole sequences.

        A layer whose bits may not depend on the batch has them whole.
        """
        spec, slots = self.spec, SCHEDULERS * multiprocessors(self.device)
        config, size = way_of(
            batch.query_lens, spec.num_heads, self.configs, slots, not spec.batch_invariant
        )
        return config, Pieces(batch, size) if size else None

    def __call__(
        self,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        out: Tensor,
        states: Tensor,
        meta: tuple[Tensor, Tensor, Tensor],
        config: SelectiveConfig,
        pieces: Pieces | None,
    ) -> None:
        """Run a step. `inputs`: x, dt, B, C, z (or any); `meta`: sequences' starts, lengths and slots."""
        spec, form, none = self.spec, self.spec.recurrent, self.none
        assert form is not None
        x, dt, B, C, z = inputs
        if pieces is None and config.ahead > WIDENED_AHEAD:
            B, C, config = B.float(), C.float(), replace(config, ahead=WIDENED_AHEAD)
        has = ("D" in params, "dt_bias" in params)
        parts: tuple[str, ...] = ("whole",)
        cells = (self.whole, self.whole)
        programs, size = meta[2].numel(), 0
        if pieces is not None:
            parts, cells, programs = ("left", "out"), (pieces.seq, pieces.start), pieces.count
            size, channels = pieces.size, spec.num_heads
            self.left = at_least(self.left, programs * channels * form.state_size, self._outgrown)
            self.steps = at_least(self.steps, programs * channels, self._outgrown)
        words = words_of(B, C, form.state_size)
        each = spec.num_heads // form.channel_groups
        blocks = form.channel_groups * triton.cdiv(each, config.channels)
        for part in parts:
            _selective(
                (programs, blocks, 1),
                (
                    x, dt, params["A"], B, C, params.get("D", none), params.get("dt_bias", none),
                    z, out, states, self.left, self.steps, *meta, *cells,
                ),
                (), mamba1_strides(x, dt, B, C, z, out, states), (size,),
                selective_constants(spec, config, words, has, part), OPTIONS,
            )  # fmt: skip
