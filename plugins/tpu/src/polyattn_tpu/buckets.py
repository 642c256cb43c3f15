"""Buckets: the shapes that are compiled. Every step is padded to one, and their number is stated here.

XLA compiles a program for each shape. A step's shapes are its tokens, its sequences and its pages, and
each comes from a ladder of a few numbers, so that the most programs a trace can need is their product.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.plugin import BatchError


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The largest step that will come, in query tokens, sequences and pages (or dense keys' pages).

    Tokens come in powers of two, pages in powers of four, sequences as `seqs` alone, except in a step
    of single tokens, which has as many places for sequences as for tokens. Raises `BatchError`.
    """

    tokens: int = 8192
    seqs: int = 256
    pages: int = 16384

    def __post_init__(self) -> None:
        for name in ("tokens", "seqs", "pages"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BatchError(f"Buckets.{name}={value!r} must be a positive integer")

    def of_tokens(self, count: int) -> int:
        """Return the bucket of a step that has rows of several tokens."""
        return _rung("query tokens", count, self.tokens, 16, 2)

    def of_decodes(self, count: int) -> int:
        """Return the bucket of a step of single tokens."""
        return _rung("sequences", count, self.seqs, 8, 2)

    def of_seqs(self, count: int) -> int:
        """Return the places for sequences of a step that has rows of several tokens."""
        return _rung("sequences", count, self.seqs, self.seqs, 2)

    def of_pages(self, count: int) -> int:
        """Return the bucket of all sequences' pages together."""
        return _rung("pages", count, self.pages, 64, 4)

    def programs(self) -> int:
        """Return the most programs that one layer's attention compiles, whatever the trace."""
        prefills = len(_ladder(self.tokens, 16, 2))
        return (prefills + len(_ladder(self.seqs, 8, 2))) * len(_ladder(self.pages, 64, 4))


def _ladder(most: int, least: int, factor: int) -> list[int]:
    rungs = [min(least, most)]
    while rungs[-1] < most:
        rungs.append(min(rungs[-1] * factor, most))
    return rungs


def _rung(what: str, count: int, most: int, least: int, factor: int) -> int:
    for rung in _ladder(most, least, factor):
        if count <= rung:
            return rung
    raise BatchError(
        f"the step has {count} {what}, the buckets end at {most}; plan with larger Buckets"
    )
