"""Do the TPU plugin's claims hold? The whole kit, interpreted on the CPU, in pieces of bounded time.

    python benchmarks/tpu_kit.py PALLAS_ATTN functions --seconds 450

Each case's outcome is kept in build/tpu_kit/ as it ends, under a digest of the modules that it ran
through; the next call goes on with the cases that are missing, or that failed. The counts so far, and
how many are missing, are written to results/tpu/kit.json. A door is `functions` (JAX's own) or
`torchax`. Where there are cores, `--shard 3/32` takes a part: all parts side by side, then one call
without it that counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "plugins/tpu/src/polyattn_tpu"
KEPT = ROOT / "build/tpu_kit"
OUT = ROOT / "benchmarks/results/tpu/kit.json"
DOORS = {
    "torchax": ("in_jax", "jax", ("backends", "bridge", "torchax_env")),
    "functions": ("in_functions", "cpu", ()),
}
"""What stands before the kit, the torch device that it selects for, modules of that door alone."""
ALL = ("planning", "step", "buckets", "configs")
SERVED_BY = {"XLA_SCAN": ("recurrence",), "JAX_STORE": ("functions",), "JAX_MERGE": ("functions",)}
REST = ("functions", "kernel", "latent", "pointwise", "pointwise_source", "pointwise_ops", "split")
"""Modules that a backend's cases run through: all of them `ALL`, and its own or `REST`."""
SETTINGS = {
    "PALLAS_INTERPRET": "1",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "PALLAS_BUCKETS": "tokens=1024,seqs=48,pages=1024",
    "POLYATTN_PLUGIN_TIMEOUT": "200",  # torchax is imported to look for its device
}
COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": str(KEPT / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
"""Most of the time goes into compiling interpreted kernels: each once, and not for speed."""
SEED = 1


def digest(backend: str, door: str) -> str:
    """Return what tells whether an outcome is of the code that is here."""
    names = (*ALL, *SERVED_BY.get(backend, REST), *DOORS[door][2])
    whole = b"".join((PLUGIN / f"{name}.py").read_bytes() for name in sorted(names))
    return hashlib.sha256(whole).hexdigest()[:16]


class Pieces:
    """Runs what is missing until the time is over, and keeps each outcome."""

    def __init__(self, path: Path, code: str, seconds: float, shard: tuple[int, int]):
        self.path, self.code, self.until = path, code, time.monotonic() + seconds
        self.first, self.step = shard
        self.wanted: list[str] = []
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [entry for entry in map(json.loads, lines) if entry["code"] == code]
        self.found: dict[str, Any] = {entry["case"]: entry for entry in entries}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        self.wanted = [item.name for item in items]
        yield  # -k leaves out what wasn't asked for
        left = [i for i in items if self.found.get(i.name, {}).get("outcome") != "passed"]
        items[:] = left[self.first :: self.step]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2]
        entry = {"case": name, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        self.found[name] = entry | {"code": self.code}
        with self.path.open("a") as lines:
            lines.write(json.dumps(self.found[name]) + "\n")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self.until:
            item.session.shouldstop = "the piece's time is over; call again to go on"

    def record(self) -> dict[str, Any]:
        """Return the counts: refusals apart from passes, the kit's look at itself in neither."""
        there = {name: e for name, e in self.found.items() if name in self.wanted}
        cases = {name: e for name, e in there.items() if name.startswith("test_case[")}
        refused = {name for name in cases if name.startswith("test_case[refusal-")}
        counts = Counter(e["outcome"] for name, e in cases.items() if name not in refused)
        return {
            "cases": sum(name.startswith("test_case[") for name in self.wanted),
            "missing": len(self.wanted) - len(there),
            "passed": counts["passed"],
            "refused": sum(cases[name]["outcome"] == "passed" for name in refused),
            "failed": sum(e["outcome"] == "failed" for e in there.values()),
            "skipped": counts["skipped"],
            "seconds": round(sum(e["seconds"] for e in there.values())),
        }


def write(backend: str, door: str, record: dict[str, Any]) -> None:
    """Put a kit's counts beside those of the others."""
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    names = ("polyattn", "jax", "jaxlib", "torch") + (("torchax",) if door == "torchax" else ())
    record |= {
        "seed": SEED,
        "date": str(date.today()),
        "code": digest(backend, door),
        "versions": {name: version(name) for name in names},
        "command": f"python benchmarks/tpu_kit.py {backend} {door}",
    }
    results[f"{backend} through {door}"] = record
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def shard(text: str) -> tuple[int, int]:
    """Return a part's index and how many there are."""
    index, _, count = text.partition("/")
    if not 0 <= int(index) < int(count):
        raise ValueError(text)
    return int(index), int(count)


def main() -> int:
    """Run a piece; 0 where the whole kit is there and nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("door", choices=DOORS)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after the case at hand")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="a part of them")
    parser.add_argument("-k", default="", help="only such cases")
    given = parser.parse_args()
    os.environ.update(SETTINGS | COMPILED)
    sys.path.insert(0, str(ROOT / "tests/plugins/tpu"))
    KEPT.mkdir(parents=True, exist_ok=True)
    front, device, _ = DOORS[given.door]
    kept = KEPT / f"{given.backend}-{given.door}.jsonl"
    pieces = Pieces(kept, digest(given.backend, given.door), given.seconds, given.shard)
    pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", front, "--pyargs", "polyattn.conformance",
         "--polyattn-backend", given.backend, "--polyattn-device", device,
         "--polyattn-budget", "0.1", "--polyattn-seed", str(SEED), "--tb", "short", "-k", given.k],
        plugins=[pieces],
    )  # fmt: skip
    if given.shard[1] > 1:
        return 0
    record = pieces.record()
    print(json.dumps(record))
    if not pieces.wanted:
        return 1
    write(given.backend, given.door, record)
    return 1 if record["missing"] or record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
