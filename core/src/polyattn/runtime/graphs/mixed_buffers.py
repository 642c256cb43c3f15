"""What does a captured step with prompts and decodes read? Buffers of metadata, prompts first.

A launch's grid is fixed at the capture, so each kind of row has room of its own: prompts' tokens at the
front, decodes behind them. One more row fills the room that prompts leave. It reads the keys of block
0, stores nothing, and its output isn't used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.graphs.step_buffers import StepBuffers, StepSize
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import positions_of
from polyattn.runtime.step.integers import Integers


class MixedBuffers(StepBuffers):
    """The metadata of `size.prompts` prompts, one row for the rest of their room, then `size.rows`.

    In any order, a step's rows of `query_len` tokens become decodes while there is room, and others
    become prompts. `places` has the new place of each token. Without `size.rows` they stay in their
    order.

    Args:
        size: what there is room for.
        max_len: the most keys of a row.
        block_size: of the cache, in tokens; None: there is none.
        device: of the tensors.
        axes: those of the tokens' positions, 0 where no layer rotates.

    Raises:
        BatchError: `size.prompt_tokens` is more than `max_len`.

    Examples:
        >>> buffers = MixedBuffers(StepSize(rows=0, prompts=2, prompt_tokens=8), 64, 16, "cpu")
        >>> step = buffers.fill(Batch([0, 5, 6], [5, 20], torch.tensor([[1, 0], [2, 3]]).int()))
        >>> step.query_lens, step.lens
        ([5, 1, 2], [5, 20, 2])

    """

    def __init__(
        self, size: StepSize, max_len: int, block_size: int | None, device: Any, axes: int = 0
    ):
        if size.prompt_tokens > max_len:
            raise BatchError(
                f"StepSize.prompt_tokens={size.prompt_tokens} is more than a row's keys, "
                f"max_len={max_len}; capture fewer, or a longer max_len"
            )
        rows, tokens = size.prompts + 1 + size.rows, size.tokens
        self.size, self.sharing = size, False
        self.padding_len = 0 if size.query_len == 1 else size.query_len
        self._allocate(rows, tokens, max_len, block_size, device, axes)
        self.starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        each, last = size.query_len, size.rows * size.query_len
        self.row_starts = torch.arange(0, last + 1, each, dtype=torch.int32, device=device)
        self.order = torch.zeros(rows, dtype=torch.int64, device=device)
        self.places = torch.zeros(tokens, dtype=torch.int64, device=device)

    def longest(self) -> Batch:
        """Return the step that a graph is captured with: one prompt has all prompts' tokens."""
        size = self.size
        rest = size.prompts
        queries = [size.prompt_tokens] + [0] * rest + [size.query_len] * size.rows
        held = [size.prompt_tokens] + [0] * rest + [self.padding_len] * size.rows
        self._put(self.seq_lens, held)
        most = [self.max_len] + [0] * rest + [self.max_len] * size.rows
        return self._over(queries, most)

    def batch(self, lens: Sequence[int] | Integers) -> Batch:
        """Refuse: queries of mixed steps vary.

        Args:
            lens: of a step's rows.

        Returns:
            Nothing.

        Raises:
            BatchError: always; `fill` and `longest` make the batch.

        """
        raise BatchError("mixed steps have no fixed queries; fill() or longest() makes their batch")

    def fits(self, batch: Batch) -> bool:
        """Return whether there is room for the step's prompts, and for its other rows.

        Args:
            batch: the step.

        """
        _, prompts = self._split(batch)
        tokens = sum(batch.query_lens[i] for i in prompts)
        room = len(prompts) <= self.size.prompts and tokens <= self.size.prompt_tokens
        room = room and batch.state_targets is None
        return room and batch.max_seq_len <= self.max_len

    def stage(self, batch: Batch) -> Batch:
        """Copy a step's metadata in; `copy` has only what is beside it left to do.

        Args:
            batch: the step, which fits. If its lengths are bounds, the device's are copied.

        Returns:
            The step as the graph sees it, over these buffers.

        """
        size, queries = self.size, batch.query_lens
        self.staging.drop()
        decodes, prompts = self._split(batch)
        counts = [queries[i] for i in prompts] + [0] * (size.prompts - len(prompts))
        left, missing = size.prompt_tokens - sum(counts), size.rows - len(decodes)
        filled = [*counts, left] + [size.query_len] * size.rows
        lens = [batch.lens[i] for i in prompts] + [0] * (size.prompts - len(prompts)) + [left]
        lens += [batch.lens[i] for i in decodes] + [self.padding_len] * missing
        self._put(self.seq_lens, lens)
        self._put(self.order, prompts + decodes)
        if batch.lens_are_bounds:  # the device's count
            self._gather(batch.seq_lens, self.seq_lens, len(prompts), len(decodes))
        self._place(batch, prompts, decodes)
        places = self.places[: batch.num_tokens]
        self._fill_table(batch, len(prompts), len(decodes))
        self.slots.fill_(-1)
        if self.slot_mapping is not None and batch.slot_mapping is not None:
            self.slot_mapping.index_copy_(0, places, batch.slot_mapping)
        if batch.state_slots is not None:  # the row that fills the prompts' room has none
            self._gather(batch.state_slots, self.state_slots, len(prompts), len(decodes))
        if self.positions is not None:
            self.positions.zero_()
            of_tokens = positions_of(batch).expand(*self.positions.shape[:-1], -1)
            self.positions.index_copy_(-1, places, of_tokens)
        return self._over(filled, lens)

    def copy(self, batch: Batch, beside: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """Send what is staged, and the second tensor of each pair.

        Args:
            batch: the step that was staged.
            beside: the pairs.

        """
        self.staging.send(beside)

    def rows(self, batch: Batch) -> Tensor:
        """Return where a graph has the tokens of the step that was filled in.

        Args:
            batch: the step.

        """
        return self.places[: batch.num_tokens]

    def _split(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Return the rows that go to the decodes' room, and all others."""
        each = self.size.query_len
        decodes = [i for i, n in enumerate(batch.query_lens) if n == each][: self.size.rows]
        taken = set(decodes)
        return decodes, [i for i in range(batch.num_seqs) if i not in taken]

    def _place(self, batch: Batch, prompts: list[int], decodes: list[int]) -> None:
        """Find where each of the step's tokens goes, in the step's order."""
        queries, starts = batch.host_query_lens, batch.host_starts
        places = np.empty(batch.num_tokens, np.int64)
        for seqs, at in ((prompts, 0), (decodes, self.size.prompt_tokens)):
            for i in seqs:
                places[starts[i] : starts[i + 1]] = np.arange(at, at + queries[i])
                at += int(queries[i])
        self._put(self.places, places)

    def _fill_table(self, batch: Batch, prompts: int, decodes: int) -> None:
        if self.block_table is None or batch.block_table is None:
            return
        width = min(batch.block_table.shape[1], self.block_table.shape[1])
        self.block_table.zero_()
        self._gather(batch.block_table[:, :width], self.block_table[:, :width], prompts, decodes)

    def _gather(self, rows: Tensor, into: Tensor, prompts: int, decodes: int) -> None:
        """Copy a step's rows to where `order` has them."""
        for at, first, count in ((0, 0, prompts), (self.size.prompts + 1, prompts, decodes)):
            goal = into[at : at + count]
            torch.index_select(rows, 0, self.order[first : first + count], out=goal)

    def _over(self, queries: list[int], lens: list[int]) -> Batch:
        """Return a batch over these buffers, of rows of that many tokens."""
        starts = [0, *accumulate(queries)]
        self._put(self.starts, starts)
        batch = self._on_these(starts, lens)
        batch.state_slots, batch.num_contexts = self.state_slots, self.size.prompts + 1
        batch.decode_start_loc, batch.staging = self.row_starts, self.staging
        return batch
