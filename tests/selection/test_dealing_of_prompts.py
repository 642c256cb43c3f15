"""How prompts' tiles are dealt out: by Hopper's own prefill, the portable one, torch, FlashInfer."""

from __future__ import annotations

import math
from heapq import heapreplace

import numpy as np
import pytest
from polyattn import LayerSpec
from polyattn.selection.dealing import APART, EMPTY, ONE_PART, PARTIAL, SPREAD, deal
from polyattn.selection.pieces import BEGIN, turned

PROCESSORS = 132
NO_END = 1 << 60


def blocks(spec: LayerSpec, rows: list[tuple[int, int]], keys: int, beside: int) -> list[int]:
    """Blocks of each tile of 128 (token, head), the most first, and what each costs beside them."""
    group = spec.gqa_ratio
    costs = [
        math.ceil((n - q + min(end, q * group) // group) / keys) + beside
        for q, n in rows
        for end in range(128, q * group + 128, 128)
    ]
    return sorted(costs, reverse=True)


def there_and_back(costs: list[int], heads: int, programs: int = PROCESSORS) -> int:
    """The fullest program's blocks, as `hopper.items` deals: an item of each round, odd rounds turned."""
    loads = [0] * programs
    for at, job in enumerate(cost for cost in costs for _ in range(heads)):
        turn, place = divmod(at, programs)
        loads[programs - 1 - place if turn % 2 else place] += job
    return max(loads)


def fullest(spec: LayerSpec, rows: list[tuple[int, int]], way: str) -> float:
    """Blocks of 128 by 128 of the fullest processor, as a way's pairs count them."""
    queries, lens = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    counts = deal(spec, queries, lens, NO_END)(way, PROCESSORS).exact()
    return counts.pairs * spec.num_heads / (PROCESSORS * 128 * 128)


@pytest.mark.parametrize(
    ("heads", "rows", "free_first", "turning"),
    [
        # On an H200 the steps take 48.6, 38.0 and 43.6 us.
        ((40, 8), [(111, 128)] * 9 + [(111, 1155)], 12, 18),
        ((52, 4), [(60, 60)] * 8 + [(170, 477)], 9, 12),
        ((20, 4), [(76, 76)] * 14 + [(1058, 1058)], 14, 17),
    ],
)
def test_hoppers_prefill_is_dealt_there_and_back(
    heads: tuple[int, int], rows: list[tuple[int, int]], free_first: int, turning: int
) -> None:
    """A program's items are known before: the last round's may be those of the fullest."""
    spec = LayerSpec(num_heads=heads[0], num_kv_heads=heads[1], head_size=128)
    costs = blocks(spec, rows, 128, 2)
    loads = [0] * PROCESSORS
    for cost in costs:
        for _ in range(heads[1]):
            heapreplace(loads, loads[0] + cost)
    assert (max(loads), there_and_back(costs, heads[1])) == (free_first, turning)
    assert fullest(spec, rows, "whole") == pytest.approx(turning, abs=0.01)


def free_first(costs: list[int], programs: int) -> int:
    loads = [0] * programs
    for cost in costs:
        heapreplace(loads, loads[0] + cost)
    return max(loads)


def test_few_heads_at_a_time_are_dealt_by_the_device() -> None:
    """What the L2 doesn't hold is gone through in sections, each from the longest tile on."""
    costs = [40, 30, 20, 10]
    whole = turned(np.array(costs), 6, 4, 4).exact()
    assert whole == there_and_back(costs, 4, 6)
    in_two = turned(np.array(costs), 6, 4, 2).exact()
    assert in_two == free_first([40, 40, 30, 30, 20, 20, 10, 10] * 2, 6)
    assert turned(np.array(costs), 16, 4, 2).exact() == 40
    source = np.random.default_rng(3)
    for at_once in (2, 8):  # more than are dealt out one by one
        some = np.sort(source.integers(3, 60, 200))[::-1]
        section = [cost for cost in some.tolist() for _ in range(at_once)]
        exact = free_first(section * (8 // at_once), PROCESSORS)
        assert turned(some, PROCESSORS, 8, at_once).exact() == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("way", ["whole", "packed"])
def test_a_tile_alone_on_a_processor_takes_less(way: str) -> None:
    """Two programs share a processor, but for a step of fewer tiles than processors.

    Prompts of 1,412 tokens take TRITON_ATTN 25.3 us in 48 tiles, and three of 519 and less, of 236 tiles
    whose longest has a third of the blocks, 24.1 (H200, heads of 64).
    """
    size = 64 if way == "whole" else 80
    few = LayerSpec(num_heads=4, num_kv_heads=4, head_size=size)
    many = LayerSpec(num_heads=16, num_kv_heads=16, head_size=size)
    alone, shared = (fullest(spec, [(600, 600), (590, 590)], way) for spec in (few, many))
    assert alone == pytest.approx(0.65 * shared, rel=0.01)


def test_a_single_prompts_keys_are_packed_by_flashinfer() -> None:
    """Of wide heads the block over pages is low: 972 tokens take 33.5 us, 924 in twelve rows 30.7."""
    for size, part in ((128, 0.83), (256, 0.6)):
        spec = LayerSpec(num_heads=16, num_kv_heads=4, head_size=size)
        costs = [math.ceil(end / 128) + 1 for end in (128, 256, 384, 512)]
        assert fullest(spec, [(512, 512)], "heads") == pytest.approx(part * max(costs), abs=0.01)
    # Another kernel runs it: two prompts of 447 tokens take 21.6 us, one of 443 takes 18.3.
    for rows, kind in (([512], "ragged"), ([512, 9], ""), ([512, 512], "")):
        lens = np.array(rows)
        assert deal(spec, lens, lens, NO_END)("heads", PROCESSORS).exact().kind == kind


PROMPTS = LayerSpec(num_heads=4, num_kv_heads=4, head_size=192, v_head_size=128, cached=False)
"""The heads that latents' prompts run as."""


def test_latents_prompts_have_wide_blocks_in_flash_attention_3() -> None:
    """`tile_size_fwd_sm90`: 128 keys where none lie in pages, 96 where they do.

    On an H200 a prompt of 862 tokens takes 36 us with 8 heads, where 33 were predicted by blocks of 96.
    """
    spec = PROMPTS.replace(num_heads=8, num_kv_heads=8)
    lens = np.array([862])
    paged = deal(spec.replace(cached=True), lens, lens, NO_END)("cut", PROCESSORS).exact()
    counts = deal(spec, lens, lens, NO_END)("cut", PROCESSORS).exact()
    # 7 tiles of up to 7 blocks, which a share of ceil(49 * 8 * 1.1 / 132) = 4 cuts in 2: 4 and 3.
    assert counts.longest == 2 and paged.longest == 2
    assert counts.pairs == (4 + BEGIN + 1) * PROCESSORS * 128 * 128 // 8
    assert paged.pairs == (5 + BEGIN + 1) * PROCESSORS * 128 * 96 // 8  # 9 blocks of 96
    one = np.array([65])  # a block either way
    for cached, keys in ((False, 128), (True, 96)):
        fewest = deal(spec.replace(cached=cached), one, one, NO_END)("cut", PROCESSORS).exact()
        assert fewest.pairs == (1 + BEGIN) * PROCESSORS * 128 * keys // 8


def test_the_last_heads_that_flash_attention_3_takes_in_turn_are_fewer() -> None:
    """`tile_idx_to_work_tile`: of 18 heads 16 go first, of which the L2 holds the keys, then two.

    A prompt of 2,040 tokens takes 79 us on an H200; by nine heads twice 64 are predicted.
    """
    spec = PROMPTS.replace(num_heads=18, num_kv_heads=18)
    tiles = [blocks + BEGIN for blocks in range(16, 0, -1)]

    def busiest(*sections: int) -> int:
        loads = [0] * PROCESSORS
        for tile in [tile for heads in sections for tile in tiles for _ in range(heads)]:
            heapreplace(loads, loads[0] + tile)
        return max(loads)

    assert fullest(spec, [(2040, 2040)], "cut") == busiest(16, 2) > 1.1 * busiest(9, 9)


def test_parts_without_blocks_cost_flash_attention_3_nothing() -> None:
    """A row of 12 parts has tiles of 2 to 13 blocks: 999 tokens of 1/1 heads of 256 take 28 us."""
    spec, lens = LayerSpec(num_heads=1, num_kv_heads=1, head_size=256), np.array([999])
    counts = deal(spec, lens, lens, NO_END)("cut", PROCESSORS).exact()
    parts = [2, 4, 5, 7, 8, 10, 12, 7]  # 13 blocks are six times two, and one
    assert counts.longest == 12
    written = 999 * 12 * sum(parts) // (8 * 12)
    assert counts.queries == 999 + APART * 999 + PARTIAL * (written + 999)


@pytest.mark.parametrize(
    ("rows", "parts", "written"), [([3000, 40], 3, 3000 * 3 * 71 // 73), ([500] * 40, 1, 0)]
)
def test_rows_of_one_part_cost_flash_attention_3_less_than_cut_ones(
    rows: list[int], parts: int, written: int
) -> None:
    """Where it may cut, each token is written in float32, and a cut row's are merged.

    On an H200 five prompts of 328 to 1,922 in 2/1 heads of 256, in two parts, take 70.8 us; with as much
    for each part, uncut rows' too, 65.9 were predicted.
    """
    spec, lens = LayerSpec(num_heads=2, num_kv_heads=2, head_size=256), np.array(rows)
    counts = deal(spec, lens, lens, NO_END)("cut", PROCESSORS).exact()
    tokens, cut = sum(rows), 3000 * (parts > 1)
    assert counts.longest == parts
    merged = PARTIAL * (written + cut)
    assert counts.queries == (1 + APART) * tokens + ONE_PART * (tokens - cut) + merged


@pytest.mark.parametrize(("rows", "doublings"), [(1, 0), (16, 4), (128, 7)])
def test_many_programs_begin_later(rows: int, doublings: int) -> None:
    """TRITON_ATTN's low tiles, of one KV head: 13 rows of 10 tokens take 16.4 us, 18.4 were predicted."""
    spec, queries = LayerSpec(num_heads=4, num_kv_heads=1, head_size=128), np.full(rows, 12)
    counts = deal(spec, queries, queries + 60, NO_END)("whole", PROCESSORS).exact()
    assert counts.rows == pytest.approx(1 + SPREAD * doublings)


def test_a_stretch_of_latents_begins_a_tile_in_a_block() -> None:
    """Other heads' stretches take two for each tile. On an H200 626 tokens in 2 heads take 20.1 us.

    With two they would take as long as 26.2, by the same entry.
    """
    lens = np.array([626])
    blocks_of = {}
    for size in (128, 192):
        spec = PROMPTS.replace(num_heads=2, num_kv_heads=2, v_head_size=size)
        counts = deal(spec, lens, lens, NO_END)("whole", PROCESSORS).exact()
        area = 128 * 64 * (1 - EMPTY * (1 - 626 / 640)) if size == 128 else 128 * 64
        blocks_of[size] = counts.pairs * 2 / PROCESSORS / area
        assert counts.rows > 0
    # Shares of 3 blocks, of two tiles at the most.
    assert blocks_of[128] == pytest.approx(3 + 2 * 1, abs=0.01)
    assert blocks_of[192] == pytest.approx(3 + 2 * 2, abs=0.01)


def test_cut_rows_first_parts_are_dealt_before_their_second_ones() -> None:
    """What the last processor has is a long tile's second part, not a short tile's.

    On an H200 a prompt of 700 tokens in 16/2 heads of 256 takes 53.6 us; tile by tile 43 were predicted.
    """
    spec = LayerSpec(num_heads=16, num_kv_heads=2, head_size=256)
    lens = np.array([700])
    counts = deal(spec, lens, lens, NO_END)("cut", PROCESSORS).exact()
    tiles = [
        math.ceil((700 * 8 if end > 700 * 8 else end) / 8 / 80) for end in range(128, 5760, 128)
    ][::-1]
    parts = [(-(-n // 2), n // 2) if n > 1 else (n,) for n in tiles]
    first, second = (
        [p[0] + 3 if len(p) > 1 else p[0] + 2 for p in parts],
        [p[1] + 3 for p in parts if len(p) > 1],
    )
    assert len(tiles) == 44
    assert (
        counts.pairs == free_first((first + second) * 2, PROCESSORS) * PROCESSORS * 128 * 80 // 16
    )


@pytest.mark.parametrize(("size", "kind"), [(128, "short"), (192, "low")])
def test_the_lowest_tiles_of_latents_are_short_ones(size: int, kind: str) -> None:
    """They have no entry apart: a prompt of 4 tokens in 72 heads takes 9.5 us, 27 by that of prompts."""
    spec, lens = PROMPTS.replace(num_heads=72, num_kv_heads=72, v_head_size=size), np.array([4])
    assert deal(spec, lens, lens, NO_END)("whole", PROCESSORS).exact().kind == kind
