"""What runs in this step? `Batch`: packed sequences, their lengths, and where their tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError, shown
from polyattn.runtime.step.integers import (
    LARGEST,
    Integers,
    integers,
    on_host,
    one_each,
    upload,
)
from polyattn.runtime.step.parts import fill_part
from polyattn.runtime.step.shared_prefix import (
    Levels,
    check_forest,
    check_shared,
    may_share,
    shared_prefixes,
)
from polyattn.runtime.step.staging import Staging
from polyattn.runtime.step.step_mask import StepMask, step_inputs
from polyattn.runtime.step.tensor_checks import check_tensors, device_of
from polyattn.runtime.step.uploads import Place, outgoing
from polyattn.selection.pieces import largest

Ints = Sequence[int] | Tensor
OF_LENS = "lens", "max_seq_len", "host_contexts", "token_positions", "_covers_queries", "plans"
"""What a batch with other lengths has of its own."""


class Batch:
    """One step's sequences, packed one after another without padding. A value: it never changes.

    A sequence of one query token is a decode, wherever it stands. A padding row has one query token,
    length 0 and slot -1. Any negative slot counts as -1; a layer with `checks` refuses others. The
    constructor copies lengths on a device to the host once. `examples/engine_metadata.py` has
    TensorRT-LLM's and vLLM's names for the fields.

    Args:
        query_start_loc: (num_seqs + 1,): where each sequence's query tokens start; ends with their
            total.
        seq_lens: (num_seqs,): tokens of each sequence, cached and new. Without a cache: its keys.
        block_table: int32 (num_seqs, max_blocks): each sequence's cache blocks; kernels never read
            entries past its length. None: there is no cache.
        slot_mapping: int64 or int32 (num_tokens,): where each new token is stored, `block * block_size
            + offset`; -1 skips. None stores nothing. Kernels read 64 bits.
        state_slots: int64 (num_seqs,): each sequence's slot in the state caches of recurrent layers; -1
            for a padding row. A sequence whose length is its query's starts with a fresh state.
        state_targets: int64 (num_seqs,): where each sequence's new state goes; `state_slots` stay as
            they are. Or (num_seqs, tokens): where the state after each of its tokens goes. Any number
            of drafts can be accepted then (`StateCache.accepted`). -1 for a padding row and behind a
            sequence's last token. Several sequences may start from one slot then.
        key_starts: (num_seqs,): without a cache, where each sequence's keys start in `key` and `value`;
            default: packed one after another. Gaps aren't read.
        first_positions: (num_seqs,): without a cache, the position of each sequence's first key in its
            text; default: 0. `chunk_size`, `sink_tokens` and rotations count from there; windows and
            ALiBi go by distances.
        positions: int64 or int32 (num_tokens,): each query token's position, for layers that rotate;
            (axes, num_tokens) if `rope.sections` has several axes. None: a sequence's last tokens stand
            at its end. A padding row's is any.
        host_block_table: int32 (num_seqs, max_blocks), NumPy: the same table on the host. Blocks that
            sequences share are found there without waiting for the device.
        shared_prefix: runs of blocks that rows share, outermost level first, as `shared_prefixes`
            returns them. None: they are found in `host_block_table`, and on CUDA in a copy of
            `block_table` if that may save much, which waits for the device. They never change what rows
            attend to.
        mask: a `CustomMask` or a `BlockSparseMask`, if the layer's spec has a `mask`.
        inputs: of a layer's variant, by name, what the layer doesn't bring.
        device: of the tensors; default: the first tensor's, else the CPU.

    Raises:
        BatchError: a field has another shape or dtype, or contradicts another one.

    Examples:
        >>> table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        >>> batch = Batch([0, 5, 6], [5, 20], table, torch.tensor([48, 49, 50, 51, 52, 35]))
        >>> batch.num_prefill_tokens, batch.num_decode_tokens
        (5, 1)

    """

    starts: list[int]
    num_tokens: int
    """Query tokens in the batch."""
    device: torch.device
    first_positions: list[int] | None = None
    causal: bool = True
    """False where all keys lie before all queries, so that a causal mask hides none (`over_context`)."""
    num_contexts: int | None = None
    """In a captured step: the number of leading sequences that count as prompts, however short."""
    decode_start_loc: Tensor | None = None
    """There, where the others' query tokens start, counted from the first of them."""
    block_size: int | None = None
    """The block size that `from_lens` got and `slot_mapping` uses: the cache must have the same."""
    staging: Staging | None = None
    """In a captured step: what takes its plans' numbers to the device, if they wait there for others."""
    _places: tuple[Place, Place] | None = None
    """Where an accelerator has `query_start_loc` and `seq_lens`, or will have them."""
    _covers_queries = False

    def __init__(
        self,
        query_start_loc: Ints,
        seq_lens: Ints,
        block_table: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        *,
        state_slots: Tensor | None = None,
        state_targets: Tensor | None = None,
        key_starts: Sequence[int] | None = None,
        first_positions: Sequence[int] | None = None,
        host_block_table: np.ndarray[Any, Any] | None = None,
        positions: Tensor | None = None,
        mask: StepMask | None = None,
        inputs: Mapping[str, Any] | None = None,
        shared_prefix: Levels | None = None,
        device: torch.device | str | None = None,
    ):
        self.starts = integers("query_start_loc", query_start_loc)
        self.lens = integers("seq_lens", seq_lens)
        self.lens_are_bounds = False  # of rows that a captured graph may leave to padding
        counts = on_host(self.starts, self.lens)
        self.host_starts, self.host_lens, self.host_query_lens = counts[:3]
        self.max_query_len, self.max_seq_len = counts[3:]
        self.num_tokens, self.num_seqs = self.starts[-1], len(self.lens)
        self.all_decode = self.max_query_len == 1 and self.num_tokens == self.num_seqs
        self.device = device_of(device, block_table, slot_mapping, state_slots, positions)
        if isinstance(slot_mapping, Tensor) and slot_mapping.dtype == torch.int32:
            slot_mapping = slot_mapping.long()  # what kernels read, once for all layers
        self.block_table, self.slot_mapping = block_table, slot_mapping
        self.state_slots, self.positions = state_slots, positions
        self.state_targets = state_targets
        check_tensors(self)
        if key_starts is not None:
            self.key_starts = one_each("key_starts", key_starts, self.lens)
        if first_positions is not None:
            self.first_positions = one_each("first_positions", first_positions, self.lens)
        self.mask = mask
        self.inputs = {}
        if inputs is not None or mask is not None:
            self.inputs = step_inputs(inputs, mask, self.query_lens, self.lens, self.device)
        if host_block_table is not None:
            shape = None if block_table is None else tuple(block_table.shape)
            theirs = [getattr(host_block_table, name, None) for name in ("shape", "dtype")]
            if not isinstance(host_block_table, np.ndarray) or theirs != [shape, np.int32]:
                raise BatchError(
                    f"host_block_table is {type(host_block_table).__name__} of shape {theirs[0]} and "
                    f"dtype {theirs[1]}; it must be an int32 ndarray of block_table's shape, {shape}"
                )
            self.host_block_table = host_block_table
        if shared_prefix is not None:
            check_forest(shared_prefix, self.lens)
        self.shared_prefix = shared_prefix
        if isinstance(query_start_loc, Tensor) and query_start_loc.dtype == torch.int32:
            self.query_start_loc = query_start_loc.to(self.device).contiguous()
        if isinstance(seq_lens, Tensor) and seq_lens.dtype == torch.int32:
            self.seq_lens = seq_lens.to(self.device).contiguous()

    @classmethod
    def from_lens(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor | None = None,
        block_size: int | None = None,
        *,
        state_slots: Tensor | None = None,
        state_targets: Tensor | None = None,
        key_starts: Sequence[int] | None = None,
        first_positions: Sequence[int] | None = None,
        positions: Tensor | None = None,
        mask: StepMask | None = None,
        inputs: Mapping[str, Any] | None = None,
        host_block_table: np.ndarray[Any, Any] | None = None,
        shared_prefix: Levels | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Return a batch whose new tokens are stored at the end of their sequences.

        Args:
            query_lens: query tokens of each sequence.
            seq_lens: tokens of each sequence, cached and new.
            block_table: as in `Batch`.
            block_size: tokens of a block of the cache, from which slots follow; None stores nothing.
            state_slots: as in `Batch`.
            state_targets: as in `Batch`.
            key_starts: as in `Batch`.
            first_positions: as in `Batch`.
            positions: as in `Batch`.
            mask: as in `Batch`.
            inputs: as in `Batch`.
            host_block_table: as in `Batch`.
            shared_prefix: as in `Batch`.
            device: as in `Batch`.

        Raises:
            BatchError: as `Batch`.

        """
        query_lens = integers("query_lens", query_lens)
        for index, length in enumerate(query_lens):
            if length < 0:
                raise BatchError(f"query_lens[{index}]={length!r} must be 0 or a positive integer")
        batch = cls(
            [0, *accumulate(query_lens)], seq_lens, block_table, state_slots=state_slots,
            state_targets=state_targets, key_starts=key_starts, first_positions=first_positions,
            positions=positions, mask=mask, inputs=inputs, shared_prefix=shared_prefix,
            host_block_table=host_block_table, device=device,
        )  # fmt: skip
        if block_table is not None:
            if block_size is None:
                raise BatchError("block_table without block_size; pass the cache's block size")
            if type(block_size) is not int or not 0 < block_size <= LARGEST:
                raise BatchError(f"block_size={shown(block_size)} must be a positive integer")
            batch.slot_mapping = batch.tail_slots(block_size)
            batch.block_size = block_size
        return batch

    @classmethod
    def on_buffers(
        cls,
        starts: list[int],
        lens: list[int],
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor | None,
        slot_mapping: Tensor | None,
        positions: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> Batch:
        """Return a batch over device buffers that a captured graph reads; copies nothing.

        Args:
            starts: on the host, what `query_start_loc` holds, or the most that it will ever hold.
            lens: on the host, what `seq_lens` holds, or the most that it will ever hold.
            query_start_loc: int32 (num_seqs + 1,).
            seq_lens: int32 (num_seqs,).
            block_table: int32 (num_seqs, blocks); None without a cache.
            slot_mapping: int64 (num_tokens,); None if nothing is stored.
            positions: int64 (num_tokens,), for rotations; None: they follow from the lengths.
            exact: no graph reads the buffers, which hold `starts` and `lens`.

        Raises:
            BatchError: a buffer is too short, has another dtype, or isn't contiguous.

        """
        device = query_start_loc.device
        batch = cls(starts, lens, block_table, slot_mapping, positions=positions, device=device)
        if slot_mapping is not None and batch.slot_mapping is not slot_mapping:
            raise BatchError(
                f"slot_mapping is {slot_mapping.dtype} with stride {slot_mapping.stride(0)}: what a "
                "captured graph reads is contiguous, in place, and slots are int64"
            )
        for name, buffer, count in (
            ("query_start_loc", query_start_loc, len(starts)),
            ("seq_lens", seq_lens, len(lens)),
        ):
            if buffer.dtype is not torch.int32 or buffer.dim() != 1 or len(buffer) < count:
                actual = f"{name} is {buffer.dtype} of shape {tuple(buffer.shape)}"
                raise BatchError(f"{actual}: kernels read int32 ({count},)")
            if not buffer.is_contiguous():
                raise BatchError(
                    f"{name} is {buffer.dtype} with stride {buffer.stride(0)}: what a captured graph "
                    "reads is contiguous, in place"
                )
        batch.query_start_loc, batch.seq_lens = query_start_loc, seq_lens
        batch.lens_are_bounds = not exact
        return batch

    @cached_property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.starts) - 1

    @cached_property
    def lens(self) -> list[int]:
        """Tokens of each sequence, cached and new, on the host."""
        return list(self.host_lens.tolist())

    @property
    def num_decode_tokens(self) -> int:
        """Query tokens of the sequences that have one each, as vLLM's metadata counts them."""
        return int((self.host_query_lens == 1).sum())

    @property
    def num_prefill_tokens(self) -> int:
        """Query tokens of all other sequences, as vLLM's metadata counts them."""
        return self.num_tokens - self.num_decode_tokens

    @cached_property
    def host_starts(self) -> Integers:
        """`starts` as int64 (num_seqs + 1,), NumPy; not to be written to."""
        return np.array(self.starts, np.int64)

    @cached_property
    def host_lens(self) -> Integers:
        """`lens` as int64 (num_seqs,), NumPy; not to be written to."""
        return np.array(self.lens, np.int64)

    @cached_property
    def host_query_lens(self) -> Integers:
        """Query tokens of each sequence as int64 (num_seqs,), NumPy."""
        return self.host_starts[1:] - self.host_starts[:-1]

    @cached_property
    def host_contexts(self) -> Integers:
        """Tokens before each sequence's new ones, or its last one, int64 (num_seqs,); padding: -1."""
        contexts: Integers = self.host_lens - np.maximum(self.host_query_lens, 1)
        return contexts

    @cached_property
    def query_lens(self) -> list[int]:
        """Query tokens of each sequence, on the host."""
        return list(self.host_query_lens.tolist())

    @cached_property
    def max_query_len(self) -> int:
        """The longest query."""
        return largest(self.host_query_lens)

    @cached_property
    def max_seq_len(self) -> int:
        """The longest sequence."""
        return largest(self.host_lens)

    @cached_property
    def all_decode(self) -> bool:
        """Whether there are sequences, and every one has exactly one query token."""
        return self.max_query_len == 1 and self.starts[-1] == len(self.starts) - 1

    @cached_property
    def query_start_loc(self) -> Tensor:
        """int32 (num_seqs + 1,) on the device."""
        return self._uploaded(0, self.host_starts)

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 (num_seqs,) on the device."""
        return self._uploaded(1, self.host_lens)

    def lengths_at(self) -> tuple[int, int]:
        """Return where `query_start_loc` and `seq_lens` lie on the device, or will once a plan is made.

        They go there with what else the plan sends.

        Returns:
            Both addresses.

        """
        known = vars(self)
        starts, lens = known.get("query_start_loc"), known.get("seq_lens")
        if self.device.type == "cpu":
            starts, lens = self.query_start_loc, self.seq_lens
        if starts is not None and lens is not None:
            return starts.data_ptr(), lens.data_ptr()
        places = self._lengths()
        return (
            places[0].address if starts is None else starts.data_ptr(),
            places[1].address if lens is None else lens.data_ptr(),
        )

    def _uploaded(self, at: int, numbers: Integers) -> Tensor:
        """Return `query_start_loc` (0) or `seq_lens` (1); an accelerator gets both in one copy."""
        if self.device.type == "cpu":
            return torch.from_numpy(numbers.astype(np.int32))
        return self._lengths()[at].tensor

    def _lengths(self) -> tuple[Place, Place]:
        """Return where an accelerator has both tensors of lengths, once they are sent."""
        if self._places is None:
            starts, lens = outgoing.put(self.device, self.host_starts, self.host_lens)
            self._places = starts, lens
        return self._places

    @property
    def host_positions(self) -> np.ndarray[Any, Any]:
        """Each token's position as it follows from the lengths: int64 (num_tokens,), NumPy."""
        behind = self.host_lens - self.host_starts[1:]
        if self.first_positions:
            behind = behind + np.array(self.first_positions, np.int64)
        places = np.arange(self.num_tokens) + np.repeat(behind, self.host_query_lens)
        return places.clip(min=0)

    @property
    def text_lens(self) -> list[int]:
        """The length of each sequence's text: its keys, and the tokens before its first key."""
        if not self.first_positions:
            return self.lens
        return [a + b for a, b in zip(self.first_positions, self.lens, strict=True)]

    @cached_property
    def key_starts(self) -> list[int]:
        """The place of each sequence's first key, on the host; packed by default."""
        return [0, *accumulate(self.lens)][:-1]

    @cached_property
    def keys_packed(self) -> bool:
        """Whether the keys lie one after another without gaps."""
        own = vars(self).get("key_starts")  # which are packed where nobody says otherwise
        return own is None or own == [0, *accumulate(self.lens)][:-1]

    @cached_property
    def key_rows(self) -> slice | Tensor:
        """Where keys that are passed whole lie: a slice, or with gaps int64 (keys,) on the device."""
        if self.keys_packed:
            return slice(sum(self.lens))
        spans = zip(self.key_starts, self.lens, strict=True)
        rows = np.concatenate([np.arange(start, start + length) for start, length in spans])
        return upload(rows.astype(np.int64), self.device)

    @cached_property
    def key_start_loc(self) -> Tensor:
        """int32 (num_seqs + 1,) on the device: where packed keys start, ending with their total."""
        return torch.tensor([0, *accumulate(self.lens)], dtype=torch.int32, device=self.device)

    @property
    def block_tables(self) -> Tensor | None:
        """`block_table` by the name that vLLM's backends have for it."""
        return self.block_table

    @cached_property
    def token_positions(self) -> Tensor:
        """int64 on the device: `positions`, or what follows from the lengths (num_tokens,)."""
        if self.positions is not None:
            return self.positions.long()
        return upload(self.host_positions, self.device)

    @cached_property
    def host_block_table(self) -> np.ndarray[Any, Any] | None:
        """The block table on the host, None where only the device has it."""
        if self.block_table is None or self.device.type != "cpu":
            return None
        return self.block_table.numpy()

    def read_block_table(self) -> None:
        """Copy the block table to the host, where only the device has it: waits for the device.

        A batch never changes, so once is enough. A copy of an earlier step's table is never taken, though
        the tensor be the same: its version doesn't count what kernels and replayed graphs write.
        """
        if self.host_block_table is None and self.block_table is not None:
            self.host_block_table = self.block_table.cpu().numpy()

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """The plans of this step that layers made for themselves, by their group."""
        return {}

    @cached_property
    def seq_ids(self) -> list[int]:
        """The numbers of the sequences in the step that this batch is a part of, on the host."""
        return list(range(self.num_seqs))

    @cached_property
    def step_query_lens(self) -> list[int]:
        """Query tokens of each sequence of that step, in which `mask` counts its rows."""
        return self.query_lens

    @cached_property
    def seq_index(self) -> Tensor:
        """int32 (num_seqs,) on the device: `seq_ids`, by which `inputs` are read."""
        return torch.tensor(self.seq_ids, dtype=torch.int32, device=self.device)

    def part(self, seqs: slice | list[int]) -> Batch:
        """Return some of the sequences as a batch of their own, without slots and positions.

        Args:
            seqs: their numbers. A slice gives views, so a captured graph reads the same buffers.

        """
        whole = range(self.num_seqs)
        chosen = whole[seqs] if isinstance(seqs, slice) else seqs
        if isinstance(chosen, range) and chosen == whole:
            return self
        return fill_part(self, object.__new__(Batch), seqs)  # type: ignore[no-any-return]

    def copy(self) -> Batch:
        """Return the same batch, without the plans that layers made of it."""
        batch = object.__new__(Batch)
        batch.__dict__.update(self.__dict__)
        batch.__dict__.pop("plans", None)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Return a pickle's state, without what holds kernels' own memory: plans, and their staging."""
        own = "plans", "staging", "_places"
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def upload(
        self, numbers: np.ndarray[Any, Any], into: Tensor | None = None, room: int = 0
    ) -> Tensor:
        """Copy a plan's numbers to the device, and with them the lengths that it lacks. Never waits.

        Args:
            numbers: int32 (n,).
            into: where they go, what an earlier call for the plan returned; None: a new buffer.
            room: numbers that a new buffer holds at least, for what later steps plan into it.

        Returns:
            `into`, or the new buffer.

        """
        if into is None and self.staging is not None:
            into = self.staging.room(max(room, len(numbers)))
        elif into is None and room > len(numbers):
            into = torch.zeros(room, dtype=torch.int32, device=self.device)
        if into is None:
            return self.later(numbers).tensor
        if self.staging is not None:
            self.staging.put(into, numbers)
        else:
            upload(numbers, self.device, into[: len(numbers)])
        return into

    def later(self, numbers: np.ndarray[Any, Any], room: int = 0) -> Place:
        """Copy a plan's numbers as `upload`, but with what else the plan has, once it is made.

        Args:
            numbers: int32 (n,).
            room: as in `upload`.

        Returns:
            The place, whose address is known, and whose tensor is sent when it is asked for.

        """
        if self.staging is not None or room > len(numbers):
            return Place.of(self.upload(numbers, None, room))
        if self.device.type == "cpu":
            return Place.of(torch.from_numpy(numbers))
        known = vars(self)
        if self._places or "query_start_loc" in known or "seq_lens" in known:
            return outgoing.put(self.device, numbers)[0]
        starts, lens, place = outgoing.put(self.device, self.host_starts, self.host_lens, numbers)
        self._places = starts, lens
        return place

    def measured(self) -> Batch:
        """Return the same batch by the lengths that its device holds now, copied to the host."""
        return self.with_lens(self.seq_lens.cpu().numpy().astype(np.int64))

    def with_lens(self, lens: Integers) -> Batch:
        """Return the same batch over a cache with other lengths on the host.

        Args:
            lens: int64 (num_seqs,), NumPy: what `seq_lens` holds, or will at most. They aren't checked.

        """
        batch = object.__new__(Batch)
        known = batch.__dict__
        known.update(self.__dict__)
        for name in OF_LENS:
            known.pop(name, None)
        batch.host_lens = lens
        return batch

    def with_block_table(self, block_table: Tensor) -> Batch:
        """Return the same batch over another block table.

        Args:
            block_table: int32 (num_seqs, blocks), on the batch's device.

        """
        batch = self.copy()
        batch.__dict__.pop("host_block_table", None)
        batch.block_table = block_table
        return batch

    def find_shared_prefix(self, block_size: int) -> Levels:
        """Return `shared_prefix`, or what `host_block_table` shows; () if neither is known.

        A row's new tokens are its own, so that each row attends to something alone.

        Args:
            block_size: of the cache, in tokens.

        Raises:
            BatchError: `shared_prefix` leaves a row's new token no block of its own, or a table on the
                CPU has other blocks there.

        """
        if self.shared_prefix is not None:
            table = self.host_block_table if self.device.type == "cpu" else None
            check_shared(self.shared_prefix, self.lens, self.host_contexts, block_size, table)
            return self.shared_prefix
        table = self.host_block_table
        # Bounds of lengths reach into entries of the table that say nothing.
        if table is None or self.lens_are_bounds or not may_share(table):
            return ()
        return shared_prefixes(table, np.maximum(self.host_contexts, 0), block_size)

    def with_shared_prefix(self, levels: Levels | None) -> Batch:
        """Return the same batch with the blocks that its rows share.

        Args:
            levels: the shared runs of blocks, level by level; None: unknown.

        """
        batch = self.copy()
        batch.shared_prefix = levels
        return batch

    def over_context(self) -> Batch:
        """Return the same batch as one whose keys all lie before its queries, for a call that is a part.

        A backend that claims `causal` and `non_causal` serves both kinds of call of a causal layer.
        """
        batch = self.copy()
        batch.causal = False
        return batch

    def check_queries(self, unable: Sequence[str] = ()) -> None:
        """Check that each length covers its query's tokens; a padding row's length is 0.

        Args:
            unable: the backends of the step that take padding rows of one query token only.

        Raises:
            BatchError: a length is shorter than its query.

        """
        if self._covers_queries:  # as another group's plan found
            return
        missing = self.host_lens < self.host_query_lens
        if 1 not in missing.tobytes():  # in a third of the time of `any`
            self._covers_queries = True
            return
        for index in missing.nonzero()[0].tolist():
            query, length = self.query_lens[index], self.lens[index]
            short = f"seq_lens[{index}]={length} is shorter than its query of {query} tokens"
            if length:
                raise BatchError(f"{short}; it counts cached context plus new tokens")
            if query > 1 and unable:
                raise BatchError(
                    f"{short}, and {', '.join(sorted(set(unable)))} takes padding rows (length 0) of one "
                    "query token only; count cached context plus new tokens, pass padding as rows of one "
                    "token, or choose a backend that claims padding_rows"
                )

    def check_pages(self, block_size: int, tokens_per_entry: int = 1) -> None:
        """Check on the host that each length fits its row of the block table.

        Args:
            block_size: entries of a block of the cache; the batch's slots must come from the same size.
            tokens_per_entry: tokens that an entry stands for.

        Raises:
            BatchError: a row is too short, the sizes differ, or there is no block table.

        """
        if self.block_table is None:
            if not self.lens:
                return
            raise BatchError(
                "the layer attends over a cache, and the batch has no block_table: pass "
                "Batch(block_table=...)"
            )
        if self.block_size not in (None, block_size):
            raise BatchError(
                f"block_size={self.block_size}, with which the batch was made, differs from the cache's "
                f"{block_size}; pass the cache's block size to Batch.from_lens"
            )
        width, entries = self.block_table.shape[1], self.max_seq_len // tokens_per_entry
        if entries <= width * block_size:
            return
        index = self.lens.index(self.max_seq_len)
        raise BatchError(
            f"block_table has {width} blocks of {block_size} a sequence; sequence {index} of "
            f"length {self.max_seq_len} needs {-(-entries // block_size)}"
        )

    def tail_slots(self, block_size: int) -> Tensor:
        """Return int64 (num_tokens,): the slots of each sequence's last tokens, one per query token.

        Args:
            block_size: of the cache, in tokens.

        Raises:
            BatchError: a sequence is longer than its row of the block table.

        """
        assert self.block_table is not None
        self.check_pages(block_size)
        seq = np.repeat(np.arange(self.num_seqs), self.host_query_lens)
        position = np.arange(self.num_tokens) + (self.host_lens - self.host_starts[1:])[seq]
        places = [seq, np.maximum(position, 0) // block_size, position % block_size]
        seqs, blocks, offsets = upload(np.array(places, np.int64), self.device)
        if not self.block_table.shape[1]:
            return torch.full_like(seqs, -1)
        slots: Tensor = self.block_table[seqs, blocks].long() * block_size + offsets
        # A padding row has no position; its slot is whatever its engine says, -1 here.
        padding = position < 0
        return slots.masked_fill_(upload(padding, self.device), -1) if padding.any() else slots

    def __repr__(self) -> str:
        return f"<Batch: {self.num_seqs} sequences, {self.num_tokens} query tokens>"
