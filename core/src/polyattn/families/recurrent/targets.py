"""How does a state get to another slot? A copy before the call that continues from it.

Verification of drafts needs the state after each of a sequence's tokens. A backend that claims
`state_targets` writes them in one launch. For others core decodes token by token, each call on a copy
of the state before, so no kernel has to know about drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.decompositions import Part
from polyattn.runtime.program import Op, RecurrentFrame
from polyattn.runtime.step.batch import Batch


@dataclass(frozen=True)
class StateCopy(Op):
    """States that are copied before a call: slots int64 (sequences,) each."""

    sources: Tensor
    targets: Tensor

    def run(self, frame: RecurrentFrame) -> None:
        """Copy within the states; never waits for the device."""
        states = frame.states
        states.index_copy_(0, self.targets, states.index_select(0, self.sources))


def whole_sequences(batch: Batch) -> tuple[StateCopy, Batch]:
    """Return the copies that put each sequence's state at its target, and the batch from there."""
    targets = batch.state_targets
    assert targets is not None and batch.state_slots is not None
    at = _index(_running(batch, 0), batch)
    inner = Batch(batch.starts, batch.lens, state_slots=targets, device=batch.device)
    # A new sequence has no state: its slot's content is copied but never read.
    return StateCopy(batch.state_slots[at].clamp(min=0), targets[at]), inner


def token_by_token(batch: Batch) -> Iterator[tuple[StateCopy, Part]]:
    """Yield for each token its copies and the decode of the sequences that have one."""
    slots, targets = batch.state_slots, batch.state_targets
    assert slots is not None and targets is not None
    for token in range(batch.max_query_len):
        seqs = _running(batch, token)
        at = _index(seqs, batch)
        before = targets[at, token - 1] if token else slots[at].clamp(min=0)
        mine = targets[at, token]
        behind = [batch.query_lens[i] - token - 1 for i in seqs]
        lens = [batch.lens[i] - more for i, more in zip(seqs, behind, strict=True)]
        part = Batch(list(range(len(seqs) + 1)), lens, state_slots=mine, device=batch.device)
        rows = _index([batch.starts[i] + token for i in seqs], batch)
        yield StateCopy(before, mine), Part(part, rows)


def check_room(batch: Batch) -> None:
    """Check that each token has a target. Raises `BatchError`."""
    targets = batch.state_targets
    assert targets is not None
    if batch.max_query_len > targets.shape[1]:
        raise BatchError(
            f"state_targets has room for {targets.shape[1]} tokens of a sequence, and the longest query "
            f"has {batch.max_query_len}"
        )


def _running(batch: Batch, token: int) -> list[int]:
    """Return which sequences have such a token; padding rows (length 0) have none."""
    pairs = zip(batch.query_lens, batch.lens, strict=True)
    return [i for i, (query, length) in enumerate(pairs) if query > token and length > 0]


def _index(values: list[int], batch: Batch) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=batch.device)
