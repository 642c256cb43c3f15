"""Do random regroupings, steps and packed calls change a bit? The kit's cases, with many draws.

    python benchmarks/regroupings.py NATIVE_ATTN NATIVE_MLA --draws 10000 --jobs 2 --out regroupings.jsonl
    python benchmarks/regroupings.py TRITON_ATTN --device cuda --step 3q1s40k_q4s8191_q1s8193
    PALLAS_INTERPRET=1 PALLAS_BUCKETS=seqs=32 python benchmarks/regroupings.py PALLAS_ATTN --blocks 128

Each level's draws are dealt to its cases, and a case's to parts with seeds of their own. Processes run
the parts; a line of OUT for each. Where a level divides sequences into steps, a draw is a step. Sequences
of a `--step` that are divided are so once a part, in chunks of up to 700 tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from polyattn import resolve_device
from polyattn.conformance.case import Case
from polyattn.conformance.checks import invariance
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.conformance.harness import base
from polyattn.registry.discovery import discover
from polyattn.registry.machine import availability
from polyattn.tools.cli.grammar import parse_batch
from polyattn.workload.dice import Dice
from rows import current_commit

DRAWN = {
    "regrouped": (1, 1),
    "index_regrouped": (1, 1),
    "given_alike": (1, 1),
    "divided": (3, 11),
    "specified": (3, 1),
    "chunked": (4, 8),
}
"""The checks that draw: how many `DRAWS` make one draw, and how many steps that has, about."""

Job = tuple[str, str, int, int, int, str]
"""A backend, a device, a case's number, draws, a seed, and a step in place of the case's own, if any."""


@lru_cache
def cases_of(backend: str, device: str) -> list[Case]:
    """Return the cases that draw, of the build that runs here: on a CPU Triton's interpreted.

    Long sequences are divided once, whatever `DRAWS` says.
    """
    where = resolve_device(device)
    builds = discover().backend(backend).builds_on(where.platform)
    build = next(each for each in builds if availability(each, 60.0) is None)
    drawn = [case for case in derive(build, where) if case.check in DRAWN]
    return [case for case in drawn if (case.check, case.batch) != ("chunked", "long")]


def round_up(blocks: int) -> None:
    """Have caches a multiple of so many blocks: few shapes to compile."""
    exact = Dice.blocks

    def whole(
        dice: Dice, lens: Sequence[int], size: int, spare: int = 1, within: int | None = None,
        first: int = 1,
    ) -> Any:  # fmt: skip
        needed = sum(-(-n // size) for n in lens) + 3
        return exact(dice, lens, size, spare, within or -(-needed // blocks) * blocks, first)

    Dice.blocks = whole  # type: ignore[method-assign]


def start(blocks: int) -> None:
    """Begin a process of the pool; `blocks`: as in `round_up`."""
    torch.set_num_threads(1)
    if blocks > 1:
        round_up(blocks)


class Counted(invariance.Told):
    """Sequences that count the steps that they are asked for."""

    steps = 0

    def ask(self, pieces: Sequence[invariance.Piece]) -> None:
        Counted.steps += 1
        super().ask(pieces)


def one(job: Job) -> dict[str, Any]:
    """Run a backend's case of a number with so many draws."""
    backend, device, index, draws, seed, step = job
    case, began = cases_of(backend, device)[index], time.monotonic()
    name, (each, steps) = case.id, DRAWN[case.check]
    invariance.DRAWS, wrong, Counted.steps = -(-draws // steps) * each, "", 0
    if step:
        lengths = parse_batch(step)
        invariance.PROMPTS["long"] = tuple(n for _, n in lengths)
        case, invariance.Told, base.named = replace(case, batch="long"), Counted, lambda *_: lengths
    try:
        run_case(case, backend, resolve_device(device), seed)
    except Exception as error:  # one case must not end the others
        wrong = f"{type(error).__name__}: {error}"[:300]
    seconds = round(time.monotonic() - began, 1)
    where = {"step": step} if step else {}
    return where | {
        "backend": backend, "case": name, "seed": seed, "draws": Counted.steps or draws, "wrong": wrong,
        "seconds": seconds,
    }  # fmt: skip


def parts_of(args: argparse.Namespace) -> list[Job]:
    """Return what is to run: every case's first part, then every case's second."""
    parts: list[Job] = []
    for backend in args.backends:
        cases = cases_of(backend, args.device)
        count = Counter(case.check for case in cases)
        for index, case in enumerate(cases):
            draws = -(-args.draws // count[case.check]) if args.only in case.id else 0
            for place, done in enumerate(range(0, draws, args.part)):
                some, seed = min(args.part, draws - done), args.seed + place
                parts.append((backend, args.device, index, some, seed, args.step))
    return sorted(parts, key=lambda part: part[4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=10_000, help="of each level of a backend")
    parser.add_argument("--part", type=int, default=1_000, help="draws of a case at a time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--parts", type=int, help="of a process, then another one takes its place")
    parser.add_argument("--blocks", type=int, default=1, help="of which a cache has a multiple")
    parser.add_argument("--seconds", type=float, default=1e9, help="none begins later")
    parser.add_argument("--seed", type=int, default=0, help="of the first parts")
    parser.add_argument(
        "--step", default="", help="instead of the kit's, as `polyattn bench` takes it"
    )
    parser.add_argument("--only", default="", help="cases whose name has this, with their share")
    parser.add_argument("--out", type=Path, default=Path("regroupings.jsonl"))
    parser.add_argument("--commit", help="where there is no git")
    args = parser.parse_args()
    end, parts = time.monotonic() + args.seconds, parts_of(args)
    where = {"revision": args.commit or current_commit(), "machine": str(resolve_device(args.device)),
             "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip
    failed = 0
    workers = multiprocessing.get_context("spawn").Pool(
        args.jobs, start, (args.blocks,), maxtasksperchild=args.parts
    )
    with workers, args.out.open("a") as out:
        for row in workers.imap_unordered(one, parts):
            failed += bool(row["wrong"])
            out.write(json.dumps(row | where) + "\n")
            out.flush()
            said = row["wrong"] or "no bit differs"
            print(row["backend"], row["case"], row["draws"], said, flush=True)
            if time.monotonic() > end:
                break
    sys.exit(bool(failed or not parts))


if __name__ == "__main__":
    main()
