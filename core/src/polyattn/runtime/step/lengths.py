"""What follows from a step's lengths? Counts, maxima and places, on the host and on the device."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.runtime.step.batch_checks import Integers


class Lengths:
    """Packed sequences by their query starts and lengths; each value is computed when first asked for.

    - `starts` (num_seqs + 1): where each sequence's query tokens start, ending with their total.
    - `lens` (num_seqs): how many tokens each sequence has, the new ones included.
    """

    starts: list[int]
    lens: list[int]
    device: torch.device
    first_positions: list[int] | None = None

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch."""
        return self.starts[-1]

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
    def query_lens(self) -> list[int]:
        """Query tokens of each sequence, on the host."""
        return list(self.host_query_lens.tolist())

    @cached_property
    def max_query_len(self) -> int:
        """The longest query."""
        return int(self.host_query_lens.max(initial=0))

    @cached_property
    def max_seq_len(self) -> int:
        """The longest sequence."""
        return int(self.host_lens.max(initial=0))

    @cached_property
    def all_decode(self) -> bool:
        """Whether there are sequences, and every one has exactly one query token."""
        return 0 < len(self.lens) == self.starts[-1] and self.max_query_len == 1

    @cached_property
    def query_start_loc(self) -> Tensor:
        """int32 (num_seqs + 1,) on the device."""
        return torch.from_numpy(self.host_starts.astype(np.int32)).to(self.device)

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 (num_seqs,) on the device."""
        return torch.from_numpy(self.host_lens.astype(np.int32)).to(self.device)

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
        """How long each sequence's text is: its keys, and what came before the first of them."""
        if not self.first_positions:
            return self.lens
        return [a + b for a, b in zip(self.first_positions, self.lens, strict=True)]

    @cached_property
    def key_starts(self) -> list[int]:
        """Where each sequence's keys start, on the host: packed, where nothing else was said."""
        return [0, *accumulate(self.lens)][:-1]

    @cached_property
    def keys_packed(self) -> bool:
        """Whether the keys lie one after another without gaps."""
        return self.key_starts == [0, *accumulate(self.lens)][:-1]

    @cached_property
    def key_start_loc(self) -> Tensor:
        """int32 (num_seqs + 1,) on the device: where packed keys start, ending with their total."""
        return torch.tensor([0, *accumulate(self.lens)], dtype=torch.int32, device=self.device)
