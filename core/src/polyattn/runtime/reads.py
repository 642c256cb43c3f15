"""Does a plan read each key exactly once? A checker that knows no planner.

A backend describes what its launches do with a plan as `Reads`: items of work, the keys of each, and
the merges of partial results. `problems` compares that with the layer's definition. It asks the mask
itself for each pair of row and key, and never `key_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyattn.spec.layer import LayerSpec

if TYPE_CHECKING:
    from polyattn.runtime.step.batch import Batch

Ints = NDArray[np.signedinteger[Any]]

PAIRS = 1 << 20
"""(query token, key) pairs that are checked at a time."""
TOGETHER = 1 << 11
"""Regions of up to this many pairs are checked together."""
MOST_PAIRS = 1 << 24
"""A hidden region of up to this many pairs is checked whole, a larger one at its edges."""
EDGE = 64
"""Rows and keys of an edge."""
MOST_TOLD = 5
"""Problems of one kind that are described."""


class Items(NamedTuple):
    """Pieces of work, int64 (items,) each. A row is a pair of query token and head of a KV head's group.

    Attributes:
        seq: the sequence of the queries.
        row: the first row within the sequence.
        rows: the number of rows.
        head: the first KV head.
        heads: the number of KV heads.
        place: where the first KV head's partial result begins in the workspace, in elements; -1: the
            item writes the output.
        extent: elements of that partial result; 0 if there is none.
        table: the sequence whose block table says where the keys are.

    Examples:
        >>> one = np.array([0])
        >>> Items(one, one, one + 4, one, one + 2, one - 1, one, one).rows.tolist()
        [4]

    """

    seq: Ints
    row: Ints
    rows: Ints
    head: Ints
    heads: Ints
    place: Ints
    extent: Ints
    table: Ints


class Keys(NamedTuple):
    """Ranges of keys, int64 (ranges,) each; an item may have several.

    Attributes:
        item: the item that attends to them.
        begin: the first key, counted from the sequence's first.
        end: the key after the last.

    Examples:
        >>> Keys(np.array([0]), np.array([0]), np.array([40])).end.tolist()
        [40]

    """

    item: Ints
    begin: Ints
    end: Ints


class Merges(NamedTuple):
    """Merges of partial results into the output, int64 (merges,) except the last two.

    Attributes:
        seq: the sequence of the rows.
        row: the first row within the sequence.
        rows: the number of rows.
        head: the first KV head.
        heads: the number of KV heads.
        first: (merges + 1,): merge m takes `places[first[m] : first[m + 1]]`.
        places: where the partial results begin in the workspace, in the order of their keys.

    Examples:
        >>> no_merges().first.tolist()
        [0]

    """

    seq: Ints
    row: Ints
    rows: Ints
    head: Ints
    heads: Ints
    first: Ints
    places: Ints


@dataclass
class Reads:
    """All that a step's launches do, as the kernels walk through the plan.

    Attributes:
        group: query heads of a KV head.
        heads: KV heads.
        items: the pieces of work.
        keys: the keys of each.
        merges: the merges of partial results.
        room: of the workspace, in elements.
        apart: elements from one KV head's partial result to the next one's, of all items or (items,).
        block_size: tokens of a block of the table that the items read; 0 without one.
        faults: accesses outside of a buffer, in words.
        batch: the step whose rows and keys count, if it isn't the call's.
        spec: the layer, if it isn't the call's.

    Examples:
        >>> none = np.zeros(0, np.int64)
        >>> reads = Reads(4, 2, Items(*[none] * 8), Keys(none, none, none), no_merges())
        >>> reads.faults
        []

    """

    group: int
    heads: int
    items: Items
    keys: Keys
    merges: Merges
    room: int = 0
    apart: int | Ints = 0
    block_size: int = 0
    faults: list[str] = field(default_factory=list)
    batch: Batch | None = None
    spec: LayerSpec | None = None


def no_merges() -> Merges:
    """Return the merges of a plan that splits no sequence.

    Returns:
        Seven empty arrays, but `first`, which is [0].

    Examples:
        >>> len(no_merges().seq)
        0

    """
    none = np.zeros(0, np.int64)
    return Merges(none, none, none, none, none, np.zeros(1, np.int64), none)


def in_turn(launches: Sequence[Reads]) -> Reads:
    """Return the reads of a step's launches. Each launch merges its parts before the next one runs.

    Launches may share the place of their parts, so each launch's parts are numbered behind the earlier
    ones.

    Args:
        launches: one or more, of one layer and one step.

    Examples:
        >>> none = np.zeros(0, np.int64)
        >>> one = Reads(4, 2, Items(*[none] * 8), Keys(none, none, none), no_merges(), room=8)
        >>> in_turn([one, one]).room
        16

    """
    first, items, keys, merges, apart = launches[0], [], [], [], []
    faults: list[str] = []
    begun = rooms = parts = 0
    for number, reads in enumerate(launches):
        cut = reads.items.place >= 0
        apart.append(np.broadcast_to(reads.apart, len(cut)))
        ends = reads.items.place + reads.items.extent + (reads.items.heads - 1) * apart[-1]
        faults += reads.faults + [
            f"launch {number}, item {i}: its partial result ends at {ends[i]}, the workspace at "
            f"{reads.room}"
            for i in np.flatnonzero(cut & (ends > reads.room))
        ]
        items.append(reads.items._replace(place=np.where(cut, reads.items.place + rooms, -1)))
        keys.append(reads.keys._replace(item=reads.keys.item + begun))
        own = reads.merges
        merges.append(own._replace(first=own.first[1:] + parts, places=own.places + rooms))
        begun, rooms, parts = begun + len(cut), rooms + reads.room, parts + len(own.places)
    joined = Merges(*map(np.concatenate, zip(*merges, strict=True)))
    return replace(
        first,
        items=Items(*map(np.concatenate, zip(*items, strict=True))),
        keys=Keys(*map(np.concatenate, zip(*keys, strict=True))),
        merges=joined._replace(first=np.concatenate([[0], joined.first])),
        room=rooms,
        apart=np.concatenate(apart),
        faults=faults,
    )


def shows(spec: LayerSpec, query: Any, key: Any, length: Any) -> NDArray[np.bool_]:
    """Return whether queries at these positions see keys at those, of sequences of `length` keys.

    The layer's definition, as `families.attention.reference.visible` has it, pair by pair.
    """
    seen: Any = (key >= 0) & (key < length)
    if spec.causal:
        seen = seen & (key <= query)
    near: Any = True
    if spec.sliding_window is not None:
        near = query - key < spec.sliding_window
        if not spec.causal and spec.window_right is None:
            near = near & (key - query < spec.sliding_window)
    if spec.window_right is not None:
        near = near & (key - query <= spec.window_right)
    seen = seen & (near | (key < spec.sink_tokens))
    if spec.chunk_size is not None:
        seen = seen & (key // spec.chunk_size == query // spec.chunk_size)
    return np.asarray(seen)


def problems(spec: LayerSpec, batch: Batch, reads: Reads) -> list[str]:
    """Return the errors of a step's plan, with rows, KV heads and keys; [] for none.

    Each (row, KV head, key) that the mask shows must be read exactly once, and each row written exactly
    once. Each partial result must be merged exactly once, in the order of its keys. Nothing may lie
    outside of its buffer.
    """
    batch, spec = reads.batch or batch, reads.spec or spec
    faults = _told(reads.faults)
    outside = _outside(batch, reads)
    if outside:  # what follows would index by it
        return faults + outside
    grid = _Grid.of(batch, reads)
    faults += _unevenly_read(spec, grid, reads)
    faults += _unevenly_written(grid, reads)
    faults += _overlapping(reads)
    faults += _unmerged(reads)
    faults += _other_tables(batch, reads)
    return faults


def _told(texts: list[str]) -> list[str]:
    rest = len(texts) - MOST_TOLD
    return [*texts[:MOST_TOLD], f"and {rest} more"] if rest > 0 else texts


def _outside(batch: Batch, reads: Reads) -> list[str]:
    """Items and merges whose sequence, rows or heads aren't the step's."""
    queries = np.diff(batch.host_starts) * reads.group
    faults = []
    for name, some in (("item", reads.items), ("merge", reads.merges)):
        inside = (some.seq >= 0) & (some.seq < batch.num_seqs)
        last = queries[np.where(inside, some.seq, 0)] if len(queries) else 0 * some.seq
        inside &= (some.row >= 0) & (some.rows > 0) & (some.row + some.rows <= last)
        inside &= (some.head >= 0) & (some.heads > 0) & (some.head + some.heads <= reads.heads)
        faults += [
            f"{name} {i}: sequence {some.seq[i]}, rows {some.row[i]} to {some.row[i] + some.rows[i]}, "
            f"KV heads {some.head[i]} to {some.head[i] + some.heads[i]} aren't all the step's"
            for i in np.flatnonzero(~inside)
        ]
    ends = reads.items.place + reads.items.extent + (reads.items.heads - 1) * reads.apart
    cut = reads.items.place >= 0
    for i in np.flatnonzero(cut & (ends > reads.room)):
        faults.append(
            f"item {i}: its partial result ends at {ends[i]}, the workspace at {reads.room}"
        )
    none = (reads.items.table < 0) | (reads.items.table >= max(1, batch.num_seqs))
    faults += [f"item {i}: no sequence {reads.items.table[i]}" for i in np.flatnonzero(none)]
    return _told(faults)


@dataclass
class _Grid:
    """All rows and KV heads, cut where an item or a merge begins or ends.

    `bounds` (cells + 1,): rows of the step; `heads` likewise. `seq` (cells,): whose rows.
    """

    bounds: Ints
    heads: Ints
    offset: Ints
    seq: Ints
    lens: Ints
    group: int
    context: Ints

    @classmethod
    def of(cls, batch: Batch, reads: Reads) -> _Grid:
        items, merges = reads.items, reads.merges
        starts = np.asarray(batch.host_starts, np.int64)
        lens = np.asarray(batch.host_lens, np.int64)
        offset = starts * reads.group
        edges, sides = [offset], [np.array([0, reads.heads])]
        for some in (items, merges):
            begin = offset[some.seq] + some.row
            edges += [begin, begin + some.rows]
            sides += [some.head, some.head + some.heads]
        bounds = np.unique(np.concatenate(edges))
        seq = offset.searchsorted(bounds[:-1], "right") - 1
        context = lens - np.diff(starts)
        heads = np.unique(np.concatenate(sides))
        return cls(bounds, heads, offset, seq, lens, reads.group, context)

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def cells(self) -> int:
        return self.rows * (len(self.heads) - 1)

    def over(self, some: Any) -> tuple[Ints, Ints, Ints, Ints]:
        """Return items' or merges' cells: of rows from, to, of heads from, to."""
        begin = self.offset[some.seq] + some.row
        rows = self.bounds.searchsorted(begin), self.bounds.searchsorted(begin + some.rows)
        heads = self.heads.searchsorted(some.head), self.heads.searchsorted(some.head + some.heads)
        return (*rows, *heads)

    def name(self, cell: int, row: int, key: int | None) -> str:
        """Say which row of a cell, for people; `row`: of the step's."""
        head, seq = int(self.heads[cell // self.rows]), int(self.seq[cell % self.rows])
        token, of_group = divmod(row - int(self.offset[seq]), self.group)
        text = f"sequence {seq}, query token {token}, query head {head * self.group + of_group}"
        return f"{text}, KV head {head}" + ("" if key is None else f", key {key}")


def _spread(count: Ints) -> tuple[Ints, Ints]:
    """Return for each of `count[i]` copies of i: i, and which copy it is."""
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)


def _unevenly_read(spec: LayerSpec, grid: _Grid, reads: Reads) -> list[str]:
    """Pairs that the mask shows and that no item, or several, read."""
    row, row_end, head, head_end = grid.over(reads.items)
    item = reads.keys.item
    height = (row_end - row)[item]
    which, copy = _spread(height * (head_end - head)[item])
    item = item[which]
    height = height[which]
    cell = (head[item] + copy // np.maximum(height, 1)) * grid.rows + row[item]
    cell += copy % np.maximum(height, 1)
    length = grid.lens[grid.seq[cell % grid.rows]] if grid.rows else cell
    begin = np.clip(reads.keys.begin[which], 0, length)
    end = np.clip(reads.keys.end[which], 0, length)
    some = end > begin
    cell, begin, end = cell[some], begin[some], end[some]
    order = np.lexsort((begin, cell))
    cell, begin, end = cell[order], begin[order], end[order]
    far = int(grid.lens.max(initial=0)) + 1
    # For each range of a cell, where the ranges before it end; 0 for the first.
    reach = np.maximum.accumulate(cell * far + end)
    before = np.zeros_like(end)
    before[1:] = np.maximum(reach[:-1] - cell[1:] * far, 0)
    all_cells = np.arange(grid.cells)
    last = np.zeros(grid.cells, np.int64)
    np.maximum.at(last, cell, end)
    whole = grid.lens[grid.seq[all_cells % grid.rows]] if grid.rows else last
    gaps = (
        np.concatenate([cell, all_cells]),
        np.concatenate([before, last]),
        np.concatenate([begin, whole]),
    )
    twice = cell, begin, np.minimum(end, before)
    faults = []
    for words, regions in (("is attended to by no item", gaps), ("by several items", twice)):
        texts = (
            f"{grid.name(at, row, key)}: {words}" for at, row, key in _shown(spec, grid, *regions)
        )
        faults += _told(list(texts))
    return faults


def _shown(
    spec: LayerSpec, grid: _Grid, cell: Ints, begin: Ints, end: Ints
) -> Iterator[tuple[int, int, int]]:
    """Yield of each region of a cell's rows and these keys the first pair that the mask shows, if any."""
    some = end > begin
    cell, begin, end = cell[some], begin[some], end[some]
    if len(grid.heads) > 2:  # equal ranges of several KV heads are checked once
        _, once = np.unique(np.stack([cell % grid.rows, begin, end]), axis=1, return_index=True)
        cell, begin, end = cell[once], begin[once], end[once]
    if not len(cell):
        return
    at = cell % grid.rows
    seq = grid.seq[at]
    first = (grid.bounds[at] - grid.offset[seq]) // grid.group
    last = (grid.bounds[at + 1] - 1 - grid.offset[seq]) // grid.group
    pairs = (last - first + 1) * (end - begin)
    small = np.flatnonzero(pairs <= TOGETHER)
    which, copy = _spread(pairs[small])
    of, width = small[which], (end - begin)[small][which]
    token, key = first[of] + copy // width, begin[of] + copy % width
    hits = np.flatnonzero(shows(spec, grid.context[seq[of]] + token, key, grid.lens[seq[of]]))
    _, once = np.unique(which[hits], return_index=True)
    pairs_shown = [(int(of[i]), int(token[i]), int(key[i])) for i in hits[once]]
    for where in np.flatnonzero(pairs > TOGETHER).tolist():
        tokens, keys = np.arange(first[where], last[where] + 1), np.arange(begin[where], end[where])
        if pairs[where] > MOST_PAIRS:
            tokens, keys = _edges(tokens), _edges(keys)
        context, length = grid.context[seq[where]], grid.lens[seq[where]]
        step = max(1, PAIRS // len(keys))
        for some in np.split(tokens, range(step, len(tokens), step)):
            seen = shows(spec, context + some[:, None], keys[None], length)
            if seen.any():
                row, column = divmod(
                    int(np.broadcast_to(seen, (len(some), len(keys))).argmax()), len(keys)
                )
                pairs_shown.append((where, int(some[row]), int(keys[column])))
                break
    for where, in_seq, shown_key in pairs_shown:
        row = max(int(grid.offset[seq[where]]) + in_seq * grid.group, int(grid.bounds[at[where]]))
        yield int(cell[where]), row, shown_key


def _edges(values: Ints) -> Ints:
    return values if len(values) <= 2 * EDGE else np.concatenate([values[:EDGE], values[-EDGE:]])


def _unevenly_written(grid: _Grid, reads: Reads) -> list[str]:
    """Rows of the output with no writer or several."""
    written = np.zeros((len(grid.heads), grid.rows + 1), np.int64)
    direct = reads.items.place < 0
    for some, mask in ((reads.items, direct), (reads.merges, np.ones(len(reads.merges.seq), bool))):
        row, row_end, head, head_end = (x[mask] for x in grid.over(some))
        for rows, by in ((row, 1), (row_end, -1)):
            np.add.at(written, (head, rows), by)
            np.add.at(written, (head_end, rows), -by)
    written = written.cumsum(0).cumsum(1)[:-1, :-1]
    return _told(
        [
            f"{grid.name(int(h) * grid.rows + int(r), int(grid.bounds[r]), None)}: its output is written "
            f"{written[h, r]} times"
            for h, r in np.argwhere(written != 1)
        ]
    )


def _overlapping(reads: Reads) -> list[str]:
    """Partial results that lie in one place."""
    cut = np.flatnonzero(reads.items.place >= 0)
    if not len(cut):
        return []
    apart = np.broadcast_to(reads.apart, len(reads.items.seq))[cut]
    which, head = _spread(np.where(apart > 0, reads.items.heads[cut], 1))
    begin = reads.items.place[cut][which] + head * apart[which]
    order = np.argsort(begin, kind="stable")
    begin, which = begin[order], which[order]
    end = begin + reads.items.extent[cut][which]
    bad = np.flatnonzero(begin[1:] < np.maximum.accumulate(end)[:-1])
    return _told(
        [
            f"items {cut[which[i]]} and {cut[which[i + 1]]}: both partial results lie at {begin[i + 1]} "
            "of the workspace"
            for i in bad
        ]
    )


def _unmerged(reads: Reads) -> list[str]:
    """Partial results that aren't merged once, by the merge of their own rows, in the keys' order."""
    items, merges = reads.items, reads.merges
    cut = np.flatnonzero(items.place >= 0)
    order = cut[np.argsort(items.place[cut], kind="stable")]
    places = items.place[order]
    at = np.minimum(places.searchsorted(merges.places), max(0, len(places) - 1))
    there = places[at] == merges.places if len(places) else np.zeros(len(merges.places), bool)
    merge = np.repeat(np.arange(len(merges.seq)), np.diff(merges.first))
    texts = [
        f"merge {merge[i]}: there is no partial result at {merges.places[i]}"
        for i in np.flatnonzero(~there)
    ]
    of, merge = order[at[there]] if len(order) else at[there], merge[there]
    alike = np.ones(len(of), bool)
    for name in ("seq", "row", "rows", "head", "heads"):
        alike &= getattr(items, name)[of] == getattr(merges, name)[merge]
    texts += [
        f"merge {merge[i]}: item {of[i]} has other rows (sequence {items.seq[of[i]]}, rows from "
        f"{items.row[of[i]]}, KV heads from {items.head[of[i]]})"
        for i in np.flatnonzero(~alike)
    ]
    times = np.bincount(of, minlength=len(items.seq))
    texts += [
        f"item {i} (sequence {items.seq[i]}, rows {items.row[i]} to {items.row[i] + items.rows[i]}, KV "
        f"heads from {items.head[i]}): its partial result is merged {times[i]} times"
        for i in cut
        if times[i] != 1
    ]
    first = np.full(len(items.seq), np.iinfo(np.int64).max)
    some = reads.keys.begin < reads.keys.end
    np.minimum.at(first, reads.keys.item[some], reads.keys.begin[some])
    begins, held = first[of], first[of] < np.iinfo(np.int64).max
    begins, merge, of = begins[held], merge[held], of[held]
    wrong = np.flatnonzero((merge[1:] == merge[:-1]) & (begins[1:] <= begins[:-1]))
    texts += [
        f"merge {merge[i]}: key {begins[i + 1]} comes after key {begins[i]}; the order of a sum must be "
        "its keys'"
        for i in wrong
    ]
    return _told(texts)


def _other_tables(batch: Batch, reads: Reads) -> list[str]:
    """Keys that are read by another sequence's block table, where that names another block."""
    keys, items, size = reads.keys, reads.items, reads.block_size
    other = np.flatnonzero((items.table != items.seq)[keys.item] & (keys.end > keys.begin))
    if not len(other):
        return []
    if batch.host_block_table is None or not size:
        return ["another sequence's block table is read, and there is none on the host"]
    first = keys.begin[other] // size
    which, copy = _spread(-(-keys.end[other] // size) - first)
    item, block = keys.item[other][which], first[which] + copy
    table = batch.host_block_table
    theirs, own = table[items.table[item], block], table[items.seq[item], block]
    return _told(
        [
            f"sequence {items.seq[item[i]]}, key {block[i] * size}: read from block {theirs[i]}, "
            f"it lies in {own[i]}"
            for i in np.flatnonzero(theirs != own)
        ]
    )
