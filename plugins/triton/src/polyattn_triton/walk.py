"""How does Triton walk through a prompt's chunks? Sequences whole, or few long ones in pieces.

A piece takes a state h to h M + e, where e is what it leaves of no state. M is a decay for Mamba-2 and
linear attention, and a matrix for the delta rules. One launch ("left") finds e and M of every piece, a
second ("out") starts each piece with what those before it leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from polyattn.kernel import AttentionKind, Batch, LayerSpec, arch_matches, at_least
from torch import Tensor

from polyattn_triton.configs import WALKS, WalkConfig, prompt_config
from polyattn_triton.launch import multiprocessors, power
from polyattn_triton.selective import Pieces

PIECES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Into how many pieces the longest sequence may be cut."""
WIDEST = 128
"""Keys of a head up to which a program holds what a matrix M multiplies."""
GATED = (AttentionKind.MAMBA2, AttentionKind.LINEAR)


def key_value_sizes(spec: LayerSpec) -> tuple[int, int]:
    """Return the state's sizes along keys and values: Mamba-2's are N and its head size."""
    assert spec.recurrent is not None
    if spec.kind is AttentionKind.MAMBA2:
        return spec.recurrent.state_size, spec.head_size
    return spec.head_size, spec.v_head_size


def tokens_of_piece(
    counts: Sequence[int],
    chunk: int,
    config: WalkConfig,
    blocks: tuple[int, int],
    chip: tuple[int, float],
) -> int:
    """Return the tokens of a piece with which a walk takes the least; 0: of whole sequences.

    `counts`: tokens of each sequence. `blocks`: programs of a piece in the launches "out" and "left".
    `chip`: multiprocessors, and how many programs one runs side by side in the time of one. Each has a
    whole number of programs, so that one more than fit at once costs a turn.
    """
    total, longest = sum(counts), triton.cdiv(max(counts, default=0), chunk)
    processors, beside = chip

    def turns(programs: float) -> float:
        return math.ceil(programs / processors) / beside

    ways = [(longest * max(1.0, turns(total * blocks[0] / (chunk * max(longest, 1)))), 0)]
    for pieces in PIECES:
        if pieces > longest:
            break
        size = triton.cdiv(longest, pieces)
        tokens, last = size * chunk, triton.cdiv(longest, size) - 1
        before = sum((count - 1) // tokens for count in counts if count)
        left = config.left * size * max(1.0, turns(before * blocks[1]))
        shared = turns(total * blocks[0] / tokens) * (size + config.carry * last / 2)
        out = max(size + config.carry * (last + 1), shared)
        ways.append((config.begin + left + out, tokens))
    return min(ways)[1]


class Launch(NamedTuple):
    """One of a walk's launches: the kernel's part, its grid, and what it is told of pieces."""

    part: str
    grid: tuple[int, int, int]
    left: Tensor
    cells: tuple[Tensor, Tensor]
    tokens: int


class Walk:
    """Cuts sequences to pieces, and holds what these leave. One stream uses it at a time."""

    def __init__(self, spec: LayerSpec, arch: str, device: torch.device):
        config = prompt_config(spec, arch)
        (keys, values), self.heads = key_value_sizes(spec), spec.num_heads
        block = min(config.block_v, power(values))
        out = left = triton.cdiv(values, block)
        self.each = power(keys) * block * out + 1
        if spec.kind not in GATED:
            left += triton.cdiv(keys, block)
            self.each = power(keys) * block * left
        self.blocks = {"whole": out, "out": out, "left": left}
        self.chunk, self.config = config.chunk, WALKS[spec.kind]
        # Wider states leave a multiprocessor room for fewer programs, down to one.
        beside = max(1.0, self.config.on_one * 128 / power(keys))
        self.chip = multiprocessors(device), beside
        # Products with a matrix M are of 16 bits, and M has its registers on Hopper: sm_80 spills 9 KB.
        elsewhere = arch.startswith(("sm_", "gfx")) and not arch_matches("sm_90", arch)
        products = spec.dtype != "float32" and power(keys) <= WIDEST and not elsewhere
        self.cuts = not spec.batch_invariant and (spec.kind in GATED or products)
        self.left = torch.empty(0, dtype=torch.float32, device=device)
        self._none = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []

    def cut(self, batch: Batch) -> Pieces | None:
        """Return the pieces in which a step is walked through; None: whole sequences."""
        if not self.cuts:
            return None
        blocks = self.heads * self.blocks["out"], self.heads * self.blocks["left"]
        size = tokens_of_piece(batch.query_lens, self.chunk, self.config, blocks, self.chip)
        return Pieces(batch, size) if size else None

    def launches(self, sequences: int, pieces: Pieces | None) -> Iterator[Launch]:
        """Yield the launches of a step."""
        parts: tuple[str, ...] = ("whole",)
        cells, programs, size = (self._none, self._none), sequences, 0
        if pieces is not None:
            parts, cells, programs = ("left", "out"), (pieces.seq, pieces.start), pieces.count
            size, room = pieces.size, programs * self.heads * self.each
            self.left = at_least(self.left, room, self._outgrown)
        for part in parts:
            grid = programs, self.heads, self.blocks[part]
            yield Launch(part, grid, self.left, cells, size)
