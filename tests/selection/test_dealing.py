"""How libraries deal keys out, beside the schedules themselves, a piece at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapreplace
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
from polyattn import LatentSpec, LayerSpec
from polyattn.selection.dealing import BEGIN, LIGHT_BEGIN, SWITCHES, deal, deals_of
from polyattn.selection.prediction import Predictor, shape_of_decodes, shape_of_step
from polyattn.spec.timing import DEALS, TERMS, TimingModel

PROCESSORS = 132
NO_END = 1 << 60
DENSE = LayerSpec(num_heads=28, num_kv_heads=4, head_size=128)
NARROW = LayerSpec(num_heads=36, num_kv_heads=36, head_size=64)


def mla(heads: int) -> LayerSpec:
    return LayerSpec(
        kind="mla", num_heads=heads, head_size=192, v_head_size=128,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip


def busiest(pieces: list[int], processors: int, begin: int = BEGIN) -> int:
    """Blocks of the fullest processor: each gets the next piece when it is free."""
    loads = [0] * processors
    for piece in pieces:
        heapreplace(loads, loads[0] + piece + begin)
    return max(loads)


def tiles_of(group: int, rows: tuple[int, int], block: int = 128) -> list[int]:
    """Blocks of keys that each tile of 128 (token, head) sees; the last token sees all keys."""
    tokens, keys = rows
    lasts = [min(end, tokens * group) - 1 for end in range(128, tokens * group + 128, 128)]
    return [math.ceil((keys - tokens + last // group + 1) / block) for last in lasts]


def flash_attention_3(spec: LayerSpec, rows: list[tuple[int, int]]) -> tuple[list[int], int, bool]:
    """Pieces as `prepare_varlen_num_blocks` and `num_splits_heuristic` of its sources make them.

    And the parts of the longest row, and whether all are merged.
    """
    latents = spec.latent is not None
    group, heads = (spec.num_heads, 1) if latents else (spec.gqa_ratio, spec.num_kv_heads)
    size = 64 if latents else 128
    seen = [
        [math.ceil(n / 64)] * math.ceil(q * group / 64) if latents else tiles_of(group, (q, n))
        for q, n in rows
    ]
    share = math.ceil(sum(len(row) * row[-1] for row in seen) * heads * 11 / 10 / PROCESSORS)
    split = max(map(len, seen)) * heads < 0.8 * PROCESSORS and max(row[-1] for row in seen) > 4
    allowed = 1
    if split:
        blocks = max(row[-1] for row in seen)
        allowed = blocks if latents else num_splits(max(map(len, seen)) * heads, blocks)
    most = max(min(math.ceil(row[-1] / share), allowed) for row in seen)
    pieces = []
    for row, (_, n) in zip(seen, rows, strict=True):
        row_parts = min(math.ceil(math.ceil(n / size) / share), allowed)
        turns = row[::-1]
        if most == 1 and not latents:
            some = heads_at_once(spec, max(row[-1] for row in seen))
            sections = [min(some, heads - first) for first in range(0, heads, some)]
            turns = [blocks for size in sections for blocks in row[::-1] for _ in range(size)]
        in_parts = []
        for blocks in turns:
            parts = min(row_parts, blocks)
            each, more = math.ceil(blocks / parts), int(parts > 1 and not latents)
            if not latents:  # further parts have no blocks
                parts = math.ceil(blocks / each)
            in_parts.append([*[each + more] * (parts - 1), blocks - (parts - 1) * each + more])
        in_turn = [*chain(*in_parts)] if latents else parts_in_turn(in_parts)
        pieces += in_turn * (1 if most == 1 and not latents else heads)
    return pieces, most, split


def parts_in_turn(tiles: list[list[int]]) -> list[int]:
    """Pieces as `tile_idx_to_work_tile` deals a cut row's: all tiles' first ones, then the second."""
    return [piece for turn in zip_longest(*tiles) for piece in turn if piece is not None]


def num_splits(tiles: int, blocks: int) -> int:
    """The parts of a row at the most, as `num_splits_heuristic` has them: the fewest that suffice."""
    waves = [tiles * n / PROCESSORS for n in range(1, min(blocks, PROCESSORS) + 1)]
    good = [n / math.ceil(n) for n in waves]
    return next(n for n, part in enumerate(good, 1) if part >= 0.85 * max(good))


def heads_at_once(spec: LayerSpec, blocks: int) -> int:
    """Heads whose tiles take turns, as `get_nheads_in_l2` has them, of rows of so many blocks."""
    divisor = next((d for d in (1, 2, 4, 8) if spec.gqa_ratio <= d), 16)
    room = (32 << 20) // divisor // (128 * 2 * spec.head_size * 2)
    return min(next((n for n in (16, 8, 4, 2) if blocks * n <= room), 1), spec.num_kv_heads)


def flashinfer_latents(spec: LayerSpec, rows: list[tuple[int, int]]) -> tuple[list[int], int, int]:
    """Pieces as `MLAPlan` of `scheduler.cuh` makes them; the most of a row, and the processors."""
    packed = [q * spec.num_heads for q, _ in rows]
    cluster = 2 if sum(packed) // len(rows) > 64 else 1
    keys = [
        n for (_, n), p in zip(rows, packed, strict=True) for _ in range(-(-p // (64 * cluster)))
    ]
    mean = -(-sum(keys) // (PROCESSORS // cluster))
    few = next((k for most, k in ((8, 32), (16, 64), (32, 128), (64, 192)) if mean <= most), 0)
    limit = few or -(-mean // 256) * 256
    pieces = [-(-min(limit, n - start) // 64) for n in keys for start in range(0, n, limit)]
    return pieces, max(-(-n // limit) for n in keys), PROCESSORS // cluster


def steps(
    seed: int, most: int, queries: tuple[int, int] = (1, 1)
) -> Iterator[list[tuple[int, int]]]:
    source = random.Random(seed)
    for _ in range(150):
        count, mean = source.randint(1, most), math.exp(source.uniform(4, 9))
        alike = source.random() < 0.5
        q = source.randint(*queries)
        yield [(q, q + int(mean * (1 if alike else source.uniform(0.1, 3)))) for _ in range(count)]


def dealt(name: str, spec: LayerSpec, rows: list[tuple[int, int]]) -> tuple[float, int]:
    """The fullest processor's blocks, and what is merged."""
    q, n = np.array(rows).T
    counts = deal(spec, q, n, NO_END)(name, PROCESSORS).exact()
    size = 64 if spec.latent else 128
    assert name == "heads" or (counts.rows > 0) == (counts.longest > 0)
    return counts.pairs * spec.num_heads / PROCESSORS / size**2, counts.longest


@pytest.mark.parametrize(
    ("spec", "queries"),
    [(mla(16), (1, 1)), (mla(128), (1, 1)), (mla(20), (2, 9)), (DENSE, (17, 90))],
    ids=["16", "128", "drafts", "chunks"],
)
def test_cuts_are_flash_attentions(spec: LayerSpec, queries: tuple[int, int]) -> None:
    for rows in steps(3, 130 if spec.latent else 50, queries):
        pieces, most, split = flash_attention_3(spec, rows)
        span, merged = dealt("cut", spec, rows)
        assert span == pytest.approx(busiest(pieces, PROCESSORS), abs=0.1)
        if spec.latent:
            assert merged == (max(2, most) + len(pieces) // 4 if split else 0)
        else:
            assert merged == (most if split else 0)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_pages_are_flashinfers(heads: int) -> None:
    spec, cut = mla(heads), 0
    for rows in steps(5, 130):
        pieces, most, processors = flashinfer_latents(spec, rows)
        span, merged = dealt("pages", spec, rows)
        assert span == pytest.approx(busiest(pieces, processors), abs=0.1)
        assert merged >= most if most > 1 else not merged
        cut += most > 1
    assert 0 < cut < 150


def flashmla(blocks: list[int], programs: int) -> tuple[list[list[int]], list[int]]:
    """Blocks of each program's pieces, and each row's parts, as `get_mla_metadata_kernel` makes them."""
    share = math.ceil(sum(n + 5 for n in blocks) / programs) + 5
    left, parts, row, made = list(blocks), [1] * len(blocks), 0, []
    for _ in range(programs):
        room, mine = share, []
        while row < len(left) and room >= left[row] + 5:
            mine.append(left[row])
            room, row = room - left[row] - 5, row + 1
        if row < len(left) and room > 5:
            mine.append(room - 5)
            left[row], parts[row] = left[row] - room + 5, parts[row] + 1
        made.append(mine)
    assert row == len(left)
    return made, parts


def test_padded_shares_are_flashmlas() -> None:
    """A program takes rows in turn up to its share; a piece is known to cost eight blocks, not five."""
    for heads, queries in ((16, (1, 1)), (128, (1, 1)), (64, (1, 4))):
        for rows in steps(9, 130, queries):
            tiles = max(math.ceil(q * heads / 64) for q, _ in rows)
            made, parts = flashmla([math.ceil(n / 64) for _, n in rows], PROCESSORS // tiles)
            span, merged = dealt("padded", mla(heads), rows)
            assert span == pytest.approx(max(sum(n + 8 for n in mine) for mine in made), abs=0.1)
            cuts = sum(parts) - len(parts)
            assert merged == (max(parts) + cuts // 4 if cuts else 0)
    ragged, all_long = [(1, 3000), (5, 3000)] * 30, [(5, 3000)] * 60
    assert dealt("padded", mla(16), ragged) == dealt("padded", mla(16), all_long)


def test_flashinfers_programs_merge_four_rows_at_a_time() -> None:
    """One row's parts wait for one another; of many rows each has few. As `merge_packed_offset_*` say."""
    for heads, keys, waits in ((20, [30_000], 118), (20, [3000] * 10, 12), (128, [3000] * 10, 18)):
        span, merged = dealt("pages", mla(heads), [(1, n) for n in keys])
        limit = 64 * (round(span) - 2)
        programs = max(keys[0] * (1 if heads <= 64 else 2) // limit, 1)
        rows = math.ceil(min(heads, 128) / programs)
        assert merged == math.ceil(rows / 4) * math.ceil(keys[0] / limit) == waits


def test_many_pieces_are_not_dealt_one_by_one() -> None:
    """They end about when the exact ones do, short and long ones, whichever come first."""
    latents = [[(16, 2000), (16, 300)] * 900, [(16, 20_000)] * 9 + [(16, 300)] * 900]
    for rows in latents:
        pieces, _, _ = flash_attention_3(mla(128), rows)
        span, _ = dealt("cut", mla(128), rows)
        assert span == pytest.approx(busiest(pieces, PROCESSORS), rel=0.02)
    source = random.Random(4)
    for keys in (4000, 40_000):
        rows = [(q, q + source.randint(50, keys)) for q in source.choices(range(17, 300), k=200)]
        pieces, _, _ = flash_attention_3(DENSE, rows)
        assert dealt("cut", DENSE, rows)[0] == pytest.approx(busiest(pieces, PROCESSORS), rel=0.02)
        longest = sorted(rows, key=lambda row: row[1])[::-1]
        pieces = [b for row in longest for b in tiles_of(1, row, 96)[::-1]] * 28
        expected = busiest(pieces, PROCESSORS, LIGHT_BEGIN) * 96 / 128
        assert dealt("heads", DENSE, rows)[0] == pytest.approx(expected, rel=0.02)


def test_shares_grow_until_short_tiles_fit() -> None:
    """Of many short rows the end is an estimate: within a block of the share, the search didn't end."""
    rows = [(1, 120_000), *[(1, 64)] * 1964, *[(1, 128)] * 3]
    span, merged = dealt("even", mla(16), rows)
    share = sum(n // 64 + 1 for _, n in rows) / (2 * PROCESSORS)
    assert share <= 2 * span <= 1.1 * share + 2
    assert merged


def test_heads_have_tiles_of_their_own() -> None:
    """40 tokens of 28 heads are 28 tiles a row, where a group of 7 packs them into three a KV head.

    They are dealt out head by head, the longest rows first, and of a row the last tiles.
    """
    alike, ragged = [(40, 441)] * 10, [(40, 441), (300, 2000), (150, 150), (200, 1000)] * 3
    for rows in (alike, ragged):
        span, _ = dealt("heads", DENSE, rows)
        longest = sorted(rows, key=lambda row: -row[1])
        pieces = [b for row in longest for b in tiles_of(1, row, 96)[::-1]] * 28
        expected = busiest(pieces, PROCESSORS, LIGHT_BEGIN) * 96 / 128
        assert span == pytest.approx(expected, abs=0.1)
    alone, _ = dealt("heads", DENSE, [(900, 900)])  # whose keys lie packed
    pieces = tiles_of(1, (900, 900))[::-1] * 28
    assert alone == pytest.approx(0.83 * busiest(pieces, PROCESSORS, LIGHT_BEGIN), abs=0.1)
    assert dealt("cut", DENSE, alike)[0] < dealt("heads", DENSE, alike)[0]


@pytest.mark.parametrize(
    ("tokens", "height", "weight", "beside"),
    [(2, 16, 0.6, 192), (4, 64, 1, 64), (12, 128, 1.75, 64)],
)
def test_short_rows_are_packed(tokens: int, height: int, weight: float, beside: int) -> None:
    """FlashInfer's `PrefillSplitQOKVIndptr`: the shortest pieces of which two fit on a processor."""
    for keys in ((3000, 200, 900), (130, 50, 90), (60_000, 5000, 11)):
        rows = [(tokens, n + tokens) for n in keys] * 2
        tiles = math.ceil(tokens * 7 / height)
        room, pages = 2 * PROCESSORS // 4, [math.ceil(n / 16) for _, n in rows]
        limit = next(
            c for c in range(8, 1 << 20)
            if c >= max(pages) or sum(tiles * math.ceil(p / c) for p in pages) <= room
        )  # fmt: skip
        span, merged = dealt("heads", DENSE, rows)
        parts = math.ceil(max(pages) / limit)
        assert merged == (parts if parts > 1 else 0)
        pieces = sum(tiles * math.ceil(p / limit) for p in pages) * 4
        alone = 1 if pieces <= PROCESSORS else 2
        block = 64 if height == 128 else 128
        blocks = math.ceil(min(limit, max(pages)) * 16 / block)
        expected = (blocks * block + beside) * alone * weight * 64 / 128**2
        assert span == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "high", "block"), [(64, 192, 128), (192, 128, 96), (256, 128, 80)]
)
def test_tiles_are_as_high_as_a_head_size_has_them(size: int, high: int, block: int) -> None:
    spec = LayerSpec(num_heads=16, num_kv_heads=16, head_size=size)
    q, n = np.array([200] * 40), np.array([200] * 40)
    counts = deal(spec, q, n, NO_END)("cut", PROCESSORS).exact()
    lasts = [min(end, 200) for end in range(high, 200 + high, high)]
    pieces = [math.ceil(last / block) for last in lasts[::-1]] * 16 * 40
    expected = busiest(pieces, PROCESSORS)
    assert counts.pairs * 16 / PROCESSORS / high / block == pytest.approx(expected, rel=0.06)
    few = deal(spec, q[:3] // 50, n[:3], NO_END)("cut", PROCESSORS)
    rows, block = (64, 192) if size == 64 else (128, block)
    assert few.pairs * 16 / PROCESSORS / rows / block == pytest.approx(
        math.ceil(200 / block) + BEGIN, abs=0.1
    )


@pytest.mark.parametrize(("tokens", "high"), [(2, 16), (4, 32), (9, 64)])
def test_a_low_tiles_block_costs_by_its_rows_if_heads_are_wide(tokens: int, high: int) -> None:
    """Half of it does; of heads up to 128 it costs as much as one of 64 rows."""
    q, n = np.array([tokens] * 50), np.array([900] * 50)  # more programs than processors
    for size, rows in ((64, 64), (256, (64 + high) / 2)):
        spec = DENSE.replace(head_size=size, v_head_size=size)
        counts = deal(spec, q, n, NO_END)("whole", PROCESSORS)
        length = counts.pairs * spec.num_heads / PROCESSORS / 64 / rows
        assert length == pytest.approx(round(length), abs=1e-3)


@pytest.mark.parametrize("way", ["whole", "cut"])
def test_a_kernel_has_one_models_coefficients_in_all_kinds_of_steps(way: str) -> None:
    """Low tiles of chunks are timed as short rows are, tall tiles of short rows as chunks are.

    TRITON_ATTN's lowest tiles are timed as none of both.
    """
    weights: Any = (9.0, 0.1, 1e-7, 1e-5, 3e-9, 1e-7)
    short, chunked, low = (
        TimingModel("A", kind, tuple(by * w for w in weights), deal=way, processors=PROCESSORS)
        for kind, by in (("short", 2), ("chunked", 3), ("low", 1))
    )
    both, alone = Predictor(DENSE, [short, chunked, low]), Predictor(DENSE, [chunked])
    steps = {("chunked", "short"): ([9] * 4, [400] * 4), ("short", "chunked"): ([16] * 9, [90_000] * 9),
             ("chunked", "chunked"): ([60], [400]), ("short", "short"): ([3], [400])}  # fmt: skip
    if way == "whole":
        steps["short", "low"] = [2], [400]
    for (kind, whose), (q, n) in steps.items():
        shape = both.shape(kind, q, n)
        (mine,) = both.among(kind, ["A"])
        other = both.among(whose, ["A"])[0]
        assert mine.us(shape) == other.us(shape) >= mine.floor(shape)
        assert mine.us(shape) == pytest.approx(sum(both.terms(kind, "A", shape).values()))
        model = {"short": short, "chunked": chunked, "low": low}[whose]
        only = Predictor(DENSE, [replace(model, kind=kind)])
        assert mine.us(shape) == only.among(kind, ["A"])[0].us(only.shape(kind, q, n))
    q, n = steps["chunked", "short"]
    shape = alone.shape("chunked", q, n)
    assert alone.among("chunked", ["A"])[0].us(shape) > both.among("chunked", ["A"])[0].us(shape)


DRAWN = {"short": (2, 16), "prefill": (17, 900), "chunked": (17, 900)}
CAPPED = LayerSpec(num_heads=16, num_kv_heads=8, head_size=256, logit_soft_cap=50.0)
BOUNDED = [
    DENSE, DENSE.replace(sliding_window=300), DENSE.replace(kv_cache_dtype="float8_e4m3fn"),
    DENSE.replace(causal=False), NARROW, NARROW.replace(num_kv_heads=6, sliding_window=300),
    CAPPED, CAPPED.replace(num_heads=32, sliding_window=300), mla(16), mla(128),
]  # fmt: skip


def floors(spec: LayerSpec, kind: str, way: str) -> Predictor:
    """Backends whose times are pairs alone, tokens alone, and both; other kernels cost half of it."""
    weights: Any = {"P": (0, 0, 0, 0, 1e-6, 0), "T": (0, 0, 0, 0, 0, 1e-3), "B": (9, 1, 1, 1, 1, 1)}
    return Predictor(
        spec,
        [
            TimingModel(
                name + str(overlap), of, tuple(w * (1 if of == kind else 0.5) for w in some),
                overlap, deal=way, processors=PROCESSORS,
            )
            for of in {kind, *SWITCHES.get(way, ())}
            for name, some in weights.items()
            for overlap in (False, True)
        ],
    )  # fmt: skip


@pytest.mark.parametrize("spec", BOUNDED)
def test_bounds_of_a_step_hold(spec: LayerSpec) -> None:
    """What a way's pairs are at the least, and at the most, and what its time is at the least."""
    kinds = {"decode": (1, 1), "short": (2, 16)} if spec.latent else DRAWN | {"dealt": (1, 1)}
    for kind, queries in kinds.items():
        apart = 0
        for way in deals_of(spec, kind):
            predictor = floors(spec, kind, way)
            among = predictor.among(kind, ["PFalse", "PTrue", "TFalse", "BFalse", "BTrue"])
            for rows in steps(11, 40, queries):
                if kind not in ("short", "dealt") and random.Random(len(rows)).random() < 0.5:
                    rows = [(q + i % 7, n + i % 7) for i, (q, n) in enumerate(rows)]
                q, n = zip(*rows, strict=True)
                shape = predictor.shape(kind, q, q if kind == "prefill" else n)
                low, high = shape.dealt.between(way)
                exact = shape.dealt[way]
                assert low.pairs <= exact.pairs <= high.pairs
                assert exact.queries >= shape.queries
                assert exact._replace(pairs=0) == low._replace(pairs=0)
                for weighed in among:
                    assert weighed.floor(shape) <= weighed.us(shape)
                apart += low.pairs < high.pairs
        assert spec.latent or apart


@pytest.mark.parametrize("spec", [DENSE, NARROW, DENSE.replace(sliding_window=300)])
def test_single_tokens_beside_chunks_keep_to_bounds(spec: LayerSpec) -> None:
    for way in deals_of(spec, "chunked"):
        predictor = floors(spec, "chunked", way)
        for rows in steps(3, 20, (17, 900)):
            q, n = zip(*rows, *[(1, 50 * i) for i in range(1, len(rows) % 9)], strict=True)
            shape = predictor.shape("mixed", q, n)
            for weighed in predictor.among("mixed", ["PFalse", "TFalse", "BFalse", "BTrue"]):
                assert weighed.floor(shape) <= weighed.us(shape)


def test_who_is_the_fastest_is_known_from_bounds() -> None:
    """Candidates are compared by bounds first; the exact times are no others, ties included."""
    weights: Any = dict(zip(TERMS, (9.0, 0.1, 1e-7, 1e-5, 3e-9, 1e-7), strict=True))
    source, chosen = random.Random(2), set()
    for kind, queries in DRAWN.items():
        for rows in steps(7, 12, queries):
            models = [
                TimingModel(
                    way.upper(), kind,
                    tuple(w * source.uniform(0.8, 1.2) for w in weights.values()),
                    overlap=source.random() < 0.5, margin=source.choice((0.0, 0.05)),
                    host=source.choice((0.0, 40.0)), deal=way, processors=PROCESSORS,
                )
                for way in deals_of(DENSE, kind)
            ]  # fmt: skip
            plain = TimingModel("PLAIN", kind, tuple(1.5 * w for w in weights.values()))
            predictor = Predictor(DENSE, [*models, plain])
            among = predictor.among(kind, [m.backend for m in [plain, *models]])
            q, n = zip(*rows, strict=True)
            shape = predictor.shape(kind, q, n)
            times = {w.name: max(w.us(shape) * w.factor, w.host_us(shape)) for w in among}
            best = min(times, key=times.__getitem__)
            fresh = predictor.shape(kind, q, n)
            assert predictor.fastest(among, fresh) == best
            assert predictor.fastest(among, fresh, times[best]) == ""
            chosen.add(best)
    assert len(chosen) == 6


def test_a_step_without_keys_is_dealt() -> None:
    spec, deals = mla(16), dict.fromkeys(deals_of(mla(16), "decode"), PROCESSORS)
    for none in ([], [0, 0]):
        assert shape_of_step(spec, none, none, deals=deals).dealt.keys() == deals.keys()
    assert shape_of_decodes(spec, [], deals=deals).dealt.keys() == deals.keys()
    assert {name for s in (spec, DENSE) for name in deals_of(s, "chunked")} == set(DEALS)
    assert deals_of(DENSE, "decode") == deals_of(DENSE, "mixed") == ()


WINDOWED = {64: (192, 160), 96: (192, 128), 128: (128, 128), 192: (128, 96), 256: (128, 64)}
"""`tile_size_fwd_sm90` of local layers: rows and keys of a tile, by head size."""


def flash_attention_3_windowed(
    spec: LayerSpec, rows: list[tuple[int, int]]
) -> tuple[list[int], int, bool]:
    """Pieces as its sources make them where a window hides keys, the most parts, and if any is merged.

    `prepare_varlen_num_blocks`, `get_num_splits`, and `get_n_block_min_max` of each tile.
    """
    assert spec.sliding_window is not None
    high, block = WINDOWED[spec.head_size]
    group, heads, left = spec.gqa_ratio, spec.num_kv_heads, spec.sliding_window - 1
    tiles = [math.ceil(q * group / high) for q, _ in rows]
    blocks = [math.ceil(n / block) for _, n in rows]
    share = math.ceil(sum(map(int.__mul__, tiles, blocks)) * heads * 11 / 10 / PROCESSORS)
    loaded = math.ceil(min(max(n for _, n in rows), left + 1 + high) / block)
    most = 1
    if split := max(tiles) * heads < 0.8 * PROCESSORS and loaded > 4:
        most = num_splits(max(tiles) * heads, loaded)
    parts = [min(math.ceil(n / share), most) for n in blocks]
    pieces = []
    for (q, n), of_row, count in zip(rows, parts, tiles, strict=True):
        tiles_parts = []
        for tile in reversed(range(count)):
            begin = max(0, tile * high // group + n - q - left)
            end = min(n, ((tile + 1) * high - 1) // group + 1 + n - q)
            seen = max(1, math.ceil((end - begin) / block))
            few = min(of_row, seen)
            each, more = math.ceil(seen / few), int(few > 1)
            few = math.ceil(seen / each)  # further parts have no blocks
            tiles_parts.append([*[each + more] * (few - 1), seen - (few - 1) * each + more])
        pieces += parts_in_turn(tiles_parts) * heads
    return pieces, max(parts), split


@pytest.mark.parametrize(("size", "window"), [(64, 700), (96, 2047), (128, 4096), (256, 512)])
def test_cuts_of_windows_are_flash_attentions(size: int, window: int) -> None:
    spec = LayerSpec(num_heads=24, num_kv_heads=8, head_size=size, sliding_window=window)
    cuts = 0
    for rows in steps(size, 4, (17, 300)):
        q, n = np.array(rows).T
        if n.max() <= window:
            continue
        pieces, most, split = flash_attention_3_windowed(spec, rows)
        counts = deal(spec, q, n, window - 1)("cut", PROCESSORS).exact()
        assert counts.kind == "windowed" and counts.longest == (most if split else 0)
        if most > 1 or len(pieces) <= PROCESSORS:  # else heads take turns
            span = counts.pairs * 24 / PROCESSORS / math.prod(WINDOWED[size])
            assert span == pytest.approx(busiest(pieces, PROCESSORS), abs=0.1)
            cuts += most > 1
    assert cuts > 10


def test_windowed_tiles_of_flashinfer_are_dealt_out_as_if_they_saw_all() -> None:
    """`PrefillSM90Plan` knows no windows; the kernel skips what they hide, but for a block.

    `get_swa_begin_kv_tile_idx` begins one before the first key that a tile's first token sees. The masks
    that a window takes cost one more over pages: five tiles of 57 behind a window of 256 take an H200 25
    us, where the blocks that they read say 22.
    """
    spec, window, ratios = DENSE.replace(sliding_window=1000), 1000, []
    for rows in steps(5, 3, (17, 600)):
        q, n = np.array(rows).T
        if n.max() <= window or sum(math.ceil(t / 128) for t, _ in rows) * 28 > 1056:
            continue
        loads, busy = [(0, i) for i in range(PROCESSORS)], [0] * PROCESSORS
        order = sorted(range(len(rows)), key=lambda i: n[i], reverse=True)
        if len(set(n.tolist())) < len(n):
            continue  # whichever of equal lengths is the first
        for row in [i for _ in range(28) for i in order]:
            for tile in reversed(range(math.ceil(q[row] / 128))):
                end = min(n[row], n[row] - q[row] + (tile + 1) * 128)
                begin = max(0, (n[row] - q[row] + tile * 128 - (window - 1)) // 96 - 1)
                load, which = loads[0]
                busy[which] += math.ceil(end / 96) - max(0, begin - 1) + LIGHT_BEGIN
                heapreplace(loads, (load + 2 * 128 + math.ceil(end / 16) * 16, which))
        counts = deal(spec, q, n, window - 1)("heads", PROCESSORS)
        span = counts.exact().pairs * 28 / PROCESSORS / 128 / 96
        assert span == pytest.approx(max(busy), rel=0.02, abs=1)
        assert counts.pairs <= counts.exact().pairs <= counts.most
        ratios.append(max(busy) / (sum(busy) / PROCESSORS))
    assert len(ratios) > 20 and max(ratios) > 1.2


def test_rows_over_eight_bits_are_packed_by_flashinfer() -> None:
    spec = DENSE.replace(kv_cache_dtype="fp8_e4m3")
    q, n = np.array([300]), np.array([40_000])
    counts = deal(spec, q, n, NO_END)("heads", PROCESSORS)
    # 17 tiles of 128 (token, head) rows for each of 4 KV heads, two programs on a processor: cut.
    assert counts.longest > 1 and counts.rows > 0
    assert deal(DENSE, q, n, NO_END)("heads", PROCESSORS).rows == 0
    # A prompt's tiles, uncut, see no more than what comes before them.
    q = n = np.array([9000])
    fresh = deal(spec, q, n, NO_END)("heads", PROCESSORS).exact()
    assert fresh.rows == 0
    below = 9000 * 9001 // 2 * 1.75 / 2  # the time of 128 rows, as of 64
    assert below <= fresh.pairs < 1.1 * below


def test_a_window_that_hides_nothing_counts_for_nothing() -> None:
    """Nor does FlashAttention-3 run its kernel for windows then."""
    spec = DENSE.replace(sliding_window=1000)
    for name in deals_of(DENSE, "chunked"):
        every, some = (
            shape_of_step(layer, [64, 30], [1000, 400], deals={name: PROCESSORS}).dealt[name]
            for layer in (DENSE, spec)
        )
        assert every == some
        assert shape_of_step(spec, [64], [1001], deals={name: PROCESSORS}).dealt[name] != some


def test_a_model_that_deals_takes_what_its_terms_add_up_to() -> None:
    spec, rows = mla(32), ([3] * 20, [4000] * 20)
    weights: Any = dict(zip(TERMS, (9.0, 7.0, 1e-7, 1e-4, 2e-9, 1e-6), strict=True))
    for overlap in (False, True):
        for name in deals_of(spec, "short"):
            model = TimingModel(
                "A", "short", tuple(weights.values()), overlap, deal=name, processors=PROCESSORS
            )
            predictor = Predictor(spec, [model])
            shape = predictor.shape("short", *rows)
            terms = predictor.terms("short", "A", shape)
            us = predictor.evaluate(predictor.among("short", ["A"]), shape)["A"]
            assert sum(terms.values()) == pytest.approx(us)
            assert terms["launch"] == 9 and terms["item"] in (0, 7)
            assert shape.dealt.keys() == {name}
