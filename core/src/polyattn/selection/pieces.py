"""When does the last of some pieces end, if each goes to the processor that is free first?"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BEGIN = 2
"""Blocks that a tile, or a piece of one, costs beside its own."""
SLACK, FULL, UNCUT = 1.1, 0.8, 4
"""FlashAttention-3 cuts keys into shares of 1.1 of the mean, if the tiles of the longest query leave a
fifth of the processors free and a row has more than four blocks. So much may even shares differ, too."""
ROUNDS, MANY = 8, 1056
"""Pieces a processor, and in all, from which on they aren't dealt one by one: the end is estimated."""


UNSHARED = 0.65
"""The time of a tile that no other shares a processor with, as a part of one beside another."""


class Counts(NamedTuple):
    """What takes the place of a step's rows, queries, longest row and pairs of a token and a key.

    `rows`: 1 if anything is merged, of heads by KV head; of TRITON_ATTN how often a program waits for
    parts, and what low tiles of a program cost beside. `longest`: parts of the longest row, if any is
    merged; over latents some of all pieces beside; of TRITON_ATTN's other tiles, and of heads apart, the
    keys that a processor reads from memory.
    `queries`: tokens, and what their parts are in these; over latents, where a program's own rows
    count, each processor has a tile more. `pairs`: as many as if all processors had what the fullest
    one has; `deal_out` tells them where they are bounds: `pairs` at the least, `most` at the most.
    `kind`: of the steps whose coefficients these are for; empty: of this one.
    """

    rows: float
    queries: int
    longest: int
    pairs: int
    most: int
    deal_out: Callable[[], int] | None = None
    kind: str = ""

    def exact(self) -> Counts:
        """Return the counts with pairs that aren't bounds."""
        if self.deal_out is None:
            return self
        pairs = self.deal_out()
        return self._replace(pairs=pairs, most=pairs, deal_out=None)


class Ends(NamedTuple):
    """When the last piece ends: between two times, and what tells the exact one where they differ."""

    low: float
    high: float
    deal_out: Callable[[], float] | None = None

    def exact(self) -> float:
        """Return the time itself."""
        return self.deal_out() if self.deal_out else self.low

    def counts(
        self,
        area: float,
        heads: int,
        merged: float,
        queries: float,
        longest: int,
        kind: str = "",
    ) -> Counts:
        """Return the counts of a processor that has so many blocks of an area in (row, key)."""
        low, high, deal_out = self
        exact = (lambda: int(deal_out() * area) // heads) if deal_out else None
        pairs, most = int(low * area) // heads, int(high * area) // heads
        return Counts(merged, int(queries), longest, pairs, most, exact, kind)


def at(time: float) -> Ends:
    """Return the ends that are known."""
    return Ends(time, time)


def total(numbers: Ints) -> int:
    """Return the sum."""
    return int(np.add.reduce(numbers))


def largest(numbers: npt.NDArray[np.integer[Any]]) -> int:
    """Return the largest, 0 of none: by its place, in a fifth of the time that `max` takes."""
    return int(numbers.item(numbers.argmax())) if len(numbers) else 0


EACH: Ints = np.ones(1, np.int64)
"""Each piece is a group."""


@lru_cache(maxsize=256)
def ones(count: int) -> Ints:
    """Return so many ones, not to be written to."""
    each = np.ones(count, np.int64)
    each.flags.writeable = False
    return each


def ended(costs: Ints, processors: int, times: int = 1, groups: Ints | None = None) -> Ends:
    """Return when the last of some pieces ends that are dealt out so many times.

    `groups`: pieces in turn of each group, which is dealt out as often before the next; or `EACH`; None:
    all in one.
    """
    number, most = len(costs) * times, largest(costs)
    if number <= processors:
        return at(most)
    upto, least, rounds = costs.cumsum(), costs.item(costs.argmin()), -(-number // processors)
    if most == least:
        return at(rounds * most)
    # As a piece begins, all are busy with what was dealt before: for its share of that at the most.
    before = costs * (processors - 1)
    if groups is EACH:
        before += upto * times
    elif groups is None:
        before += upto
    else:
        before += upto + (upto[groups.cumsum() - 1] * (times - 1)).repeat(groups)
    every = upto.item(-1) * times
    more = every - upto.item(-1) if groups is None else 0
    last = (largest(before) + more) / processors
    if number > min(ROUNDS * processors, MANY):
        return _late(costs, processors, times, last, every)
    low, high = max(most, -(-every // processors), rounds * least), min(int(last), rounds * most)

    def deal_out() -> int:
        if groups is EACH:
            return _fullest(costs.repeat(times).tolist(), processors)
        dealt = costs.tolist()
        if groups is None:
            return _fullest(dealt * times, processors)
        ends = (0, *groups.cumsum().tolist())
        dealt = [cost for start, end in pairwise(ends) for cost in dealt[start:end] * times]
        return _fullest(dealt, processors)

    return at(low) if low == high else Ends(low, high, deal_out)


def there_and_back(costs: Ints, processors: int) -> int:
    """Return the most that a processor gets if pieces are dealt to them there and back."""
    turns = np.zeros((-(-len(costs) // processors), processors), np.int64)
    turns.ravel()[: len(costs)] = costs
    turns[1::2] = turns[1::2, ::-1]
    return largest(np.add.reduce(turns))


def turned(costs: Ints, processors: int, times: int, at_once: int) -> Ends:
    """Return when the last processor ends, if falling pieces are dealt out there and back, each so often.

    Where fewer times go `at_once`, whoever is free first gets these in turn, and then the next ones.
    """
    number, most, every = len(costs) * times, costs.item(0), total(costs) * times
    if number <= processors:
        return at(most)
    if number > MANY:
        before = costs.cumsum() * at_once + costs * (processors - 1)
        last = (largest(before) + total(costs) * (times - at_once)) / processors
        return _late(costs, processors, at_once, last, every)

    def deal_out() -> int:
        if at_once < times:
            section = costs.repeat(at_once).tolist()
            return _fullest(section * (times // at_once), processors)
        return there_and_back(costs.repeat(times), processors)

    mean = every / processors
    rounds = -(-number // processors)
    return Ends(max(most, mean), min(mean + most, rounds * most), deal_out)


def _late(costs: Ints, processors: int, times: int, last: float, every: int) -> Ends:
    """Estimate when many pieces end, the last `times` of each side by side: by `last` at the latest.

    `every`: what all pieces cost.
    """
    late = costs[-max(1, ROUNDS * processors // (2 * times)) :]
    half = int(late.dot(late)) / (2 * total(late))  # of a piece that is met at a random time
    return at(max(largest(costs), every / processors, last - half))


def ended_by(planned: Ints, costs: Ints, processors: int, times: int) -> Ends:
    """Return when the last processor ends, if pieces of other costs than `planned` were dealt by those.

    Each goes to the processor that has the least planned; all are dealt so many times. Beyond `MANY`
    pieces what the fullest has over the mean grows as the root of their number.
    """
    number, most, every = len(costs) * times, largest(costs), total(costs) * times
    if number <= processors:
        return at(most)
    turns = min(times, max(1, MANY // len(costs)))
    high = float((costs / planned).max()) * (total(planned) * times / processors + largest(planned))

    def deal_out() -> float:
        heap, busy = [(0, i) for i in range(processors)], [0] * processors
        for plan, cost in list(zip(planned.tolist(), costs.tolist(), strict=True)) * turns:
            load, i = heap[0]
            busy[i] += cost
            heapq.heapreplace(heap, (load + plan, i))
        mean = every * turns / times / processors
        end = every / processors + (max(busy) - mean) * math.sqrt(times / turns)
        return min(max(low, end), high)

    low = max(most, every / processors)
    return Ends(low, high, deal_out) if low < high else at(low)


def _fullest(costs: list[int], processors: int) -> int:
    ends = costs[:processors]
    heapq.heapify(ends)
    replace = heapq.heapreplace
    for cost in costs[processors:]:
        replace(ends, ends[0] + cost)
    return max(ends)


def cut(share: Ints, last: Ints, parts: Ints) -> Ints:
    """Return the pieces of tiles, each in so many, of one size but for the last."""
    pieces = share.repeat(parts)
    pieces[parts.cumsum() - 1] = last
    return pieces


class Rows(NamedTuple):
    """Rows' tiles in pieces of one size but for the last.

    `each`: a row's tiles. `parts`, `share`, `last`: a tile's pieces, and their sizes. `most`: the most
    pieces of a tile. `pieces`: of all.
    """

    each: Ints
    parts: Ints
    share: Ints
    last: Ints
    most: int
    pieces: int

    @classmethod
    def of(cls, each: Ints, sizes: Ints, limit: int, even: bool = False, unit: int = 1) -> Rows:
        """Return tiles in pieces of so much, or of even shares of that; they count in units."""
        if largest(sizes) <= limit:
            share = (sizes + (unit - 1)) // unit if unit > 1 else sizes
            return cls(each, ones(len(sizes)), share, share, 1, total(each))
        parts = np.maximum((sizes + (limit - 1)) // limit, 1)
        share = (sizes + parts - 1) // parts if even else np.minimum(sizes, limit)
        last = sizes - (parts - 1) * share
        if unit > 1:
            last, share = (last + (unit - 1)) // unit, (share + (unit - 1)) // unit
        return cls(each, parts, share, last, largest(parts), int(each.dot(parts)))

    def ended(self, begin: int, times: int, processors: int, block: int = 1) -> Ends:
        """Return when the last piece ends, each so many times. `begin`: what it costs beside its own.

        `block`: what a piece's cost is rounded up to, a power of two.
        """
        each, parts, share, last, most, pieces = self
        if pieces * times <= processors:
            return at(-(-largest(share) // block) * block + begin)
        if block > 1:
            share, last = (share + (block - 1)) & -block, (last + (block - 1)) & -block
        if each is not ones(len(each)):
            share, last, parts = share.repeat(each), last.repeat(each), parts.repeat(each)
        costs = cut(share, last, parts) if most > 1 else share
        return ended(costs + begin, processors, times, EACH)


def alike(number: int, longest: int, programs: int, least: int) -> tuple[int, int]:
    """Return a program's share, and a tile's parts, if all tiles are taken for as long as the longest."""
    if number > programs:
        return -(-number // programs) * longest, 1
    share = max(-(-longest // (programs // number)), least)
    return share, -(-longest // share)


def on_line(units: Ints, share: int) -> tuple[Ints, Ints]:
    """Return the first and the last share that each unit is in, if they lie on a line."""
    ends = units.cumsum()
    return (ends - units) // share, (ends - 1) // share
