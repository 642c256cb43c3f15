"""What runs in this step? `Batch`: packed sequences, their lengths, and where their tokens live."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from polyattn.errors import BatchError

Ints = Sequence[int] | Tensor


class Batch:
    """One step's sequences, packed one after another without padding.

    - `query_start_loc` (num_seqs + 1,): where each sequence's query tokens start; ends with their
      total.
    - `seq_lens` (num_seqs,): cached context plus new tokens of each sequence.
    - `block_table` int32 (num_seqs, max_blocks): each sequence's cache blocks; entries past its
      length are never read. None where there is no cache.
    - `slot_mapping` int64 (num_tokens,): where each new token is stored,
      `block * block_size + offset`; -1 skips. None stores nothing.
    - `state_slots` int64 (num_seqs,): each sequence's slot in the state caches of recurrent layers;
      -1 for a padding row. A sequence whose length is its query's starts with a fresh state.

    Sequences of one query token that come first are served as decodes, all others as prefill;
    put decodes first. A padding row has one query token, length 0 and slot -1. Lengths given as
    device tensors are copied to the host once. Raises `BatchError`.
    """

    def __init__(
        self,
        query_start_loc: Ints,
        seq_lens: Ints,
        block_table: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        *,
        state_slots: Tensor | None = None,
        device: torch.device | str | None = None,
    ):
        self.starts = _ints("query_start_loc", query_start_loc)
        self.lens = _ints("seq_lens", seq_lens)
        _check_lengths(self.starts, self.lens)
        if device is None:
            given = (block_table, slot_mapping, state_slots)
            source = next((t for t in given if t is not None), "cpu")
            device = source.device if isinstance(source, Tensor) else source
        self.device = torch.device(device)
        self.block_table, self.slot_mapping = block_table, slot_mapping
        self.state_slots = state_slots
        _check_tensors(self)
        if isinstance(query_start_loc, Tensor) and query_start_loc.dtype == torch.int32:
            self.__dict__["query_start_loc"] = query_start_loc.to(self.device)
        if isinstance(seq_lens, Tensor) and seq_lens.dtype == torch.int32:
            self.__dict__["seq_lens"] = seq_lens.to(self.device)

    @classmethod
    def from_lens(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor | None = None,
        block_size: int | None = None,
        *,
        state_slots: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Build a batch whose new tokens are stored at the end of their sequences.

        `slot_mapping` follows from `block_table` and `block_size`; without them nothing is stored.
        """
        if any(length < 0 for length in query_lens):
            raise BatchError(f"query_lens={list(query_lens)} has a negative length")
        starts = [0, *accumulate(query_lens)]
        slots = None
        if block_table is not None:
            if block_size is None:
                raise BatchError("block_table without block_size; give the cache's block size")
            batch = cls(starts, seq_lens, block_table, device=device)
            slots = batch.tail_slots(block_size)
        return cls(starts, seq_lens, block_table, slots, state_slots=state_slots, device=device)

    @classmethod
    def on_buffers(
        cls,
        lens: list[int],
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
    ) -> Batch:
        """A decode batch over device buffers that a captured graph reads; copies nothing.

        `lens` says on the host what `seq_lens` holds, or the most that it will ever hold.
        """
        batch = cls(list(range(len(lens) + 1)), lens, block_table, slot_mapping)
        batch.__dict__["query_start_loc"], batch.__dict__["seq_lens"] = query_start_loc, seq_lens
        return batch

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch."""
        return self.starts[-1]

    @cached_property
    def query_lens(self) -> list[int]:
        """Query tokens of each sequence, on the host."""
        return [b - a for a, b in pairwise(self.starts)]

    @cached_property
    def max_query_len(self) -> int:
        """The longest query."""
        return max(self.query_lens, default=0)

    @cached_property
    def max_seq_len(self) -> int:
        """The longest sequence."""
        return max(self.lens, default=0)

    @cached_property
    def query_start_loc(self) -> Tensor:
        """int32 (num_seqs + 1,) on the device."""
        return torch.tensor(self.starts, dtype=torch.int32, device=self.device)

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 (num_seqs,) on the device."""
        return torch.tensor(self.lens, dtype=torch.int32, device=self.device)

    @cached_property
    def num_decodes(self) -> int:
        """Leading sequences of exactly one query token."""
        count = 0
        for length in self.query_lens:
            if length != 1:
                break
            count += 1
        return count

    def part(self, start: int, stop: int) -> Batch:
        """Return sequences `start` to `stop` as a batch of views."""
        if start == 0 and stop == self.num_seqs:
            return self
        first, last = self.starts[start], self.starts[stop]
        table = None if self.block_table is None else self.block_table[start:stop]
        slots = None if self.slot_mapping is None else self.slot_mapping[first:last]
        states = None if self.state_slots is None else self.state_slots[start:stop]
        starts = [at - first for at in self.starts[start : stop + 1]]
        return Batch(
            starts, self.lens[start:stop], table, slots, state_slots=states, device=self.device
        )

    def with_block_table(self, block_table: Tensor) -> Batch:
        """Return the same batch over another block table."""
        batch = Batch(
            self.starts, self.lens, block_table, self.slot_mapping,
            state_slots=self.state_slots, device=self.device,
        )  # fmt: skip
        for name in ("query_start_loc", "seq_lens"):
            if name in self.__dict__:
                batch.__dict__[name] = self.__dict__[name]
        return batch

    def tail_slots(self, block_size: int) -> Tensor:
        """Return the slots of each sequence's last tokens, as many as its query has."""
        assert self.block_table is not None
        lens = torch.tensor(self.query_lens)
        last = torch.tensor(self.lens)
        seq = torch.repeat_interleave(torch.arange(self.num_seqs), lens)
        at = torch.arange(self.num_tokens) - torch.tensor(self.starts[:-1], dtype=torch.int64)[seq]
        position = last[seq] - lens[seq] + at
        needed = int(position.max()) // block_size + 1 if position.numel() else 0
        if needed > self.block_table.shape[1] or (position < 0).any():
            check_lens_against_table(self, block_size)
        position, seq = position.to(self.device), seq.to(self.device)
        block = self.block_table[seq, position // block_size].long()
        return block * block_size + position % block_size

    def __repr__(self) -> str:
        return f"<Batch: {self.num_seqs} sequences, {self.num_tokens} query tokens>"


def check_lens_against_table(batch: Batch, block_size: int | None, causal: bool = True) -> None:
    """Check on the host that each length fits its query and its row of the block table.

    A padding row (one query token, length 0) is let through. Raises `BatchError`.
    """
    width = None if batch.block_table is None else batch.block_table.shape[1]
    for index, (query, length) in enumerate(zip(batch.query_lens, batch.lens, strict=True)):
        padding = query == 1 and length == 0
        if causal and length < query and not padding:
            raise BatchError(
                f"seq_lens[{index}]={length} is shorter than its query of {query} tokens; it counts "
                "cached context plus new tokens"
            )
        if width is not None and block_size and length > width * block_size:
            raise BatchError(
                f"block_table has {width} blocks of {block_size} a sequence; sequence {index} of "
                f"length {length} needs {-(-length // block_size)}"
            )


def check_on_device(batch: Batch, num_blocks: int, block_size: int) -> None:
    """Check what only the tensors' values tell; costs a copy to the host. Raises `BatchError`."""
    if batch.block_table is not None:
        table = batch.block_table.cpu()
        for index, length in enumerate(batch.lens):
            row = table[index, : -(-length // block_size)]
            bad = ((row < 0) | (row >= num_blocks)).nonzero()
            if bad.numel():
                at = int(bad[0])
                raise BatchError(
                    f"block_table[{index}, {at}]={int(row[at])} points outside the cache's "
                    f"{num_blocks} blocks"
                )
    if batch.slot_mapping is None:
        return
    slots = batch.slot_mapping.cpu()
    bad = ((slots < -1) | (slots >= num_blocks * block_size)).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise BatchError(
            f"slot_mapping[{at}]={int(slots[at])} is out of range: the cache has "
            f"{num_blocks * block_size} slots, and -1 skips"
        )
    kept, count = slots[slots >= 0].unique(return_counts=True)
    if (count > 1).any():
        raise BatchError(
            f"slot_mapping writes slot {int(kept[count > 1][0])} twice in one step; each new token "
            "needs a slot of its own"
        )
    for index in range(batch.num_decodes):
        if batch.lens[index] == 0 and batch.query_lens[index] == 1 and int(slots[index]) != -1:
            raise BatchError(
                f"seq_lens[{index}]=0 is shorter than its query of 1 token; a padding row's slot "
                f"must be -1, not {int(slots[index])}"
            )


def check_state_slots(batch: Batch, num_slots: int) -> None:
    """Check the values of `state_slots`; costs a copy to the host. Raises `BatchError`."""
    assert batch.state_slots is not None
    slots = batch.state_slots.tolist()
    taken: dict[int, int] = {}
    for index, slot in enumerate(slots):
        padding = batch.query_lens[index] == 1 and batch.lens[index] == 0
        if not -1 <= slot < num_slots or (slot == -1) != padding:
            raise BatchError(
                f"state_slots[{index}]={slot}: there are {num_slots} slots, and -1 is for padding rows "
                "(one query token, length 0)"
            )
        if slot in taken and slot != -1:
            raise BatchError(
                f"state_slots[{index}]={slot} is sequence {taken[slot]}'s too; each needs its own"
            )
        taken[slot] = index


def _ints(name: str, values: Ints) -> list[int]:
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise BatchError(
                f"{name} is {values.dtype} of shape {tuple(values.shape)}; it must be one-dimensional "
                "int32"
            )
        return list(values.tolist())
    return list(values)


def _check_lengths(starts: list[int], lens: list[int]) -> None:
    if not starts or starts[0] != 0:
        raise BatchError(f"query_start_loc={starts[:4]}… must start with 0")
    if len(starts) != len(lens) + 1:
        raise BatchError(
            f"query_start_loc has {len(starts)} entries and seq_lens {len(lens)}; it needs one more "
            "than there are sequences"
        )
    for index, (a, b) in enumerate(pairwise(starts)):
        if b < a:
            raise BatchError(
                f"query_start_loc[{index + 1}]={b} is less than the entry before it ({a}); it must "
                "never decrease"
            )
    for index, length in enumerate(lens):
        if length < 0:
            raise BatchError(f"seq_lens[{index}]={length} is negative")


def _check_tensors(batch: Batch) -> None:
    for name, tensor, dtype, shape in (
        ("block_table", batch.block_table, torch.int32, (batch.num_seqs, None)),
        ("slot_mapping", batch.slot_mapping, torch.int64, (batch.num_tokens,)),
        ("state_slots", batch.state_slots, torch.int64, (batch.num_seqs,)),
    ):
        if tensor is None:
            continue
        fits = tensor.dim() == len(shape) and tensor.shape[0] == shape[0]
        if tensor.dtype != dtype or not fits:
            wanted = ", ".join("max_blocks" if n is None else str(n) for n in shape)
            raise BatchError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtype} of shape "
                f"({wanted})"
            )
        if tensor.device != batch.device and tensor.device.type != batch.device.type:
            raise BatchError(f"{name} is on {tensor.device}, the batch on {batch.device}; move one")
