"""How far is a backend proven? Not by its word: by the records of the kit's results that its claims have.

`data/proofs.json` is made of the repository's result files by `benchmarks/proofs.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

OWN = "polyattn"
"""What the packages of the backends begin with that the records are of."""

HOST = "x86_64"
"""The architecture whose records are those of the platform `"cpu"`."""


@dataclass(frozen=True)
class Record:
    """Results of a backend's kit on one architecture.

    - `where`: the architecture. `build`: which of a backend's builds ran; "" where there is but one.
    - `runs`: which instruction set ran; "" where a backend has but one.
    - `whole`: each case that the claims have today passed. `cases`: how many passed; `of`: how many there
      are today, 0 where the result doesn't say which passed.
    - `commit`: "" where it doesn't say. `date`. `path`: of the result file in the repository.
    """

    where: str
    build: str
    runs: str
    whole: bool
    cases: int
    of: int
    commit: str
    date: str
    path: str

    @property
    def text(self) -> str:
        """How many cases passed, for people."""
        return f"{self.cases} of {self.of} cases" if self.of else f"{self.cases} cases"


@cache
def _all() -> dict[str, tuple[Record, ...]]:
    text = files("polyattn.data").joinpath("proofs.json").read_text(encoding="utf-8")
    return {name: tuple(Record(**row) for row in rows) for name, rows in json.loads(text).items()}


def records_of(backend: str, build: str, where: str, runs: str = "") -> tuple[Record, ...]:
    """Return the records of one of our backends on an arch or a platform, the strongest first.

    `build`: of that build alone; a record without a build's name is of the only one of its platform.
    `runs`: of that instruction set alone.
    """
    records = (
        record
        for record in _all().get(backend, ())
        if record.where == (HOST if where == "cpu" else where)
        and build in ("", record.build)
        and (not runs or record.runs == runs)
    )
    return tuple(sorted(records, key=lambda r: (not r.whole, -r.cases, r.path)))
