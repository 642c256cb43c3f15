"""Runs suites of benchmarks: every row beside other backends, libraries and its bar.

    python benchmarks/run.py SUITE ... [--device cuda] [--against flashinfer,FLASH] [--seconds 120]
                             [--rows TEXT] [--out results/MACHINE.jsonl]
    python benchmarks/run.py --list          # every row of every suite, or of those named
    python benchmarks/run.py --pages [FOLDER]   # results/*.md anew from results/*.jsonl

See README.md beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import measure
from pages import RESULTS, about, judged, suite, write_pages
from polyattn.workload.clock import Clock
from suites import NAMES
from table import Row


def listed(name: str, row: Row) -> str:
    """Return the line that `--list` prints of a row."""
    labels = "; ".join(
        f"{device}: {', '.join(c.label for c in row.contenders(device))}" for device in row.by
    )
    lengths = row.lengths()
    step = f"{len(lengths)} sequences, {sum(q for q, _ in lengths)} new of {sum(n for _, n in lengths)}"
    beside = f"; beside {', '.join(row.libraries)}" if row.libraries else ""
    return f"{name:10} {row.name:52} {step:38} bar: {row.bar or 'none'!s:30} {labels}{beside}"


def shown(name: str, row: Row, results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each contender: its time, ratio to the best, error, and the first one's bar."""
    times = {result["who"]: result["us"] for result in results if "us" in result}
    best = min((us for who, us in times.items() if not who.startswith("machine.")), default=None)
    _, met = judged(row, times)
    for index, result in enumerate(results):
        head = f"{name:10} {row.name:44} {result['who']:36}"
        if "us" not in result:
            yield f"{head} cannot: {result['cannot']}"
            continue
        ratio = "" if best is None else f"{result['us'] / best:6.2f} of the best"
        error = f"  error {result['error']:.1e}" if "error" in result else ""
        bar = "" if index or row.bar is None else f"  bar {row.bar}"
        bar += "" if index or met is None else ": met" if met else ": missed"
        yield f"{head} {result['us']:11.1f} us {ratio}{error}{bar}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(NAMES) + "; or: all")
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument(
        "--pages", type=Path, nargs="?", const=RESULTS, help="write the pages of a folder's results"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--against", default="", help="who runs beside the first, by parts of names"
    )
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no row begins")
    parser.add_argument("--out", type=Path, help="a .jsonl file that results are added to")
    parser.add_argument("--commit", default="", help="what is measured, where git can't say")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths: a rehearsal")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.suites if name not in (*NAMES, "all")]
    if unknown or not (chosen.suites or chosen.list or chosen.pages):
        parser.error(f"{unknown or 'no suite'}: name some of {', '.join(NAMES)}, or all")
    if chosen.out is not None and chosen.shrink > 1:
        parser.error("--shrink is a rehearsal, whose figures are not results: leave out --out")
    if chosen.suites in ([], ["all"]):
        chosen.suites = list(NAMES)
    return chosen


def main() -> None:
    """Do what is asked."""
    chosen = options()
    if chosen.pages:
        print(*write_pages(chosen.pages), sep="\n")
        return
    rows = [(n, row) for n in chosen.suites for row in suite(n) if chosen.rows in row.name]
    if chosen.list:
        print(*(listed(name, row) for name, row in rows), sep="\n")
        return
    device, end = torch.device(chosen.device), time.monotonic() + chosen.seconds
    clock, against = Clock(device), [text for text in chosen.against.split(",") if text]
    facts = about(device, chosen.commit)
    print(json.dumps(facts), flush=True)
    left = 0
    for name, row in rows:
        if time.monotonic() > end:
            left += 1
            continue
        with torch.no_grad():
            results = list(measure(row, device, clock, chosen.shrink, against))
        print(*shown(name, row, results), sep="\n", flush=True)
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            with chosen.out.open("a", encoding="utf-8") as file:
                for result in (each for each in results if not each.pop("absent", False)):
                    file.write(json.dumps(facts | {"suite": name, "row": row.name} | result) + "\n")
    if left:
        print(f"{left} rows were not begun: the time was up", file=sys.stderr)


if __name__ == "__main__":
    main()
