"""How is a step composed at random? Requests of a pool in any order, in any blocks, some of them spoilt.

A pool's requests are computed once, by the reference; what a request gives may depend neither on its
place nor on its company, so one answer serves every batch that it is in. All batches of a round lie in
one cache, whose unused blocks hold NaN, as does whatever a spoilt request was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

POOL = 32
"""Requests of a pool."""
SIZES = (1, 2, 2, 3, 3, 4, 5, 6, 9, 0)
"""How many requests a batch has, each as likely: 0 is a step without any."""
SPOILT = 0.15
"""How many of the requests hold NaN or infinities."""


def draw_lengths(dice: np.random.Generator, block: int, count: int = POOL) -> list[tuple[int, int]]:
    """Return (query, sequence) lengths: decodes, chunks, whole prompts, empty ones and padding rows."""
    found = []
    longest = min(3 * block + 3, 70)
    for _ in range(count):
        query = int(dice.choice((1, 1, 1, 1, 2, 3, 5, 9, block + 1 if block < 17 else 7, 0)))
        drawn = [int(n) for n in dice.integers(longest, size=2)]
        context = int(dice.choice([0, 1, *drawn]))
        found.append((1, 0) if dice.random() < 0.04 else (query, query + context))
    return found


def ranges(starts: Array, counts: Array) -> Array:
    """Return `starts[i], …, starts[i] + counts[i] - 1` for each i, one after another."""
    first = np.cumsum(counts) - counts
    found: Array = np.repeat(starts - first, counts) + np.arange(int(counts.sum()))
    return found


@dataclass
class Requests:
    """What a pool's requests are long: query tokens, and tokens in all."""

    queries: Array
    lens: Array

    @classmethod
    def of(cls, lengths: list[tuple[int, int]]) -> Requests:
        """Return the pool of these (query, sequence) lengths."""
        return cls(np.array([q for q, _ in lengths]), np.array([n for _, n in lengths]))

    @property
    def padding(self) -> Array:
        """Which are padding rows: one query token, length 0."""
        found: Array = (self.queries == 1) & (self.lens == 0)
        return found


class Composition:
    """Batches of a pool's requests: batch b has sequences `bounds[b]` up to `bounds[b + 1]`.

    - `request` (sequences,): which request each sequence is.
    - `token_of`, `row_of`: for each token (each query row) of all batches, which token (query row) of
      the pool it is.
    - `token_starts`, `row_starts` (sequences + 1,): where each sequence's begin.
    - `spoilt` (sequences,): which hold NaN or infinities.
    """

    def __init__(self, pool: Requests, count: int, dice: np.random.Generator):
        sizes = dice.choice(SIZES, count)
        self.bounds = np.concatenate([[0], np.cumsum(sizes)])
        self.request = dice.integers(len(pool.lens), size=self.bounds[-1])
        self.queries, self.lens = pool.queries[self.request], pool.lens[self.request]
        self.padding = pool.padding[self.request]
        starts = np.cumsum(pool.lens) - pool.lens
        self.token_of = ranges(starts[self.request], self.lens)
        starts = np.cumsum(pool.queries) - pool.queries
        self.row_of = ranges(starts[self.request], self.queries)
        self.token_starts = np.concatenate([[0], np.cumsum(self.lens)])
        self.row_starts = np.concatenate([[0], np.cumsum(self.queries)])
        self.spoilt = (dice.random(len(self.request)) < SPOILT) & ~self.padding
        self._dice = dice

    @property
    def count(self) -> int:
        """Batches."""
        return len(self.bounds) - 1

    def batch(self, index: int) -> tuple[slice, slice]:
        """Return a batch's sequences and its query rows."""
        first, last = (int(bound) for bound in self.bounds[index : index + 2])
        return slice(first, last), slice(int(self.row_starts[first]), int(self.row_starts[last]))

    def blocks(self, block: int) -> tuple[Array, int]:
        """Return int32 (sequences, blocks), each block used once, and the cache's number of blocks.

        Entries past a length point at block 0, which no sequence has.
        """
        needed = -(-self.lens // block)
        total = int(needed.sum()) + 2
        order = self._dice.permutation(total - 1) + 1
        table = np.zeros((len(needed), int(needed.max(initial=0)) + 1), dtype=np.int32)
        used = np.arange(table.shape[1]) < needed[:, None]
        table[used] = order[: int(needed.sum())]
        return table, total

    def slots(self, table: Array, block: int) -> Array:
        """Return int64 (tokens,): where each token lies."""
        seq = np.repeat(np.arange(len(self.lens)), self.lens)
        at = ranges(np.zeros_like(self.lens), self.lens)
        slots: Array = table[seq, at // block].astype(np.int64) * block + at % block
        return slots

    def new_tokens(self) -> tuple[Array, Array]:
        """Return which tokens are new in their step, (tokens,), and each query row's token, (rows,).

        A padding row has none; any stands for it.
        """
        new = ranges(np.zeros_like(self.lens), self.lens) >= np.repeat(
            self.lens - self.queries, self.lens
        )
        own = ranges(self.token_starts[1:] - self.queries, self.queries)
        return new, np.clip(own, 0, max(len(new) - 1, 0))

    def sound_rows(self) -> Tensor:
        """Return which query rows are of no spoilt request, bool (rows,)."""
        return torch.from_numpy(~np.repeat(self.spoilt, self.queries))

    def batch_of_rows(self) -> Array:
        """Return each query row's batch, (rows,)."""
        batch = np.repeat(np.arange(self.count), np.diff(self.bounds))
        return np.repeat(batch, self.queries)

    def spoil(self, parts: list[tuple[Tensor, Array]]) -> None:
        """Put NaN or infinities into one part of each spoilt request.

        `parts`: each a tensor and where its sequences start, (sequences + 1,): all of a request's
        rows of it, or one of them.
        """
        for seq in np.flatnonzero(self.spoilt):
            tensor, starts = parts[self._dice.integers(len(parts))]
            first, last = int(starts[seq]), int(starts[seq + 1])
            if first == last:
                continue
            rows = tensor[first:last]
            if self._dice.random() < 0.5:
                rows = rows[int(self._dice.integers(last - first))]
            number = (torch.nan, torch.inf, -torch.inf)[self._dice.integers(3)]
            rows.fill_(torch.nan if rows.dtype.itemsize == 1 else number)  # e4m3 has no infinities


def worst_by_batch(found: Tensor, expected: Tensor, batch: Array, count: int) -> Tensor:
    """Return each batch's largest relative error, (count,), as `checking.compare` defines it.

    `found`, `expected` (rows, heads, size), `batch` (rows,).
    """
    found = found.detach().to("cpu", torch.float64)
    norms = expected.norm(dim=-1)
    index = torch.from_numpy(batch)
    floor = torch.zeros(count, dtype=torch.float64)
    floor = floor.scatter_reduce(0, index, norms.amax(1), "amax") * 1e-2
    floor = floor.clamp(min=1e-30)
    error = (found - expected).norm(dim=-1) / torch.maximum(norms, floor[index][:, None])
    error = error.nan_to_num(nan=torch.inf).amax(1)
    return torch.zeros(count, dtype=torch.float64).scatter_reduce(0, index, error, "amax")


def worst_lse_by_batch(found: Tensor, expected: Tensor, batch: Array, count: int) -> Tensor:
    """Return each batch's largest absolute difference of the LSE; -inf only equals itself."""
    found = found.detach().to("cpu", torch.float64)
    error = (found - expected).abs().nan_to_num(nan=torch.inf)
    error[(found == -torch.inf) & (expected == -torch.inf)] = 0.0
    worst = torch.zeros(count, dtype=torch.float64)
    return worst.scatter_reduce(0, torch.from_numpy(batch), error.amax(1), "amax")
