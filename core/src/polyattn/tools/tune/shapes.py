"""Which steps are measured? Random ones of each kind, their lengths distributed as engines see them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyattn.selection.prediction import ABSORBED
from polyattn.spec.layer import LayerSpec
from polyattn.tools.lengths import DISTRIBUTIONS, Lengths


@dataclass(frozen=True)
class Size:
    """The limits of a step: keys of all rows, and query-key pairs of a prefill, both per head."""

    keys: int
    pairs: int
    longest: int
    rows: int = 256


@dataclass(frozen=True)
class StepSample:
    """A step to measure: its kind, how its lengths are distributed, and each row's tokens and keys."""

    kind: str
    lengths: str
    queries: tuple[int, ...]
    lens: tuple[int, ...]


COUNTS = {"decode": 48, "short": 20, "prefill": 20, "chunked": 20, "mixed": 20}
"""Steps of each kind for one layer: what fits six coefficients with a rest to judge them by."""


def counts_of(spec: LayerSpec) -> dict[str, int]:
    """Return the steps of each kind that a layer's backends are measured at."""
    return {k: n for k, n in COUNTS.items() if spec.latent is None or k in ABSORBED}


def samples(
    size: Size, seed: int, traces: Mapping[str, Lengths], counts: Mapping[str, int] = COUNTS
) -> Iterator[StepSample]:
    """Yield steps of all kinds in turn, so that an early stop leaves some of each."""
    source = random.Random(seed)
    makers = {
        "decode": _decode,
        "short": _short,
        "prefill": _prefill,
        "chunked": _chunked,
        "mixed": _mixed,
    }
    distributions = list(({**DISTRIBUTIONS, **traces}).items())
    most, drawn = max(counts.values()), dict.fromkeys(counts, 0)
    for index in range(1, most + 1):
        for kind, count in counts.items():
            if drawn[kind] < index * count // most:
                name, draw = distributions[drawn[kind] % len(distributions)]
                drawn[kind] += 1
                queries, lens = makers[kind](size, draw, source)
                yield StepSample(kind, name, tuple(queries), tuple(lens))


def _log_uniform(source: random.Random, low: float, high: float) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(max(low, high)))))


def _keys(rows: int, size: Size, draw: Lengths, source: random.Random, most: int) -> list[int]:
    """Draw rows' lengths; of a trace as many of them as the keys allow."""
    mean = _log_uniform(source, 64, max(64, min(size.longest, most // rows)))
    lens = [min(n, size.longest) for n in draw(rows, mean, source)]
    while sum(lens) > most and len(lens) > 1:
        lens.pop()
    return [min(n, most) for n in lens]


def _decode(size: Size, draw: Lengths, source: random.Random) -> tuple[list[int], list[int]]:
    lens = _keys(_log_uniform(source, 1, size.rows), size, draw, source, size.keys)
    return [1] * len(lens), lens


def _short(size: Size, draw: Lengths, source: random.Random) -> tuple[list[int], list[int]]:
    """Verification of drafts: all rows alike; or ends of chunked prompts: each its own."""
    lens = _keys(_log_uniform(source, 1, size.rows / 4), size, draw, source, size.keys)
    alike, tokens = source.random() < 0.7, source.randint(2, 16)
    queries = [tokens if alike else source.randint(2, 16) for _ in lens]
    return queries, [max(n, q) for n, q in zip(lens, queries, strict=True)]


def _prefill(size: Size, draw: Lengths, source: random.Random) -> tuple[list[int], list[int]]:
    """Whole prompts, up to the limit of query-key pairs."""
    rows = _log_uniform(source, 1, 16)
    widest = math.sqrt(2 * size.pairs / rows)
    lens = [max(n, 17) for n in _keys(rows, size, draw, source, min(size.keys, int(rows * widest)))]
    queries, _ = _bounded(list(lens), lens, size.pairs)
    return queries, list(queries)


def _chunked(size: Size, draw: Lengths, source: random.Random) -> tuple[list[int], list[int]]:
    """Chunks of prompts, of some behind a context."""
    rows = _log_uniform(source, 1, 16)
    most = min(size.keys, rows * size.longest)
    lens = [max(n, 35) for n in _keys(rows, size, draw, source, most)]
    chunk = min(_log_uniform(source, 32, 2048), max(17, max(lens) // 2))
    queries, bounded = _bounded([min(chunk, n) for n in lens], lens, size.pairs)
    if queries == bounded:
        queries[0] = max(17, bounded[0] // 2)
    return queries, bounded


def _mixed(size: Size, draw: Lengths, source: random.Random) -> tuple[list[int], list[int]]:
    rows = _log_uniform(source, 1, size.rows / 2)
    lens = _keys(rows, size, draw, source, size.keys // 2)
    smaller = Size(size.keys // 2, size.pairs // 2, size.longest)
    rest = _prefill if source.random() < 0.5 else _chunked
    queries, more = rest(smaller, draw, source)
    return [1] * len(lens) + queries, lens + more


def _bounded(queries: list[int], lens: Sequence[int], pairs: int) -> tuple[list[int], list[int]]:
    """Leave rows out until the products fit; one alone gets a shorter query."""
    bounded = list(lens)
    while (
        len(queries) > 1 and sum(q * n for q, n in zip(queries, bounded, strict=True)) > 2 * pairs
    ):
        queries.pop(), bounded.pop()
    queries[0] = max(17, min(queries[0], 2 * pairs // bounded[0]))
    return queries, bounded


def layers(accelerator: bool, quantized: bool = True) -> list[LayerSpec]:
    """Return the layers that are measured: MHA, GQA of 4 and 8, MQA; heads of 128 and 64; fp8 caches."""
    if not accelerator:
        small = ((8, 8), (16, 4), (8, 1))
        return [
            LayerSpec(num_heads=h, num_kv_heads=k, head_size=size)
            for size in (128, 64)
            for h, k in small
        ]
    heads = ((32, 32), (32, 8), (64, 8), (16, 1))
    full = [
        LayerSpec(num_heads=h, num_kv_heads=k, head_size=size)
        for size in (128, 64)
        for h, k in heads
    ]
    eighth = [
        LayerSpec(num_heads=h, num_kv_heads=k, head_size=128, kv_cache_dtype="fp8_e4m3")
        for h, k in ((32, 8), (8, 1))
    ]
    return full + eighth if quantized else full
