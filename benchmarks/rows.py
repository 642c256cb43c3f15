"""Rows of a benchmark: printed as they come, bounded in time; one that fails leaves the others."""

from __future__ import annotations

import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def current_commit() -> str:
    """Return the commit that runs, with a + where files differ from it: `COMMIT` where no git is."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    here = Path(__file__).parent
    found = subprocess.run(words, cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or os.environ.get("COMMIT", "")


def listed(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return JSON of what is to be said of a run, then of its rows, each in a line."""
    lines = ",\n ".join(map(json.dumps, rows))
    return f'{json.dumps(about)[:-1]}, "rows": [\n {lines}\n]}}\n'


class Rows:
    """What was measured. No new row is begun once `seconds` are over."""

    def __init__(self, seconds: float):
        self.end, self.rows = time.monotonic() + seconds, list[dict[str, Any]]()

    def add(self, what: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Run and print one row."""
        if time.monotonic() > self.end:
            row: dict[str, Any] = {"skipped": "the time was up"}
        else:
            try:
                row = measure()
            except Exception as error:
                traceback.print_exc(limit=3)
                row = {"failed": f"{type(error).__name__}: {error}"[:200]}
        self.note(what, row)

    def note(self, what: str, row: dict[str, Any]) -> None:
        """Print a row that was measured already, whatever the time."""
        self.rows.append({"what": what} | row)
        shown = "  ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()
        )
        print(f"{what:60} {shown}", flush=True)

    def wrong(self) -> list[str]:
        """Return what failed, or was compared and found wrong."""
        return [r["what"] for r in self.rows if "failed" in r or r.get("right") is False]

    def finish(self, out: Path | None, about: dict[str, Any]) -> None:
        """Say what was wrong, and write the rows to `out`, behind what is to be said of the run."""
        print(f"{len(self.rows)} rows; wrong or failed: {self.wrong() or 'none'}")
        if out:
            out.write_text(listed(about, self.rows))
