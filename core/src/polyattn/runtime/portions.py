"""Do a step's calls together attend to each key once? By phase, over pieces of keys, in smaller blocks.

A checker that shares no line with what takes steps apart: it reads off the calls which tokens each is
for, and where its keys lie. What a call's own plan does with them is `reads`' to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyattn.runtime.merge import Merged
from polyattn.runtime.program import Call, Op, Rows
from polyattn.runtime.step.batch import Batch
from polyattn.selection.cache_format import CacheFormat

Ints = NDArray[np.signedinteger[Any]]


class Portion(NamedTuple):
    """The keys that a call attends to for neighbouring tokens of a sequence.

    `first`, `last`: tokens of the step, `last` excluded; `begin`, `end`: keys of the sequence likewise.
    """

    seq: int
    first: int
    last: int
    begin: int
    end: int


def with_host_table(batch: Batch) -> Batch:
    """Return the batch with its block table on the host, copied where only the device has it.

    The batch itself stays: what a check reads must not change how later steps are planned.
    """
    if batch.block_table is None or batch.host_block_table is not None:
        return batch
    batch = batch.copy()
    batch.read_block_table()
    return batch


def unevenly_called(
    batch: Batch, ops: Iterable[Op], form: CacheFormat | None, chunk: int | None = None
) -> list[str]:
    """Return the errors of a step's calls, with tokens and keys; [] for none.

    `form`: of the cache that the batch's block table is of; `chunk`: the layer's. Steps with a mask of
    their own aren't told of.
    """
    if batch.lens_are_bounds or batch.mask is not None:
        return []
    batch = with_host_table(batch)
    portions: list[Portion] = []
    problems: list[str] = []
    for op in ops:
        for rows, call, slots in _calls(op, np.arange(batch.num_tokens)):
            step = _Step(batch, form, call, slots)
            step.add(portions, rows, problems)
    if problems:
        return problems[:5]
    return list(_gaps(batch, portions, chunk))[:5]


def _of(rows: Ints, some: Rows) -> Ints:
    """Return some of these tokens."""
    if some is None:
        return rows
    return rows[some if isinstance(some, slice) else some.cpu().numpy()]


def _calls(op: Op, rows: Ints) -> Iterator[tuple[Ints, Call, Any]]:
    """Yield each call of an op, with its tokens of the step and the slots that its keys come from."""
    rows = _of(rows, op.rows)
    if isinstance(op, Merged):
        for some, part in op.parts:
            yield from _calls(part, _of(rows, some))
        return
    for call in op.calls:
        shared = getattr(call.plan, "merged", None)
        if shared is not None:  # a decode whose rows share blocks
            yield from _calls(shared, rows)
        else:
            yield rows, call, getattr(op, "slots", None)


class _Step:
    """A call beside the step that it is of."""

    def __init__(self, batch: Batch, form: CacheFormat | None, call: Call, slots: Any):
        self.batch, self.call = batch, call
        self.size, self.apart = (0, 0) if form is None else (form.block_size, form.block_stride)
        self.part = with_host_table(call.plan.batch)
        self.slots = None if slots is None else slots.cpu().numpy()
        self.starts = np.asarray(batch.host_starts)
        self.end = 0  # of the slots that sequences before have

    def add(self, portions: list[Portion], rows: Ints, problems: list[str]) -> None:
        """Add what each sequence of the call is of the step's; `rows`: the call's tokens."""
        part, name = self.part, f"{self.call.phase} by {self.call.name}"
        if part.num_tokens != len(rows):
            problems.append(f"{name}: {part.num_tokens} tokens are planned for {len(rows)} rows")
            return
        for index, (first, last) in enumerate(zip(part.starts, part.starts[1:], strict=False)):
            length = part.lens[index]
            self.end += length
            if first == last:
                continue
            together = rows[first:last]
            seqs = self.starts.searchsorted(together, "right") - 1
            cuts = np.flatnonzero((np.diff(together) != 1) | (np.diff(seqs) != 0)) + 1
            if len(cuts) and part.causal:
                problems.append(
                    f"{name}: sequence {index} has tokens {together.tolist()[:8]} of several"
                )
                continue
            for mine in np.split(together, cuts):  # several: all see the same keys
                portion = self.portion(index, mine, portions)
                if isinstance(portion, str):
                    problems.append(f"{name}: {portion}")
                else:
                    portions.append(portion)

    def portion(self, index: int, mine: Ints, portions: list[Portion]) -> Portion | str:
        """Return the relation of a call's sequence to a sequence's tokens, or the reason for none."""
        seq = int(self.starts.searchsorted(mine[0], "right")) - 1
        length = self.part.lens[index]
        if not length:
            return Portion(seq, int(mine[0]), int(mine[-1]) + 1, 0, 0)
        # Where its first token stands, by the step: by the call, too, or no key lies behind it.
        stands = self.batch.lens[seq] - (int(self.starts[seq + 1]) - int(mine[0]))
        places = self.begins(seq, index)
        aligned = [
            Portion(seq, int(mine[0]), int(mine[-1]) + 1, begin, begin + length)
            for begin in places
            if (
                begin + length - len(mine) == stands
                if self.part.causal
                else begin + length <= stands
            )
        ]
        if not aligned:
            token, begin = int(mine[0]) - int(self.starts[seq]), next(iter(places), -1)
            return (
                f"sequence {seq}, query token {token}: its keys from {begin} to {begin + length} are "
                "not the step's"
            )
        # Keys that lie in one place of the cache are the same: of those, the first that no call has.
        fresh = (each for each in aligned if len(aligned) > 1 and not _met(each, portions))
        return next(fresh, aligned[0])

    def begins(self, seq: int, index: int) -> list[int]:
        """Return which of a sequence's keys the call's first may be; none: no run of them."""
        batch, part, length = self.batch, self.part, self.part.lens[index]
        table = batch.host_block_table
        if batch.block_table is None:
            begin = part.key_starts[index] - batch.key_starts[seq]
            return [begin] if begin >= 0 else []
        if table is None or not self.size:
            return [0]
        place = np.arange(batch.lens[seq])
        if self.slots is not None:
            held = self.slots[self.end - length : self.end]
            slots = table[seq, place // self.size] * self.size + place % self.size
            at = np.flatnonzero(slots[: len(slots) - length + 1] == held[0])
            return [int(a) for a in at if (slots[a : a + length] == held).all()]
        theirs, size = part.host_block_table, self.call.block_size or self.size
        if theirs is None:
            return [0]
        column, ratio = place[:length:size] // size, self.size // size
        if not len(column):
            return [0]
        turned = theirs[index, column] - column % ratio
        blocks = table[seq, place[:: self.size] // self.size]
        step = self.apart // size if self.call.block_size else 1
        last = len(blocks) - column[-1] // ratio
        return [
            int(at) * self.size
            for at in np.flatnonzero(blocks[:last] * step == turned[0])
            if (blocks[at + column // ratio] * step == turned).all()
        ]


def _met(one: Portion, portions: Iterable[Portion]) -> bool:
    """Whether another call attends to one of these keys for one of these tokens."""
    return any(
        one.seq == other.seq
        and max(one.first, other.first) < min(one.last, other.last)
        and max(one.begin, other.begin) < min(one.end, other.end)
        for other in portions
    )


def _gaps(batch: Batch, portions: list[Portion], chunk: int | None) -> Iterator[str]:
    """Yield the first key of a token that no call attends to, or several.

    Where a text's first keys are missing within a chunk, each token has the keys of its own chunk.
    """
    held = np.array(portions, np.int64).reshape(-1, 5)
    firsts = batch.first_positions or [0] * batch.num_seqs
    apart = chunk is not None and any(first % chunk for first in firsts)
    for seq, (first, last) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
        mine, length, begins = held[held[:, 0] == seq], batch.lens[seq], firsts[seq]
        turns = []  # tokens that begin a chunk
        if apart:
            turns = [
                t for t in range(first, last) if (begins + length - last + t) % (chunk or 1) == 0
            ]
        cuts = np.unique(np.concatenate([mine[:, 1], mine[:, 2], [first, last], turns]).astype(int))
        for token, stop in pairwise(cuts.tolist()) if last > first else ():
            there = mine[(mine[:, 1] <= token) & (token < mine[:, 2])]
            name = f"sequence {seq}, query token {token - first}"
            if not len(there):
                yield f"{name}: no call has it"
            at, end_of = 0, length - (last - stop)  # calls of fewer tokens end with their keys
            if apart and chunk:
                own = (begins + length - last + token) // chunk * chunk - begins
                at, end_of = (min(max(0, key), length) for key in (own, own + chunk))
            for begin, end in there[there[:, 3].argsort(kind="stable"), 3:].tolist():
                if end > begin and begin != at:
                    calls = "no call" if begin > at else "several calls"
                    yield f"{name}, key {min(begin, at)}: by {calls}"
                at = max(at, end)
            if at < end_of:
                yield f"{name}, key {at}: by no call"
            if apart and at > end_of:
                yield f"{name}, key {end_of}: by a call, and it is of another chunk"
