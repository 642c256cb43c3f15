"""What came of many random batches?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from polyattn.conformance.random_batches.compose import Composition

MOST_MESSAGES = 20
"""How many failures are described; all are counted."""


@dataclass
class Tally:
    """How many batches ran, over how many layers, and what was wrong.

    - `spoilt`: how many had a request with NaN or infinities beside sound ones.
    - `worst`: the largest error, as a part of what is allowed; `where` says of which layer.
    """

    batches: int = 0
    layers: int = 0
    spoilt: int = 0
    worst: float = 0.0
    where: str = ""
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def add(
        self, what: str, errors: Tensor, limit: float, made: Composition, again: bool = False
    ) -> None:
        """Count a round's batches, `errors` (batches,) of each; `again`: another look at them."""
        if not again:
            self.batches += made.count
            self.layers += 1
            mixed = Counter(
                np.repeat(np.arange(made.count), np.diff(made.bounds))[made.spoilt].tolist()
            )
            self.spoilt += len(mixed)
        share = float(errors.max()) / limit if len(errors) else 0.0
        if share > self.worst:
            self.worst, self.where = share, what
        for index in (errors > limit).nonzero().flatten().tolist():
            seqs, _ = made.batch(index)
            lengths = list(zip(made.queries[seqs].tolist(), made.lens[seqs].tolist(), strict=True))
            self.fail(
                f"{what}: off by {float(errors[index]):.3g} (allowed {limit:g}), batch {index}, "
                f"(query, length) {lengths}, spoilt {made.spoilt[seqs].tolist()}"
            )

    def fail(self, message: str) -> None:
        """Count a failure; the first messages are kept."""
        self.failed += 1
        if len(self.failures) < MOST_MESSAGES:
            self.failures.append(message)


@dataclass
class Job:
    """What a round is to do: `count` batches drawn from `dice`, counted in `tally`."""

    dice: np.random.Generator
    count: int
    tally: Tally
