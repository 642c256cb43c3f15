"""`Step`: a step's numbers on the host, in NumPy. It needs neither torch nor JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from polyattn.plugin import BatchError

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Step:
    """One step's sequences, packed one after another, as `polyattn.Batch` has them.

    `query_lens`, `seq_lens` (num_seqs,): new tokens, and context plus new tokens, of each sequence.
    `block_table` int32 (num_seqs, blocks), `slots` (num_tokens,), -1 skips: for a paged cache.
    `state_slots` (num_seqs,), -1 for a padding row: for a recurrence. `key_starts` (num_seqs,): for
    keys that are passed whole, each sequence's first row. `numbers`: for a part of a step, the places of
    its sequences in the whole step. Raises `BatchError`.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: Ints | None = None
    slots: Ints | None = None
    state_slots: Ints | None = None
    key_starts: tuple[int, ...] | None = None
    numbers: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: ArrayLike | None = None,
        slots: ArrayLike | None = None,
        *,
        state_slots: ArrayLike | None = None,
        key_starts: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Step:
        """Check the arguments and return the step. Raises `BatchError`."""
        queries, lens = tuple(map(int, query_lens)), tuple(map(int, seq_lens))
        if len(queries) != len(lens):
            raise BatchError(
                f"query_lens has {len(queries)} entries and seq_lens {len(lens)}; pass one of "
                f"each for every sequence"
            )
        for name, values in (("query_lens", queries), ("seq_lens", lens)):
            if any(value < 0 for value in values):
                raise BatchError(f"{name}={values[:4]}… must be 0 or more each")
        starts = None if key_starts is None else tuple(map(int, key_starts))
        if starts is not None and (len(starts) != len(lens) or min(starts, default=0) < 0):
            raise BatchError(
                f"key_starts={starts[:4]}… must name one place for each of {len(lens)}"
            )
        return cls(
            queries,
            lens,
            _ints("block_table", block_table, (len(lens), None)),
            _ints("slots", slots, (sum(queries),)),
            _ints("state_slots", state_slots, (len(lens),)),
            starts,
            None if numbers is None else tuple(map(int, numbers)),
        )

    @classmethod
    def from_batch(cls, batch: Any) -> Step:
        """Return a `polyattn.Batch`'s step; what only its device has is copied to the host."""
        table = batch.host_block_table
        if table is None and batch.block_table is not None:
            table = batch.block_table.cpu().numpy()
        slots, states = (
            None if t is None else t.cpu().numpy() for t in (batch.slot_mapping, batch.state_slots)
        )
        return cls.of(
            batch.query_lens, batch.lens, table, slots,
            state_slots=states, key_starts=batch.key_starts, numbers=batch.seq_ids,
        )  # fmt: skip

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens in the step."""
        return sum(self.query_lens)

    @property
    def starts(self) -> list[int]:
        """Where each sequence's query tokens start."""
        return [0, *accumulate(self.query_lens)][:-1]

    @property
    def all_decode(self) -> bool:
        """Whether every sequence has exactly one query token."""
        return bool(self.query_lens) and set(self.query_lens) == {1}


def _ints(name: str, values: ArrayLike | None, shape: tuple[int | None, ...]) -> Ints | None:
    if values is None:
        return None
    numbers = np.asarray(values)
    fits = numbers.ndim == len(shape) and all(
        n is None or n == m for n, m in zip(shape, numbers.shape, strict=True)
    )
    if not fits or not np.issubdtype(numbers.dtype, np.integer):
        wanted = ", ".join("blocks" if n is None else str(n) for n in shape)
        raise BatchError(
            f"{name} is {numbers.dtype} of shape {numbers.shape}; it must be integers of shape ({wanted})"
        )
    return numbers.astype(np.int32)
