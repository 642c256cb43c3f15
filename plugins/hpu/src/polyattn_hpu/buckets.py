"""Which steps share a graph: sizes are rounded up to few values, which name a step's graph.

A graph of static shapes is compiled once for each (phase, query length, shared blocks, unique
blocks, logits); rounding trades padded work for the number of such graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SLICE = 512
"""Queries of one slice of the causal part; Unified Attention's own choice on Gaudi."""


class Bucket(NamedTuple):
    """One graph. `phase`: "csu" with "-" for each part (causal, shared, unique) that is absent.

    `query` tokens, `shared` and `unique` blocks, `logits`: rows that the sampler reads, at most one
    a sequence, so as many sequences as the graph takes. `keys`: how many of the step's own keys the
    causal part holds against every query; 0 where a slice needs only those up to its own end.
    `contiguous`: the unique blocks are a slice of the cache.
    """

    phase: str
    query: int
    shared: int
    unique: int
    logits: int
    keys: int = 0
    contiguous: bool = False

    @property
    def own_rows(self) -> int:
        """Rows of the step's own keys and values that the causal part takes."""
        return self.keys or self.query

    def products(self, block_size: int) -> int:
        """Return how many (query token, key) products of one head the graph computes."""
        causal = 0
        if self.phase[0] == "c":
            for start in range(0, self.query, SLICE):
                stop = min(start + SLICE, self.query)
                causal += (stop - start) * (self.keys or stop)
        return causal + (self.query * self.shared + self.unique) * block_size


def phase(causal: bool, shared: bool, unique: bool) -> str:
    """Return one of the eight phase strings, "---" to "csu"."""
    present = zip("csu", (causal, shared, unique), strict=True)
    return "".join(letter if there else "-" for letter, there in present)


@dataclass(frozen=True)
class Rounding:
    """Rounds a size up to `steps` to `2 * steps - 1` times a power of two.

    `steps`, a power of two, is the number of sizes between a power of two and the next. A size grows
    by less than one part in `steps`. 0 disables rounding.
    """

    steps: int = 4

    def __call__(self, size: int) -> int:
        if self.steps == 0:
            return size
        unit = 1 << max(0, size.bit_length() - self.steps.bit_length())
        return -(-size // unit) * unit


EXACT = Rounding(steps=0)
"""No rounding: each step's shapes have their own graph, without padding."""
