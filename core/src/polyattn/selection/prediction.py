"""How long will a step take on each candidate? A few features, weighed by measured coefficients.

A time is modelled by six terms, each a cost that one can name: a launch, work items, bytes of
queries and outputs, and what a chip does at the same time: bytes of keys and values, the longest
row, products. These three add up, or where a kernel hides them behind one another, the largest
counts. The coefficients are fitted to measured times (`polyattn tune`); nothing here changes what is
right, only who runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import KINDS, OVERLAPPING, TERMS, TimingModel


class StepShape(NamedTuple):
    """What a prediction knows of a call: sums over its rows, and its longest one."""

    rows: int
    queries: int
    keys: int
    longest: int
    pairs: int


def counts(shape: StepShape) -> tuple[int, ...]:
    """Return what each of `TERMS` counts in a call."""
    return (1, shape.rows, shape.keys, shape.longest, shape.pairs, shape.queries)


def shape_of_decodes(spec: LayerSpec, lens: Sequence[int]) -> StepShape:
    """Return the shape of a call over rows of one query token and so many keys."""
    rows, longest = len(lens), max(lens, default=0)
    seen = _seen(spec, 1)
    if longest > seen:
        lens, longest = [n if n < seen else seen for n in lens], seen
    keys = sum(lens)
    return StepShape(rows, rows, keys, longest, keys)


def shape_of_step(spec: LayerSpec, queries: Sequence[int], lens: Sequence[int]) -> StepShape:
    """Return the shape of a call over rows of so many query tokens and keys."""
    if _seen(spec, 0) < sys.maxsize:
        lens = [min(n, _seen(spec, q)) for q, n in zip(queries, lens, strict=True)]
    keys, longest = sum(lens), max(lens, default=0)
    hidden = 1 if spec.causal else 0
    pairs = sum([q * n - hidden * (q * (q - 1) // 2) for q, n in zip(queries, lens, strict=True)])
    return StepShape(len(lens), sum(queries), keys, longest, pairs)


def _seen(spec: LayerSpec, queries: int) -> int:
    """Return how many keys a row of so many query tokens can see at most."""
    window = spec.sliding_window or spec.chunk_size
    if window is None or not spec.causal:
        return sys.maxsize
    return queries + window - 1 + spec.sink_tokens


Weighed = tuple[str, tuple[float, ...], bool]
"""A backend, what each term weighs for a layer, and whether its terms overlap."""


class Predictor:
    """Predicted microseconds for layers of one spec: each candidate's, by the kind of call."""

    def __init__(self, spec: LayerSpec, models: Iterable[TimingModel]):
        self.spec = spec
        self._weights: dict[str, dict[str, Weighed]] = {kind: {} for kind in KINDS}
        for model in models:
            weighed = (model.backend, model.weights(spec), model.overlap)
            self._weights[model.kind][model.backend] = weighed

    def among(self, kind: str, names: Iterable[str]) -> list[Weighed]:
        """Return those of some backends that have a model for a kind of call."""
        known = self._weights[kind]
        return [known[name] for name in dict.fromkeys(names) if name in known]

    @staticmethod
    def evaluate(candidates: Iterable[Weighed], shape: StepShape) -> dict[str, float]:
        """Return each candidate's microseconds for a call of this shape."""
        rows, queries, keys, longest, pairs = shape
        found = {}
        for name, (launch, item, byte, chain, product, token), overlap in candidates:
            a, b, c = byte * keys, chain * longest, product * pairs
            busy = max(a, b, c) if overlap else a + b + c
            found[name] = launch + item * rows + token * queries + busy
        return found

    def terms(self, kind: str, name: str, shape: StepShape) -> dict[str, float]:
        """Return the microseconds of each term of a prediction, by the names of `TERMS`."""
        _, weights, overlap = self._weights[kind][name]
        found = {
            term: weight * count
            for term, weight, count in zip(TERMS, weights, counts(shape), strict=True)
        }
        if overlap:
            counted = max(OVERLAPPING, key=found.__getitem__)
            found |= {term: 0.0 for term in OVERLAPPING if term != counted}
        return found


def kind_of_step(queries: Sequence[int], longest_short: int) -> str:
    """Return which kind of call rows of so many tokens are."""
    most, least = max(queries, default=1), min(queries, default=1)
    if most <= 1:
        return "decode"
    if most <= longest_short:
        return "short"
    return "mixed" if least <= 1 else "prefill"
