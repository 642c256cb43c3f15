"""How long will a step take on each candidate? A few features, weighed by measured coefficients.

A time is modelled by six terms, each a cost that one can name: a launch, work items, bytes of
queries and outputs, and what a chip does at the same time: bytes of keys and values, the longest
row, products. These three add up, or where a kernel hides them behind one another, the largest
counts. The coefficients are fitted to measured times (`polyattn tune`); nothing here changes what is
right, only who runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import KINDS, OVERLAPPING, TERMS, TimingModel


@dataclass(frozen=True)
class StepShape:
    """What a prediction knows of a call: sums over its rows, and its longest one."""

    rows: int
    queries: int
    keys: int
    longest: int
    pairs: int


def counts(shape: StepShape) -> tuple[int, ...]:
    """Return what each of `TERMS` counts in a call."""
    return (1, shape.rows, shape.keys, shape.longest, shape.pairs, shape.queries)


def shape_of_step(spec: LayerSpec, queries: Sequence[int], lens: Sequence[int]) -> StepShape:
    """Return the shape of a call over rows of so many query tokens and keys."""
    window = spec.sliding_window or spec.chunk_size
    total = sum(queries)
    if window is not None and spec.causal:
        lens = [
            min(n, q + window - 1 + spec.sink_tokens) for q, n in zip(queries, lens, strict=True)
        ]
    keys, longest = sum(lens), max(lens, default=0)
    if total == len(queries):
        return StepShape(len(lens), total, keys, longest, keys)
    hidden = 1 if spec.causal else 0
    pairs = sum(q * n - hidden * (q * (q - 1) // 2) for q, n in zip(queries, lens, strict=True))
    return StepShape(len(lens), total, keys, longest, pairs)


class Predictor:
    """Predicted microseconds for layers of one spec: each candidate's, by the kind of call."""

    def __init__(self, spec: LayerSpec, models: Iterable[TimingModel]):
        self.spec = spec
        self._weights: dict[str, dict[str, tuple[tuple[float, ...], bool]]] = {k: {} for k in KINDS}
        for model in models:
            self._weights[model.kind][model.backend] = (model.weights(spec), model.overlap)

    def times(self, kind: str, shape: StepShape) -> dict[str, float]:
        """Return each modelled backend's microseconds for a call of this kind and shape."""
        rows, keys, longest, pairs, queries = (
            shape.rows, shape.keys, shape.longest, shape.pairs, shape.queries,
        )  # fmt: skip
        found = {}
        for name, ((launch, item, byte, chain, product, token), overlap) in self._weights[
            kind
        ].items():
            a, b, c = byte * keys, chain * longest, product * pairs
            busy = max(a, b, c) if overlap else a + b + c
            found[name] = launch + item * rows + token * queries + busy
        return found

    def terms(self, kind: str, name: str, shape: StepShape) -> dict[str, float]:
        """Return the microseconds of each term of a prediction, by the names of `TERMS`."""
        weights, overlap = self._weights[kind][name]
        found = {
            term: weight * count
            for term, weight, count in zip(TERMS, weights, counts(shape), strict=True)
        }
        if overlap:
            counted = max(OVERLAPPING, key=found.__getitem__)
            found |= {term: 0.0 for term in OVERLAPPING if term != counted}
        return found

    def knows(self, kind: str, name: str) -> bool:
        """Whether a backend has a model for a kind of call."""
        return name in self._weights[kind]

    def best(self, kind: str, shape: StepShape) -> tuple[str, float] | None:
        """Return the fastest modelled backend and its microseconds; None where there is none."""
        found = self.times(kind, shape)
        if not found:
            return None
        name = min(found, key=found.__getitem__)
        return name, found[name]


def kind_of_step(queries: Sequence[int], longest_short: int = 16) -> str:
    """Return which kind of call rows of so many tokens are."""
    most, least = max(queries, default=1), min(queries, default=1)
    if most <= 1:
        return "decode"
    if most <= longest_short:
        return "short"
    return "mixed" if least <= 1 else "prefill"
