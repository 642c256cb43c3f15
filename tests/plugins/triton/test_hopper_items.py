"""Which tiles and pieces have the programs of Hopper's own prefill, and where do pieces lie?"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import numpy as np
from polyattn import LayerSpec
from polyattn_triton.hopper import items as hopper_items
from polyattn_triton.kernels import parts, tiles
from polyattn_triton.mla import ROLES_RATES
from polyattn_triton.schedule import (
    Line,
    Rates,
    Tiles,
    in_lanes,
    key_tiles,
    max_parts,
    rows_of,
    stretches,
)

FUNCTIONS = [getattr(hopper_items, name).fn for name in ("begin", "advance", "bounds", "part_of")]
JOB_AT = hopper_items.job_at.fn


class Pointer:
    """What `gl.load` takes: an array and where in it."""

    def __init__(self, array: Any, at: int = 0):
        self.array, self.at = array, at

    def __add__(self, by: int) -> Pointer:
        return Pointer(self.array, self.at + int(by))


def language(program: int, programs: int, kv_head: int = 0) -> SimpleNamespace:
    """Gluon's functions of scalars, for one program."""

    def load(pointer: Pointer, mask: bool = True, other: int = 0) -> int:
        assert 0 <= pointer.at < len(pointer.array) or not mask
        return int(pointer.array[pointer.at]) if mask else other

    return SimpleNamespace(
        program_id=lambda axis: (program, kv_head)[axis], num_programs=lambda axis: programs,
        load=load, minimum=min, maximum=max, where=lambda c, a, b: a if c else b,
        cdiv=lambda a, b: -(-a // b),
    )  # fmt: skip


@dataclass
class DealtStep:
    """A step's rows and lengths, and the work that is dealt to `programs` (and KV heads, if `split`)."""

    group: int
    heads: int
    queries: list[int]
    lens: list[int]
    causal: bool = True
    window: int = 0
    split: bool = False
    at_once: int = 1

    def __post_init__(self) -> None:
        q, n = np.array(self.queries), np.array(self.lens)
        seq, row = rows_of(q, self.group, 128)
        last = np.minimum(row + 128, q[seq] * self.group) - 1
        context = (n - q)[seq]
        first = context + row // self.group
        spec = LayerSpec(
            num_heads=self.group * self.heads, num_kv_heads=self.heads, head_size=128,
            causal=self.causal, sliding_window=self.window or None,
        )  # fmt: skip
        keys = key_tiles(spec, first, context + last // self.group, n[seq], 128)
        lows = np.maximum(first - self.window + 1, 0) // 128 if self.window else np.zeros_like(keys)
        self.wanted = {
            (head, int(s), int(r)): list(range(int(low), int(low + k)))
            for head in range(self.heads)
            for s, r, k, low in zip(seq, row, keys, lows, strict=True)
        }
        self.tiles = len(seq)
        if self.split:
            self.programs = max(1, 132 // self.heads)
            dealt = stretches(Line.of(keys, 1), self.programs, Rates(1, 2))
            self.work = dealt.work(Tiles(seq, row, keys))
        else:
            self.programs = min(132, self.tiles * self.heads)
            order = np.argsort(-keys, kind="stable")
            self.work = np.concatenate([seq[order], row[order]])

    def items(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """Run the kernel's own index functions."""
        starts = np.concatenate([[0], np.cumsum(self.queries)])
        begin, advance, bounds, part_of = FUNCTIONS
        monkeypatch.setattr(hopper_items, "job_at", JOB_AT)
        items = []
        work, sizes = Pointer(self.work), (self.tiles, self.at_once)
        for program, kv_head in product(
            range(self.programs), range(self.heads if self.split else 1)
        ):
            monkeypatch.setattr(hopper_items, "gl", language(program, self.programs, kv_head))
            at, stop, low, high, tile, seq, row, head = begin(work, *sizes, self.heads, self.split)
            while at < stop:
                token0, query_len, length, first, count, full_low, full, limit = bounds(
                    Pointer(self.lens), Pointer(starts), work, at, stop, low, high, seq, row,
                    self.group, 128, 128, self.causal, self.window, self.split,
                )  # fmt: skip
                assert (token0, query_len) == (starts[seq], self.queries[seq])
                assert length == self.lens[seq] and count > 0 and first >= 0
                cut, place = part_of(work, low, high, head) if self.split else (False, -1)
                items.append({
                    "program": program, "head": head, "seq": seq, "row": row, "first": first,
                    "count": count, "full_low": full_low, "full": full, "limit": limit,
                    "low": low, "high": high, "cut": cut, "place": place,
                })  # fmt: skip
                at, low, high, tile, seq, row, head = advance(
                    work, *sizes, low, high, tile, head, self.split
                )
        return items


def drawn(seed: int, beyond: bool = False, **changes: Any) -> DealtStep:
    """A random step; `beyond`: queries may outnumber keys."""
    chance = random.Random(seed)
    group, heads = chance.choice([(4, 8), (7, 4), (1, 3), (8, 1)])
    queries = [chance.choice([0, 1, 17, 128, 300, 1500]) for _ in range(chance.randint(1, 6))]
    queries[0] = max(queries[0], 1)
    lens = [q + chance.choice([0, 0, 5, 128, 2000]) for q in queries]
    if beyond:
        lens = [chance.choice([0, 1, q // 3, n]) for q, n in zip(queries, lens, strict=True)]
    return DealtStep(group, heads, queries, lens, at_once=chance.choice([1, heads]), **changes)


MASKS: list[dict[str, Any]] = [{}, {"causal": False}, {"window": 200}, {"window": 1000}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_key_of_every_row_has_one_program(
    monkeypatch: pytest.MonkeyPatch, seed: int, beyond: bool, split: bool, mask: dict[str, Any]
) -> None:
    case = drawn(seed, beyond, split=split, **mask)
    seen: dict[tuple[int, int, int], list[int]] = {}
    for item in case.items(monkeypatch):
        s, r, first = item["seq"], item["row"], item["first"]
        end = min(first + item["count"], -(-item["limit"] // 128))
        context = case.lens[s] - case.queries[s]
        last_row = context + (min(r + 128, case.queries[s] * case.group) - 1) // case.group
        if case.causal:  # tiles that no row sees are masked whole
            end = min(end, -(-(last_row + 1) // 128))
        seen.setdefault((item["head"], s, r), []).extend(range(first, end))
        # In [full_low, full) every row sees every key; the last tile always has a mask.
        for tile in range(item["full_low"], min(item["full"], first + item["count"] - 1)):
            assert first <= tile
            most = context + r // case.group + 1 if case.causal else case.lens[s]
            assert (tile + 1) * 128 <= min(most, item["limit"])
            assert not case.window or tile * 128 > last_row - case.window
    assert {key: sorted(tiles) for key, tiles in seen.items()} == case.wanted


@pytest.mark.parametrize("by_tile", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_parts_lie_where_they_are_merged_from(
    monkeypatch: pytest.MonkeyPatch, seed: int, by_tile: bool
) -> None:
    """Where pieces are stored, beside where the merge looks for them: by its own index functions."""
    case = drawn(seed, split=True)
    stored: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    whole = set()
    for item in case.items(monkeypatch):
        tile = (item["head"], item["seq"], item["row"])
        if item["cut"]:
            stored.setdefault(tile, []).append((item["program"], item["place"]))
        else:
            assert tile not in whole
            whole.add(tile)
    places = [place for pieces in stored.values() for _, place in pieces]
    assert len(set(places)) == len(places) and max(places, default=0) < (
        max_parts(case.programs) * case.heads
    )
    merged = []
    work, share = Pointer(case.work), int(case.work[0])
    for program, head in product(
        range(case.tiles if by_tile else case.programs), range(case.heads)
    ):
        for module in (tiles, parts):
            monkeypatch.setattr(module, "tl", language(program, case.programs))
        if by_tile:
            low, high, seq, row = tiles.tile_of.fn(work, program, case.programs, True)
            first, last = low // share, (high - 1) // share
            mine = first < last
        else:
            at, stop, _tile, low, high, seq, row = tiles.my_stretch.fn(work, True)
            first, last = low // share, (high - 1) // share
            mine = at < stop and first < program == last
        if mine:
            begins = tiles.part_at.fn(2 * first, head, case.programs)
            found = [
                (p, parts._following.fn(begins, 0, p - first, 1, True))
                for p in range(first, last + 1)
            ]
            assert sorted(stored[head, seq, row]) == found
            merged.append((head, seq, row))
    assert len(merged) == len(set(merged)) and set(merged) == set(stored)
    assert not set(merged) & whole and set(merged) | whole == set(case.wanted)


def test_some_steps_are_cut_and_others_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above proves something."""
    cut = {item["cut"] for seed in range(8) for item in drawn(seed, split=True).items(monkeypatch)}
    assert cut == {True, False}


@pytest.mark.parametrize("lanes", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "lens", [[4096] * 64, [30000, 21000, 40000], [700, 90, 5000, 5000, 1, 64]], ids=str
)
def test_programs_of_the_same_keys_adjoin(
    monkeypatch: pytest.MonkeyPatch, lanes: int, lens: list[int]
) -> None:
    """Each stretch has one program, and those that read a sequence's keys at a time come in a row."""
    seq, row = rows_of(np.ones(len(lens), np.int64), lanes * 64, 64)
    keys = -(-np.array(lens)[seq] // 64)
    dealt, tiles_in_order = in_lanes(Tiles(seq, row, keys), 132, ROLES_RATES)
    work = dealt.work(tiles_in_order)
    columns = work[4 : 4 + 5 * 132].reshape(5, 132)
    places = []
    for program in range(132):
        monkeypatch.setattr(hopper_items, "gl", language(program, 132))
        places.append(int(hopper_items.side_by_side.fn(Pointer(work), lanes)))
    assert sorted(places) == [*range(132)]
    used = -(-dealt.total // dealt.share)
    for first in range(0, used, lanes):
        mine = np.array(places[first : first + lanes])
        begins = mine * dealt.share - columns[1, mine]
        assert len({*zip(columns[3, mine].tolist(), begins.tolist(), strict=True)}) == 1
        assert columns[4, mine].tolist() == [64 * lane for lane in range(lanes)]
