"""Makes `polyattn/data/proofs.json` of the result files: how far each backend is proven, and where.

    python benchmarks/proofs.py

A kit's report (`--polyattn-report`) names its cases, commit, versions, build and seed: that is
"measured" where every case that the claims have today passed, else "in part". Reports from before name no
cases; they and the random batches prove a part. A report with a failure proves nothing.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyattn.conformance.derive import derive
from polyattn.device import Device
from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROOFS = ROOT / "core" / "src" / "polyattn" / "data" / "proofs.json"
DEVICE = re.compile(r"\((\w+) (\w+)\)$")


def reports() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the kits' reports with the files that they lie in."""
    for path in sorted(RESULTS.rglob("*.json")):
        if path.stat().st_size < 2:
            continue
        found = json.loads(path.read_text())
        for row in found if isinstance(found, list) else [found]:
            if isinstance(row, dict) and {"backend", "cases", "passed", "device"} <= row.keys():
                yield path, row


def batches() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the random batches of each backend of the CPU, as a report of so many cases."""
    path = RESULTS / "cpu_random_batches.json"
    found = json.loads(path.read_text())
    arch = next(word for word in found["machine"].split(", ") if word in ("x86_64", "aarch64"))
    for name, rows in found["backends"].items():
        if discover().backends[name].runs is not None:  # of which instruction set, they don't say
            continue
        yield path, {
            "backend": name, "device": f"a CPU (cpu {arch})",
            "date": max(row["date"] for row in rows), "commit": rows[-1]["revision"],
            "passed": sum(row["batches"] for row in rows), "failed": sum(row["failed"] for row in rows),
        }  # fmt: skip


def wanted(info: BackendInfo, platform: str, arch: str) -> set[str]:
    """Return the ids of the cases that the claims have today."""
    # A GPU's captured graphs are cases where a device is there; torch calls ROCm's "cuda", too.
    torch_device = "cuda" if platform in ("cuda", "rocm") else platform
    return {case.id for case in derive(info, Device(platform, arch).on(torch_device))}


def build_of(info: BackendInfo, name: str) -> BackendInfo:
    return next((build for build in info.builds if build.build == name), info)


def records() -> dict[str, list[dict[str, Any]]]:
    """Return each backend's records: those of one build, arch and instruction set together."""
    together: dict[tuple[str, ...], list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    for path, row in [*reports(), *batches()]:
        where = DEVICE.search(row["device"])
        if where is None or row["failed"] or row["backend"] not in discover().backends:
            continue
        runs = row.get("runs", row.get("isa", "")).partition(" ")[0]
        named = "" if "ids" in row else str(path)  # what names no cases stands by itself
        build = str(row.get("build", ""))
        key = (row["backend"], *where.groups(), build, runs, named)
        together[key].append((path, row))
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (name, platform, arch, build, runs, named), rows in sorted(together.items()):
        path, row = max(rows, key=lambda pair: pair[1]["date"])
        record = {
            "where": arch, "build": build, "runs": runs, "whole": False,
            "cases": max(r["passed"] for _, r in rows), "of": 0, "commit": row.get("commit", ""),
            "date": row["date"], "path": str(path.relative_to(ROOT)),
        }  # fmt: skip
        if not named:
            asked = wanted(build_of(discover().backends[name], build), platform, arch)
            done = {case for _, r in rows for case in r["ids"]} & asked
            record |= {"whole": done == asked, "cases": len(done), "of": len(asked)}
        made[name].append(record)
    return made


def main() -> None:
    """Write the records, each in a line of its own."""
    backends = (
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in records().items()
    )
    PROOFS.write_text("{\n" + ",\n".join(backends) + "\n}\n")


if __name__ == "__main__":
    main()
