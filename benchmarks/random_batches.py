"""Random batches by the hundred thousand through every backend that a device runs, beside float64.

python benchmarks/random_batches.py [--batches 100000] [--seconds S] [--device cuda] [--only NAME,NAME]
                                    [--out FILE.json]

What ran is in the file, a row for each backend and revision: the same command again goes on where the
last one ended, whoever has run least first. On a CPU, FLEX_ATTENTION's kernel would be compiled
for each of thousands of layers and shapes, so its definition stands for it, block by block
(tests/defined_flex.py). Several runs may share a file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import platform
import random
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from polyattn import Device, __version__, discover, resolve_device
from polyattn.conformance.random_batches import random_batches
from polyattn.registry.capabilities import ANY_PLATFORM
from polyattn.registry.machine import availability, build_here
from rows import current_commit


def backends(device: Device) -> list[str]:
    """Return what claims the device and is here."""
    return [
        name
        for name, info in discover().backends.items()
        if {device.platform, ANY_PLATFORM} & info.capabilities.platforms.keys()
        and availability(info, 60.0) is None
    ]


def piece(name: str, device: Device, count: int) -> dict[str, Any]:
    """Run one piece and return its row."""
    began, before, seed = time.time(), time.process_time(), random.SystemRandom().randrange(2**31)
    build = build_here(discover().backends[name], device.platform, 60.0)
    tally = random_batches(build, device, seed, count)
    row: dict[str, Any] = {
        "date": str(date.today()), "batches": tally.batches, "layers": tally.layers,
        "with_nan_or_inf": tally.spoilt, "failed": tally.failed,
        "worst_of_tolerance": round(tally.worst, 4), "where": tally.where,
        "cpu_s": round(time.process_time() - before, 1), "wall_s": round(time.time() - began, 1),
    }  # fmt: skip
    row["revision"] = current_commit()
    return row | ({"failures": tally.failures} if tally.failed else {})


COUNTS = ("batches", "layers", "with_nan_or_inf", "failed", "cpu_s", "wall_s")


def together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the row of two pieces of a revision; it tells where the worse one's worst batch was."""
    worse = max(one, other, key=lambda row: row["worst_of_tolerance"])
    row = other | {name: round(one[name] + other[name], 1) for name in COUNTS}
    row |= {name: worse[name] for name in ("worst_of_tolerance", "where")}
    failures = [*one.get("failures", ()), *other.get("failures", ())]
    return row | ({"failures": failures} if failures else {})


def record(out: Path, name: str, device: Device, row: dict[str, Any]) -> None:
    """Add a row to the file, which another run may be writing to."""
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = json.loads(out.read_text()) if out.exists() else {"backends": {}}
        report |= {
            "command": "python benchmarks/random_batches.py",
            "machine": f"{platform.machine()}, torch threads {torch.get_num_threads()}",
            "device": str(device),
            "polyattn": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        rows = report["backends"].setdefault(name, [])
        if rows and rows[-1]["revision"] == row["revision"]:
            row = together(rows.pop(), row)
        rows.append(row)
        whole = out.with_suffix(".new")
        whole.write_text(json.dumps(report, indent=1) + "\n")
        whole.replace(out)  # others read it meanwhile


def done(out: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows that a backend has."""
    if not out.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(out.read_text())["backends"].get(name, [])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no piece begins after them"
    )
    parser.add_argument("--device", help="torch device (default: cpu)", default="cpu")
    parser.add_argument("--piece", type=int, default=5_000, help="batches between two savings")
    parser.add_argument("--only", help="names of backends, by commas")
    parser.add_argument("--out", type=Path, default=Path("random_batches.json"))
    args = parser.parse_args()
    end, device = time.monotonic() + args.seconds, resolve_device(args.device)
    torch.set_num_threads(1)  # batches of a few tokens
    if device.platform == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import pytest
        from defined_flex import without_compiler

        without_compiler(pytest.MonkeyPatch())
    failed = 0
    names = args.only.split(",") if args.only else backends(device)

    def ran(name: str) -> int:
        return sum(row["batches"] for row in done(args.out, name))

    while time.monotonic() < end and ran(least := min(names, key=ran)) < args.batches:
        row = piece(least, device, min(args.piece, args.batches - ran(least)))
        if least == "FLEX_ATTENTION" and device.platform == "cpu":
            row["kernel"] = "its definition"
        record(args.out, least, device, row)
        failed += row["failed"]
        print(least, ran(least), row["failed"], row["worst_of_tolerance"], flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
