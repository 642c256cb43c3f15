"""Do random regroupings, steps and packed calls change a bit? The kit's cases, with many draws.

    python benchmarks/regroupings.py NATIVE_ATTN NATIVE_MLA --draws 10000 --jobs 2 --out regroupings.jsonl

Each backend's draws are dealt to its cases, one process a case; a line of OUT for each case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from polyattn import resolve_device
from polyattn.conformance.case import Case
from polyattn.conformance.checks import invariance
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.registry.discovery import discover
from polyattn.registry.machine import availability
from polyattn.settings import current
from random_batches import revision

DRAWN = {"regrouped": 1, "index_regrouped": 1, "given_alike": 1, "divided": 3, "chunked": 4}
"""The checks that draw, and by what each divides `DRAWS`."""


def cases_of(backend: str, device: str) -> list[Case]:
    """Return the cases that draw, of the build that runs here: on a CPU Triton's interpreted."""
    where = resolve_device(device)
    builds = discover().backend(backend).builds_on(where.platform)
    build = next(each for each in builds if availability(each, current().probe_timeout) is None)
    return [case for case in derive(build, where) if case.check in DRAWN]


def one(job: tuple[str, str, int, int, int]) -> dict[str, Any]:
    """Run a backend's case of a number with so many draws."""
    backend, device, index, draws, seed = job
    case, start = cases_of(backend, device)[index], time.monotonic()
    invariance.DRAWS, wrong = draws * DRAWN[case.check], ""
    try:
        run_case(case, backend, resolve_device(device), seed)
    except AssertionError as error:
        wrong = str(error)[:300]
    seconds = round(time.monotonic() - start, 1)
    return {"backend": backend, "case": case.id, "draws": draws, "wrong": wrong, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=10_000, help="of each backend")
    parser.add_argument("--jobs", type=int, default=1, help="processes; one for a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this, with their share")
    parser.add_argument("--out", type=Path, default=Path("regroupings.jsonl"))
    parser.add_argument("--commit", help="where there is no git")
    args = parser.parse_args()
    jobs = []
    for backend in args.backends:
        cases = cases_of(backend, args.device)
        each = -(-args.draws // max(1, len(cases)))
        chosen = [index for index, case in enumerate(cases) if args.only in case.id]
        jobs += [(backend, args.device, index, each, args.seed) for index in chosen]
    where = {"revision": args.commit or revision(), "machine": str(resolve_device(args.device)),
             "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip
    failed = 0
    workers = multiprocessing.get_context("spawn").Pool(args.jobs, torch.set_num_threads, (1,))
    with workers, args.out.open("a") as out:
        for row in workers.imap_unordered(one, jobs):
            failed += bool(row["wrong"])
            out.write(json.dumps(row | where) + "\n")
            out.flush()
            print(row["backend"], row["case"], row["draws"], row["wrong"] or "no bit differs")
    sys.exit(bool(failed or not jobs))


if __name__ == "__main__":
    main()
