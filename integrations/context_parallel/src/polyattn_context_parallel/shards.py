"""Which rank holds which keys and tokens: keys by block of each sequence, a prompt's tokens by zigzag.

Keys: an engine's block of `block_size * size` tokens is `size` blocks of `block_size`, one on each rank,
under the same number. So block tables, allocation and prefix caches are the same as on one device, and
all ranks' parts grow at the same rate.

Tokens: a sequence's new tokens are cut into 2 * size pieces; rank r computes piece r and piece
2 * size - 1 - r. Under a causal mask a piece's cost grows with the keys before it. So each pair costs
the same, as in Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from polyattn import Batch
from torch import Tensor

from polyattn_context_parallel.ranks import ContextParallel

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """How a sequence's keys lie on `size` ranks, in blocks of `block_size` tokens; `rank` is this one."""

    block_size: int
    rank: int
    size: int

    @property
    def engine_block(self) -> int:
        """Return the tokens of an engine's block: all ranks' parts together."""
        return self.block_size * self.size

    def held(self, lens: Any) -> Numbers:
        """Return how many of each sequence's first tokens this rank holds."""
        whole, rest = np.divmod(np.asarray(lens, np.int64), self.engine_block)
        mine = (rest - self.rank * self.block_size).clip(0, self.block_size)
        held: Numbers = whole * self.block_size + mine
        return held

    def slots(self, slots: Tensor) -> Tensor:
        """Return where this rank stores tokens of the engine's `slots`, -1 for another rank's."""
        block, offset = slots // self.engine_block, slots % self.engine_block
        owner, within = offset // self.block_size, offset % self.block_size
        mine = (owner == self.rank) & (slots >= 0)
        return torch.where(mine, block * self.block_size + within, -1)


@dataclass(frozen=True)
class Zigzag:
    """Which of a step's tokens each rank computes. `query_lens`: new tokens of each sequence."""

    query_lens: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, batch: Batch, size: int) -> Zigzag:
        """Return the shares of a step's tokens."""
        return cls(tuple(batch.query_lens), size)

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """Return a rank's pieces as (sequence, first, last + 1), in the order of its tokens.

        Two for each sequence; either may be empty.
        """
        count = 2 * self.size
        return [
            (seq, piece * n // count, (piece + 1) * n // count)
            for seq, n in enumerate(self.query_lens)
            for piece in (rank, count - 1 - rank)
        ]

    def tokens(self, rank: int) -> Numbers:
        """Return the step's tokens that a rank computes, in its order."""
        starts = np.concatenate([[0], np.cumsum(self.query_lens)])
        runs = [np.arange(starts[s] + a, starts[s] + b) for s, a, b in self.pieces(rank)]
        return np.concatenate(runs).astype(np.int64) if runs else np.zeros(0, np.int64)

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(b - a for _, a, b in self.pieces(rank)) for rank in range(self.size)]

    @property
    def longest(self) -> int:
        """Return the largest rank's number of tokens. Every rank's part is padded to it for transfer."""
        return max(self.counts)

    def places(self) -> Numbers:
        """Return each token's place among all ranks' padded parts, in rank order."""
        positions = np.empty(sum(self.query_lens), np.int64)
        for rank in range(self.size):
            tokens = self.tokens(rank)
            positions[tokens] = rank * self.longest + np.arange(len(tokens))
        return positions


def own_heads(count: int, rank: int, size: int) -> slice:
    """Return the heads that a rank has of `count`; neighbours have the same where there are fewer."""
    if count >= size:
        return slice(rank * (count // size), (rank + 1) * (count // size))
    first = rank * count // size
    return slice(first, first + 1)


class Shares:
    """Gathers and scatters a step's tensors (tokens, heads, ...) between ranks, by rows and heads.

    `mine` int64: this rank's own tokens, where each rank has its own.
    """

    def __init__(self, batch: Batch, context: ContextParallel):
        self.context, zigzag = context, Zigzag.of(batch, context.size)
        self.longest = zigzag.longest
        tokens = [torch.from_numpy(zigzag.tokens(rank)) for rank in range(context.size)]
        # Each rank's tokens by their place in the step. Any token may serve as padding.
        parts = torch.zeros(context.size, self.longest, dtype=torch.int64, device="cpu")
        for part, own in zip(parts, tokens, strict=True):
            part[: len(own)] = own
        self.mine, self.parts = tokens[context.rank].to(batch.device), parts.to(batch.device)
        self.places = torch.from_numpy(zigzag.places()).to(batch.device)

    def all_tokens(self, own: Tensor) -> Tensor:
        """Gather the step's rows from all ranks."""
        return self.context.gathered(self._padded(own)).flatten(0, 1)[self.places]

    def own_heads(self, whole: Tensor) -> Tensor:
        """Return this rank's heads of a tensor with all of them."""
        heads = own_heads(whole.shape[1], self.context.rank, self.context.size)
        return whole[:, heads].contiguous()

    def all_heads(self, own: Tensor) -> Tensor:
        """Gather a tensor's heads from all ranks."""
        return self.context.gathered(own).transpose(0, 1).flatten(1, 2)

    def to_heads(self, own: Tensor) -> Tensor:
        """Exchange own tokens of all heads for all tokens of own heads."""
        size, padded = self.context.size, self._padded(own)
        cuts = [own_heads(own.shape[1], rank, size) for rank in range(size)]
        sent = torch.stack([padded[:, cut] for cut in cuts])
        return self.context.exchanged(sent).flatten(0, 1)[self.places]

    def to_tokens(self, own: Tensor) -> Tensor:
        """Exchange all tokens of own heads for own tokens of all heads."""
        received = self.context.exchanged(own[self.parts])
        return received[:, : len(self.mine)].transpose(0, 1).flatten(1, 2)

    def _padded(self, own: Tensor) -> Tensor:
        padded = own.new_zeros(self.longest, *own.shape[1:])
        padded[: len(own)] = own
        return padded
