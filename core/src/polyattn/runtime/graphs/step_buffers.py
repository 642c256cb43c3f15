"""What does a captured step read? Buffers of its metadata, which each step is copied into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import gt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError, flag
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import positions_of
from polyattn.runtime.step.integers import Integers, upload
from polyattn.runtime.step.staging import ROOM, Staging
from polyattn.spec.kinds import GraphCapture


@dataclass(frozen=True)
class StepSize:
    """The capacity of a captured step.

    Attributes:
        rows: rows of `query_len` tokens each, an engine's decodes.
        query_len: query tokens of such a row.
        prompts: further rows of any number of tokens.
        prompt_tokens: the most tokens of all prompts together.
        state_targets: it serves steps with `Batch.state_targets`, and no others.

    Raises:
        BatchError: a number doesn't fit the others.

    Examples:
        >>> StepSize(rows=8, prompts=2, prompt_tokens=512).query_len
        1

    """

    rows: int
    query_len: int = 1
    prompts: int = 0
    prompt_tokens: int = 0
    state_targets: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "query_len", "prompts", "prompt_tokens"):
            value, least = getattr(self, name), int(name == "query_len")
            if type(value) is not int or value < least:
                raise BatchError(f"StepSize.{name}={value!r} must be an integer, {least} or more")
        flag("StepSize.state_targets", self.state_targets, BatchError)
        if (self.prompts > 0) != (self.prompt_tokens > 0):
            raise BatchError(
                f"StepSize.prompts={self.prompts} and prompt_tokens={self.prompt_tokens} are both "
                "positive, or both 0"
            )
        if not self.rows and not self.prompts:
            raise BatchError("StepSize.rows=0: set rows or prompts")
        if self.prompts and self.state_targets:
            raise BatchError(
                f"StepSize.state_targets=True beside prompts={self.prompts}: prompts' states stay in "
                "their slots; capture a size with prompts=0"
            )

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.rows * self.query_len + self.prompt_tokens

    @property
    def capture(self) -> GraphCapture:
        """The level of `graph_capture` that backends must claim for it."""
        if self.prompts:
            return GraphCapture.ANY
        return GraphCapture.SINGLE_TOKEN_DECODE if self.query_len == 1 else GraphCapture.UNIFORM

    def __str__(self) -> str:
        rows = f"{self.rows} rows of {self.query_len}" + ", state targets" * self.state_targets
        if not self.prompts:
            return rows
        return f"{rows} and {self.prompts} prompts of {self.prompt_tokens} tokens together"


class StepBuffers:
    """The metadata that a captured graph reads: `num_seqs` rows of `query_len` tokens.

    `axes`: those of the tokens' positions, 0 where no layer rotates.

    `sharing`: whether steps know which blocks their rows share.

    `padding_rows`: whether all that runs takes rows of several tokens and no key.

    Missing sequences are padding, rows of length 0. Of several tokens, where not all take that, they are
    rows that read the keys of block 0. Neither stores anything, and nothing reads their output.
    """

    def __init__(
        self, num_seqs: int, query_len: int, max_len: int, block_size: int | None, device: Any,
        axes: int = 0, sharing: bool = False, padding_rows: bool = False, state_targets: bool = False,
    ):  # fmt: skip
        self.size = StepSize(num_seqs, query_len, state_targets=state_targets)
        self.padding_len = 0 if padding_rows or query_len == 1 else query_len
        self.sharing = sharing and block_size is not None
        tokens = num_seqs * query_len
        self.starts = torch.arange(0, tokens + 1, query_len, dtype=torch.int32, device=device)
        self._allocate(num_seqs, tokens, max_len, block_size, device, axes)

    def _allocate(
        self,
        num_seqs: int,
        tokens: int,
        max_len: int,
        block_size: int | None,
        device: Any,
        axes: int,
    ) -> None:
        """Allocate the tensors with an element for each row, or for each token."""

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.query_len = self.size.query_len
        self.num_seqs, self.max_len, self.block_size = num_seqs, max_len, block_size
        self.staging = Staging(torch.device(device), 8 * num_seqs + ROOM)
        self.seq_lens = self.staging.room(num_seqs)
        self.block_table = ints(num_seqs, -(-max_len // block_size)) if block_size else None
        # What is -1 where a step has nothing lies side by side, so that one launch empties it.
        counts = (tokens, num_seqs, num_seqs * self.query_len)
        self.slots = ints(3, -(-max(counts) // 2) * 2, dtype=torch.int64) - 1
        stored, states, targets = (row[:n] for row, n in zip(self.slots, counts, strict=True))
        self.slot_mapping = stored if block_size else None
        self.state_slots = states
        self.state_targets: Tensor | None = None
        self._views: dict[int, tuple[Tensor, int, int, Tensor]] = {}
        self._held = (0, 0, 0)  # rows, slots and states that the last step wrote
        if self.size.state_targets:
            self.state_targets = targets.view(num_seqs, self.query_len)
        places = (axes, tokens) if axes > 1 else (tokens,)
        self.positions = ints(*places, dtype=torch.int64) if axes else None

    @property
    def num_tokens(self) -> int:
        """Tokens that a graph over these buffers computes in every step."""
        return self.size.tokens

    def longest(self) -> Batch:
        """Return the step that a graph is captured with: planned for the most keys, few on the device."""
        self.seq_lens.fill_(self.padding_len)
        return self._staged(self._longest.host_lens)

    def _staged(self, lens: Integers) -> Batch:
        """Return `batch(lens)`, whose plans' numbers wait in `staging`."""
        batch = self._longest.with_lens(lens)
        batch.staging = self.staging
        return batch

    def batch(self, lens: Sequence[int] | Integers) -> Batch:
        """Return a batch over these buffers; `lens` is what `seq_lens` holds, or will at most."""
        return self._longest.with_lens(np.array(lens, np.int64))

    @cached_property
    def _longest(self) -> Batch:
        """A batch over these buffers, with the most keys. A step is this one with its own lengths."""
        starts = list(range(0, self.num_seqs * self.query_len + 1, self.query_len))
        batch = self._on_these(starts, [self.max_len] * self.num_seqs)
        batch.state_slots, batch.state_targets = self.state_slots, self.state_targets
        return batch.with_shared_prefix(()) if self.sharing else batch

    def _on_these(self, starts: list[int], lens: list[int]) -> Batch:
        """Return a batch whose tensors are these buffers."""
        return Batch.on_buffers(
            starts,
            lens,
            self.starts,
            self.seq_lens,
            self.block_table,
            self.slot_mapping,
            self.positions,
        )

    def fits(self, batch: Batch) -> bool:
        """Whether a step is of this shape, or smaller."""
        count = len(batch.host_lens)
        return (
            count <= self.num_seqs
            and batch.num_tokens == count * self.query_len
            and batch.max_query_len <= self.query_len
            and batch.max_seq_len <= self.max_len
            and (batch.state_targets is not None) == self.size.state_targets
        )

    def fill(self, batch: Batch, beside: Iterable[tuple[Tensor, Tensor]] = ()) -> Batch:
        """Copy a step's metadata in, and the second of each pair `beside` it, in the same launches.

        Args:
            batch: the step, which fits.
            beside: pairs of tensors.

        Returns:
            The step as the graph sees it.

        """
        filled = self.stage(batch)
        self.copy(batch, beside)
        filled.staging = None
        return filled

    def stage(self, batch: Batch) -> Batch:
        """Write a step's lengths to `staging`, which is yet to be sent, and return it as `fill` does."""
        lens, longest, staging = batch.host_lens, batch.max_seq_len, self.staging
        count = len(lens)
        if count < self.num_seqs:
            longest = max(longest, self.padding_len)
            lens = np.full(self.num_seqs, self.padding_len, np.int64)
            lens[:count] = batch.host_lens
        staging.drop()  # what a refused step left
        if not _has_lens(batch):
            staging.put(self.seq_lens, lens)
        filled = self._longest.with_lens(lens)
        filled.staging, filled.max_seq_len = staging, longest
        filled._covers_queries = batch._covers_queries  # padding is as the backends take it
        if self.sharing:  # padding comes last, so rows keep their numbers
            assert self.block_size is not None
            filled = filled.with_shared_prefix(batch.find_shared_prefix(self.block_size))
        return filled

    def copy(self, batch: Batch, beside: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """Send what is staged, a step's tensors, and the second of each pair `beside` it together."""
        count, tokens, pairs = len(batch.host_lens), batch.num_tokens, list(beside)
        slots, states = batch.slot_mapping, batch.state_slots
        held = (count, 0 if slots is None else tokens, 0 if states is None else count)
        if held != self._held or self.state_targets is not None:
            self._empty(held)
        if _has_lens(batch):
            pairs.append((self.seq_lens[:count], batch.seq_lens))
            if count < self.num_seqs:
                self.seq_lens[count:] = self.padding_len
        table, source = self.block_table, batch.block_table
        if table is not None and source is not None:
            width = source.shape[1]
            if width > table.shape[1]:
                width = table.shape[1]
                source = source[:, :width]
            pairs.append((self.first(table, count, width), source))
        if self.positions is not None:
            places = self.positions
            each = self.first(places, tokens) if places.dim() == 1 else places[:, :tokens]
            pairs.append((each, positions_of(batch)))
        if slots is not None and self.slot_mapping is not None:
            pairs.append((self.first(self.slot_mapping, tokens), slots))
        if states is not None:
            pairs.append((self.first(self.state_slots, count), states))
        if self.state_targets is not None:
            pairs += self._targets(batch.state_targets)
        self.staging.send(pairs)

    def _empty(self, held: tuple[int, int, int]) -> None:
        """Empty what no step holds, where an earlier one had more rows, slots or states than `held`."""
        if self.state_targets is not None or any(map(gt, self._held, held)):
            self.slots.fill_(-1)
            if self.block_table is not None:
                self.block_table[held[0] :] = 0
            if self.positions is not None:
                self.positions.zero_()
        self._held = held

    def first(self, buffer: Tensor, rows: int, width: int = 0) -> Tensor:
        """Return what `copy_together` fills a buffer's first rows by: the last step's, if as many.

        It is a view: of a part of one row flat, of int64 as int32.

        Args:
            buffer: one that a graph reads.
            rows: its rows.
            width: its columns; 0: all.

        """
        of, count, columns, view = self._views.get(id(buffer), (None, 0, 0, buffer))
        if of is not buffer or (count, columns) != (rows, width):
            view = buffer[:rows]
            if width:
                flat = rows == 1 and width < buffer.shape[1]
                view = buffer[0, :width] if flat else buffer[:rows, :width]
            if view.dtype is torch.int64:
                view = view.view(torch.int32)
            self._views[id(buffer)] = buffer, rows, width, view
        return view

    def rows(self, batch: Batch) -> slice | Tensor:
        """Return where a graph has the tokens of the step that was filled in."""
        return slice(batch.num_tokens)

    def _targets(self, targets: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return where each token's state goes, and what that is copied to.

        Before a sequence's last token its state goes nowhere, -1, where each sequence has one target.
        """
        if self.state_targets is None or targets is None:
            return []
        if targets.dim() == 1:
            return [(self.state_targets[: len(targets), -1], targets)]
        return [(self.state_targets[: len(targets)], targets[:, : self.query_len])]

    def _put(self, buffer: Tensor, values: Any) -> None:
        """Copy numbers to a buffer's first elements."""
        numbers = np.array(values, np.int32 if buffer.dtype is torch.int32 else np.int64)
        upload(numbers, buffer.device, buffer[: len(numbers)])


def _has_lens(batch: Batch) -> bool:
    """Whether a step's lengths are on the device already; where the host has bounds, those count."""
    return batch.lens_are_bounds or "seq_lens" in vars(batch)
