"""How long are the sequences of a step? Equal, uniform, Zipf, one long among short, or a trace's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from polyattn.errors import SettingsError, nearest
from polyattn.tools.replay.trace import read_trace

Lengths = Callable[[int, int, random.Random], list[int]]
"""(sequences, their mean length, source) -> the length of each, 1 or more."""


def _constant(count: int, mean: int, source: random.Random) -> list[int]:
    return [mean] * count


def _uniform(count: int, mean: int, source: random.Random) -> list[int]:
    return _shared_out([source.random() for _ in range(count)], mean)


def _zipf(count: int, mean: int, source: random.Random) -> list[int]:
    return _shared_out(source.sample([1 / rank for rank in range(1, count + 1)], count), mean)


def _one_long(count: int, mean: int, source: random.Random) -> list[int]:
    """One sequence holds half of all tokens."""
    weights = [1.0] * count
    weights[source.randrange(count)] = max(1.0, count - 1.0)
    return _shared_out(weights, mean)


def _shared_out(weights: Sequence[float], mean: int) -> list[int]:
    """Give each sequence its share of all tokens, so that distributions compare at equal sums."""
    whole = len(weights) * mean / sum(weights)
    return [max(1, round(weight * whole)) for weight in weights]


DISTRIBUTIONS: dict[str, Lengths] = {
    "constant": _constant,
    "uniform": _uniform,
    "zipf": _zipf,
    "one-long": _one_long,
}


def of_trace(path: str | Path) -> Lengths:
    """Return the lengths that a trace's requests have during their decodes. Raises `TraceError`.

    The requested mean has no effect: a trace has lengths of its own.
    """
    requests = read_trace(path)

    def sample(count: int, mean: int, source: random.Random) -> list[int]:
        picked = [source.choice(requests) for _ in range(count)]
        return [r.prompt + source.randrange(r.output) for r in picked]

    return sample


def lengths_named(text: str) -> Lengths:
    """Return the distribution behind `uniform`, `zipf`, `one-long`, `constant` or `trace:FILE`.

    Raises `SettingsError` with the nearest name, `TraceError`.
    """
    name, colon, path = text.partition(":")
    if name == "trace" and colon and path:
        return of_trace(path)
    if text not in DISTRIBUTIONS:
        raise SettingsError(
            f"lengths {text!r} are unknown{nearest(text, [*DISTRIBUTIONS, 'trace:FILE'])}"
        )
    return DISTRIBUTIONS[text]


def redrawn(rows: Sequence[tuple[int, int]], text: str, seed: int) -> list[tuple[int, int]]:
    """Return (query, keys) of each row with newly drawn keys; a row keeps its query.

    Prompts without context stay such, and are drawn apart from the rest, so that both keep their
    mean. Raises `SettingsError`, `TraceError`.
    """
    draw, source = lengths_named(text), random.Random(seed)
    drawn: list[tuple[int, int]] = []
    for whole, group in groupby(sorted(rows, key=_is_prompt), key=_is_prompt):
        members = list(group)
        mean = max(1, sum(n for _, n in members) // len(members))
        lens = draw(len(members), mean, source)
        for (query, _), n in zip(members, lens, strict=True):
            drawn.append((n, n) if whole else (query, max(query, n)))
    return drawn


def _is_prompt(row: tuple[int, int]) -> bool:
    """Whether all of a row's keys are new."""
    return row[0] == row[1] > 1
