"""Which sizes does a backend take? As a set that can be asked, shown and searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polyattn.errors import shown
from polyattn.registry.validate import require


@dataclass(frozen=True)
class Sizes:
    """A set of sizes that a backend allows: listed values, or a range of multiples.

    Attributes:
        values: the listed sizes; empty: the range counts.
        low: the smallest size of the range.
        high: the largest; None: no bound.
        multiple: sizes are multiples of it.
        why: the reason, for people.

    Raises:
        ValueError: the fields allow no size.

    Examples:
        >>> 96 in Sizes(multiple=32, high=256), str(Sizes(values=frozenset({64, 128})))
        (True, '64, 128')

    """

    values: frozenset[int] = frozenset()
    low: int = 1
    high: int | None = None
    multiple: int = 1
    why: str = ""

    def __post_init__(self) -> None:
        require(self)

    def problems(self) -> Iterator[str]:
        """Yield why no set of sizes is described."""
        if any(value < 1 for value in self.values):
            yield f"Sizes.values={shown(sorted(self.values))}: sizes are 1 or more"
        if self.multiple < 1:
            yield f"Sizes.multiple={shown(self.multiple)} must be 1 or more"
        if self.low < 0:
            yield f"Sizes.low={shown(self.low)} must not be negative"
        if self.high is not None and self.high < max(self.low, 1):
            yield f"Sizes.high={shown(self.high)} is below low={shown(self.low)}: it allows no size"

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, int):
            return False
        if self.values:
            return size in self.values
        return self.low <= size <= (self.high or size) and size % self.multiple == 0

    def divisor_of(self, size: int) -> int | None:
        """Return the largest allowed size that divides `size`, or None."""
        divisors = (d for d in range(size, 0, -1) if size % d == 0)
        return next((d for d in divisors if d in self), None)

    def examples(self, wanted: Iterable[int]) -> list[int]:
        """Return the listed values, or those of `wanted` that the range allows."""
        return sorted(self.values) if self.values else [size for size in wanted if size in self]

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, sorted(self.values)))
        words = [f"multiples of {self.multiple}"] if self.multiple > 1 else []
        if self.high:
            words.append(f"{self.low} to {self.high}")
        elif self.low > 1:
            words.append(f"{self.low} or more")
        text = ", ".join(words) or "any"
        return f"{text} ({self.why})" if self.why else text


def one_of(*values: int) -> Sizes:
    """Return a set of sizes that allows the listed ones alone.

    Args:
        values: the sizes, at least one.

    Returns:
        The set.

    Raises:
        ValueError: no size is listed, or one is below 1.

    Examples:
        >>> 64 in one_of(64, 128), 96 in one_of(64, 128)
        (True, False)

    """
    if not values:
        raise ValueError("one_of() lists no size; such a backend can serve nothing")
    return Sizes(values=frozenset(values))


def multiples(of: int, low: int | None = None, high: int | None = None) -> Sizes:
    """Return a set of sizes that allows the multiples of a number within bounds.

    Args:
        of: the number.
        low: the smallest size; default: `of`.
        high: the largest size; default: no bound.

    Returns:
        The set.

    Raises:
        ValueError: the bounds allow no size.

    Examples:
        >>> str(multiples(8, high=256)), 20 in multiples(8)
        ('multiples of 8, 8 to 256', False)

    """
    return Sizes(low=of if low is None else low, high=high, multiple=of)


ANY_SIZE = Sizes()
