"""Which tiles have the programs of Hopper's own prefill, and which keys do these see?"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import numpy as np
from polyattn import LayerSpec
from polyattn_triton import hopper_items
from polyattn_triton.schedule import key_tiles, rows_of


class Pointer:
    """What `gl.load` takes: an array and where in it."""

    def __init__(self, array: Any, at: int = 0):
        self.array, self.at = array, at

    def __add__(self, by: int) -> Pointer:
        return Pointer(self.array, self.at + int(by))


def language(program: int, programs: int) -> SimpleNamespace:
    """Gluon's functions of scalars, for one program."""

    def load(pointer: Pointer, mask: bool = True, other: int = 0) -> int:
        assert 0 <= pointer.at < len(pointer.array) or not mask
        return int(pointer.array[pointer.at]) if mask else other

    return SimpleNamespace(
        program_id=lambda axis: program, num_programs=lambda axis: programs,
        load=load, minimum=min, maximum=max, where=lambda c, a, b: a if c else b,
        cdiv=lambda a, b: -(-a // b),
    )  # fmt: skip


def items_of(
    monkeypatch: pytest.MonkeyPatch, work: Any, tiles: int, heads: int, at_once: int,
    programs: int, height: int, queries: list[int], lens: list[int], group: int, window: int,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Run the kernel's own index functions: head, sequence, row, then what `bounds` tells."""
    starts = np.concatenate([[0], np.cumsum(queries)])
    begin, advance, bounds = (
        getattr(hopper_items, name).fn for name in ("begin", "advance", "bounds")
    )
    monkeypatch.setattr(hopper_items, "job_at", hopper_items.job_at.fn)
    found = []
    for program in range(programs):
        monkeypatch.setattr(hopper_items, "gl", language(program, programs))
        work_at = Pointer(work)
        at, stop, rounds, seq, row, head = begin(work_at, tiles, at_once, heads)
        while at < stop:
            token0, query_len, length, *rest = bounds(
                Pointer(lens), Pointer(starts), seq, row, group, height, 128, window
            )
            assert (token0, query_len, length) == (starts[seq], queries[seq], lens[seq])
            found.append((head, seq, row, *rest))
            at, rounds, seq, row, head = advance(work_at, tiles, at_once, rounds)
    return found


@pytest.mark.parametrize("window", [0, 200, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_every_key_of_every_row_has_one_program(
    monkeypatch: pytest.MonkeyPatch, seed: int, window: int
) -> None:
    chance = random.Random(seed)
    group, heads = chance.choice([(4, 8), (7, 4), (1, 3), (8, 1)])
    queries = [chance.choice([0, 1, 17, 128, 300, 1500]) for _ in range(chance.randint(1, 6))]
    queries[0] = max(queries[0], 1)
    lens = [q + chance.choice([0, 0, 5, 128, 2000]) for q in queries]
    spec = LayerSpec(num_heads=group * heads, num_kv_heads=heads, head_size=128)
    if window:
        spec = spec.replace(sliding_window=window)
    q, n = np.array(queries), np.array(lens)
    height, at_once = 128, chance.choice([1, heads])
    seq, row = rows_of(q, group, height)
    last = np.minimum(row + height, q[seq] * group) - 1
    context = (n - q)[seq]
    keys = key_tiles(spec, context + row // group, context + last // group, n[seq], 128)
    lows = (
        np.maximum(context + row // group - window + 1, 0) // 128 if window else np.zeros_like(keys)
    )
    order = np.argsort(-keys, kind="stable")
    work = np.concatenate([seq[order], row[order]])
    found = items_of(
        monkeypatch, work, len(seq), heads, at_once, min(132, len(seq) * heads), height,
        queries, lens, group, window,
    )  # fmt: skip
    seen: dict[tuple[int, int, int], list[int]] = {}
    for head, s, r, first, count, full_low, full in found:
        seen.setdefault((head, s, r), []).extend(range(first, first + count))
        # In [full_low, full) every row sees every key.
        context_s = lens[s] - queries[s]
        last_row = context_s + (min(r + height, queries[s] * group) - 1) // group
        for tile in range(full_low, full):
            assert first <= tile < first + count
            assert (tile + 1) * 128 <= context_s + r // group + 1
            assert not window or tile * 128 > last_row - window
    wanted = {
        (head, int(s), int(r)): list(range(int(low), int(low + k)))
        for head in range(heads)
        for s, r, k, low in zip(seq, row, keys, lows, strict=True)
    }
    assert seen == wanted
