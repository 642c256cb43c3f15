"""How do a group's tokens become one entry? `Compressor`: a recurrence whose state is the last rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError
from polyattn.families.attention.rotation import rotation_at
from polyattn.runtime.cache.room import room
from polyattn.runtime.inputs import bad_input, check_tensor, refuse_gradients, torch_device
from polyattn.runtime.parameters import check_shape
from polyattn.runtime.rotation import rms_norm
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import token_places
from polyattn.runtime.store import scatter
from polyattn.spec.layer import LayerSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.sparse import CompressorSpec

PRECISE = (torch.float32, torch.float64)
"""The dtypes of states."""


class Entries(NamedTuple):
    """Entries that a step's tokens may have closed, a fixed number for each sequence.

    Attributes:
        rows: (num_entries, size), float32, before any norm or rotation; 0 where no group was closed.
        ids: int64 (num_entries,), places in the sequence; -1 where no group was closed.
        seqs: int64 (num_entries,), the batch's sequences.

    Examples:
        >>> entries = Entries(torch.zeros(1, 8), torch.tensor([3]), torch.tensor([0]))
        >>> entries.slots(torch.tensor([[5]]).int(), block_size=16).tolist()
        [83]

    """

    rows: Tensor
    ids: Tensor
    seqs: Tensor

    def slots(self, block_table: Tensor, block_size: int) -> Tensor:
        """Return where a cache of entries takes them: what `store` takes as `slot_mapping`.

        Args:
            block_table: int32 (num_seqs, max_blocks), of the entries' own blocks.
            block_size: entries of a block.

        Returns:
            int64 (num_entries,); -1 where no group was closed, and where the table has no block for the
            entry: a plan refuses such a table.

        """
        if not block_table.shape[1]:  # no sequence has an entry
            return torch.full_like(self.ids, -1)
        width = block_table.shape[1]
        there = (self.ids >= 0) & (self.ids < width * block_size)
        at = self.ids.clamp(0, width * block_size - 1)
        places = block_table[self.seqs, at // block_size].long() * block_size + at % block_size
        return places.masked_fill(~there, -1)


class Compressor:
    """Pools groups of tokens. A state's rows are addressed by position: drafts may be rejected.

    Args:
        spec: how.
        bias: (tokens_per_entry, channels), added to the gates by place in the group; None: nothing.

    Raises:
        SpecError: the bias doesn't fit the spec.

    Examples:
        >>> compressor = Compressor(CompressorSpec(size=8, tokens_per_entry=4))
        >>> states = compressor.allocate_states(num_slots=1)
        >>> batch = Batch.from_lens([5], [5], state_slots=torch.tensor([0]))
        >>> compressor(torch.randn(5, 8), torch.randn(5, 8), states, batch).ids.tolist()
        [0, -1]

    """

    def __init__(self, spec: CompressorSpec, bias: Tensor | None = None):
        self.spec, self.bias = spec, bias
        if bias is not None and (
            spec.reduction == "mean" or bias.shape != (spec.tokens_per_entry, spec.channels)
        ):
            raise SpecError(
                f"bias {tuple(bias.shape)} must be ({spec.tokens_per_entry}, {spec.channels}), and only "
                "a softmax has gates"
            )

    def allocate_states(
        self, num_slots: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return states of sequences.

        Args:
            num_slots: sequences that are alive at once.
            device: where.
            dtype: float32, or float64 for rows in float64.

        Returns:
            Zeros, (num_slots, capacity, channels), of a softmax twice the channels: rows, then gates.

        Raises:
            BatchError: there is no such device, or states can't have the dtype.
            CacheError: the number isn't positive, or the device has too little memory.

        """
        width = self.spec.channels * (2 if self.spec.reduction == "softmax" else 1)
        rows, where = self.spec.capacity, torch_device(device)
        if dtype not in PRECISE:
            raise BatchError(f"dtype={dtype}: states are torch.float32 or torch.float64")
        with room("num_slots", num_slots, rows * width * dtype.itemsize, where):
            return torch.zeros(num_slots, rows, width, dtype=dtype, device=where)

    def __call__(self, rows: Tensor, gates: Tensor | None, states: Tensor, batch: Batch) -> Entries:
        """Pool the groups that a step's tokens close, and keep the step's last rows.

        Args:
            rows: (num_tokens, channels).
            gates: as `rows`; None for a mean.
            states: as `allocate_states` returns them, written.
            batch: the step, with `state_slots`. A sequence as long as its new tokens starts anew.

        Returns:
            The entries. It never waits for the device.

        Raises:
            BatchError: a tensor doesn't fit the spec or the batch; nothing has changed.

        """
        self._check(rows, gates, states, batch)
        spec, m, device = self.spec, self.spec.tokens_per_entry, rows.device
        new = rows.to(states.dtype)
        counts = [-(-query // m) for query in batch.query_lens]
        each, positions, ends = token_places(batch)
        of = torch.arange(batch.num_seqs, device=device)
        starts, lens = batch.query_start_loc.long(), batch.seq_lens.long()
        firsts = (lens - starts[1:] + starts[:-1]).clamp(min=0)  # the first new token's position
        if gates is not None:
            gates = gates.to(states.dtype)
            if self.bias is not None:
                gates = gates + self.bias.to(states.dtype)[positions % m]
            new = torch.cat([new, gates], 1)
        seqs = of.repeat_interleave(_on(counts, device), output_size=sum(counts))
        begin = torch.arange(len(seqs), device=device)
        begin = begin - (torch.cumsum(_on(counts, device), 0) - _on(counts, device))[seqs]
        ids = firsts[seqs] // m + begin
        closed = (ids + 1) * m <= lens[seqs]
        assert batch.state_slots is not None
        slots = batch.state_slots.long()
        span = torch.arange(-m * (spec.groups - 1), m, device=device)
        at = ids[:, None] * m + span
        members = self._members(new, states, slots[seqs], at, firsts[seqs], starts[seqs])
        pooled = self._pooled(members, at, rows.dtype)
        last = (positions >= (ends - spec.capacity).clamp(min=0)) & (positions < ends)
        places = slots[each] * spec.capacity + positions % spec.capacity
        places = places.masked_fill(~last | (slots[each] < 0), -1)
        scatter(states.unsqueeze(2), new.unsqueeze(1), places)
        ids = ids.masked_fill(~closed | (slots[seqs] < 0), -1)
        return Entries(pooled.masked_fill((ids < 0)[:, None], 0.0), ids, seqs)

    def finished(
        self,
        entries: Entries,
        norm: Tensor | None = None,
        *,
        eps: float = 1e-6,
        rope: RopeSpec | None = None,
    ) -> Tensor:
        """Return the entries' rows as a cache keeps them; `entries.rows` stays as it is.

        Args:
            entries: as a call returns them.
            norm: (size,), the weight of an RMS norm; None: no norm.
            eps: of the norm.
            rope: rotates each row at its group's first position; None: no rotation.

        Returns:
            (num_entries, size), float32.

        Raises:
            SpecError: the norm has another size, or the rope rotates more than an entry has.

        """
        rows = entries.rows
        if norm is not None:
            check_shape("norm", norm, (self.spec.size,))
            rows = rms_norm(rows, norm, eps)
        if rope is None:
            return rows
        dtype = "float64" if rows.dtype is torch.float64 else "float32"
        layer = LayerSpec(num_heads=1, head_size=self.spec.size, dtype=dtype, rope=rope)
        at = entries.ids.clamp(min=0) * self.spec.tokens_per_entry
        return rotation_at(layer, at, len(at)).applied(rows[:, None])[:, 0]

    def _members(
        self, new: Tensor, states: Tensor, slots: Tensor, at: Tensor, firsts: Tensor, starts: Tensor
    ) -> Tensor:
        """Return the rows of positions, (entries, members, width), from the step or from a state."""
        if not len(new):
            return states.new_zeros(*at.shape, states.shape[2])
        own = (starts[:, None] + at - firsts[:, None]).clamp(0, len(new) - 1)
        held = states[slots.clamp(min=0)[:, None], at % self.spec.capacity]
        return torch.where((at >= firsts[:, None])[..., None], new[own], held)

    def _pooled(self, members: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
        spec, m, size = self.spec, self.spec.tokens_per_entry, self.spec.size
        gone = (at < 0)[..., None]
        # Rows, and gates; of each the part of the next entry, then that of its own.
        parts = members.unflatten(2, (-1, spec.groups, size))
        if spec.overlap:
            parts = torch.cat([parts[:, :m, :, 0], parts[:, m:, :, 1]], 1)
        else:
            parts = parts[:, :, :, 0]
        rows: Tensor = parts[:, :, 0].masked_fill(gone, 0.0)
        if spec.reduction == "mean":
            return (rows.sum(1) / m).to(dtype).to(rows.dtype)
        weights: Tensor = parts[:, :, 1].masked_fill(gone, -torch.inf).softmax(1)
        return (rows * weights).sum(1)

    def _check(self, rows: Tensor, gates: Tensor | None, states: Tensor, batch: Batch) -> None:
        spec, tokens = self.spec, batch.num_tokens
        if batch.state_slots is None:
            raise BatchError(
                "the batch has no state_slots, which say whose states are whose: pass them"
            )
        if batch.state_targets is not None:
            raise BatchError(
                "state_targets: a compressor's states stay in their slots, and have room for "
                f"drafts={spec.drafts} rejected tokens; pass a batch without state_targets"
            )
        if (gates is None) != (spec.reduction == "mean"):
            raise BatchError(
                f"gates {'are missing' if gates is None else 'were given'}: reduction={spec.reduction!r}"
            )
        for name, tensor in (("rows", rows), ("gates", rows if gates is None else gates)):
            check_tensor(name, tensor, batch.device)
            if tensor.shape != (tokens, spec.channels) or not tensor.is_floating_point():
                raise bad_input(name, tensor, (tokens, spec.channels), torch.float32)
        refuse_gradients(rows=rows, gates=gates)
        width = spec.channels * (1 if gates is None else 2)
        check_tensor("states", states, batch.device)
        if (
            states.dim() != 3
            or states.shape[1:] != (spec.capacity, width)
            or states.dtype not in PRECISE
        ):
            raise bad_input("states", states, ("num_slots", spec.capacity, width), torch.float32)


def _on(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
