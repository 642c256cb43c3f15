"""What does a trial step give? Results beside what they should be."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """A step's results, rows by token, and the float64 reference's."""

    out: Tensor
    expected: Tensor
    lse: Tensor | None = None
    expected_lse: Tensor | None = None
    state: Tensor | None = None
    expected_state: Tensor | None = None
