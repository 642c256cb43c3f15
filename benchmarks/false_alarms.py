"""Does the checker of plans call an honest plan wrong? The kit of each backend of the CPU. Resumable.

    python benchmarks/false_alarms.py --out benchmarks/results/cpu/false_alarms.json
    python benchmarks/false_alarms.py --only NATIVE_ATTN,HPU_ATTN --out some.json --reports some-kits.json

Backends that a kernel language's interpreter runs take a part of their kits, which the output names. A
row has the kit's counts, how many plans were made, how many of them the checker could read, and how
many it called wrong (`alarms`). Cases fail for other reasons, too: these are told apart by the words.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLANS = "plans or beside or reuse or mixed-- or forest or regrouped or shared or context"
"""Of kits that take too long whole: the cases whose plans differ most."""
PARTS = f"({PLANS}) and not published and not search and not process and not many_"
TRITON = {"TRITON_INTERPRET": "1"}
PALLAS = {
    "PALLAS_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "POLYATTN_PLUGIN_TIMEOUT": "200",
    "PALLAS_BUCKETS": "tokens=1024,seqs=144,pages=1024",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "PYTHONPATH": str(ROOT / "tests" / "plugins" / "tpu"),
}  # fmt: skip
SAID = ("planned a step wrongly", "was taken apart wrongly")
"""What the checker's errors begin with (`polyattn.runtime.plan_checks`)."""


class Run(NamedTuple):
    """A kit: of a backend, its cases by pytest's `-k`, its environment and options."""

    backend: str
    cases: str = ""
    environment: dict[str, str] = {}
    options: tuple[str, ...] = ("--polyattn-device", "cpu")


IN_FUNCTIONS = ("-p", "in_functions", "--polyattn-device", "cpu")
RUNS = [
    *(Run(n) for n in ("EXAMPLE_ATTN", "TORCH_SDPA", "TORCH_MLA", "TORCH_MLA_SPARSE", "TORCH_SCAN")),
    *(Run(n) for n in ("TORCH_STORE", "TORCH_MERGE", "TORCH_INDEX", "FLEX_ATTENTION")),
    *(
        Run(n, environment={"POLYATTN_CPU_ISA": isa})
        for isa in ("amx", "avx512_bf16", "avx512", "avx2", "generic")
        for n in ("NATIVE_ATTN", "NATIVE_MLA", "NATIVE_STORE", "NATIVE_SCAN", "NATIVE_INDEX")
    ),
    *(Run(n) for n in ("HPU_ATTN", "HPU_MLA")),
    *(Run(n, PARTS, TRITON) for n in ("TRITON_ATTN", "TRITON_MLA", "TRITON_MLA_SPARSE")),
    *(Run(n, PARTS, TRITON) for n in ("TRITON_SCAN", "TRITON_TOKEN_SCAN", "TRITON_INDEX")),
    *(Run(n, PARTS, PALLAS, IN_FUNCTIONS) for n in ("PALLAS_ATTN", "PALLAS_MLA", "XLA_SCAN")),
    Run("XLA_MLA_SPARSE", PARTS, PALLAS, IN_FUNCTIONS), Run("MLX_ATTN", PARTS), Run("MLX_MLA"),
]  # fmt: skip


def isas() -> list[str]:
    from polyattn_cpu.native.library import isas

    return [*isas()]


def judged(
    run: Run, jobs: int, budget: float, seconds: float, reports: list[dict[str, object]]
) -> dict[str, object]:
    """Run a kit in a process of its own; return its row. A whole kit's report is added to `reports`."""
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.json", time.monotonic()
        options = (*run.options, *(("-k", run.cases) if run.cases else ()))
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {"OMP_NUM_THREADS": "1"} | run.environment | {"POLYATTN_CHECKS": "1"}
        path = [run.environment.get("PYTHONPATH", ""), inherited]
        environment["PYTHONPATH"] = os.pathsep.join(x for x in path if x)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark",
                 "-n", str(jobs), "--pyargs", "polyattn.conformance", "--polyattn-backend", run.backend,
                 "--polyattn-seed", "0", "--polyattn-budget", str(budget),
                 "--polyattn-report", str(report), *options],
                cwd="/", env=os.environ | environment, capture_output=True, text=True, check=False,
                timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {seconds:.0f} s"}
        if not report.is_file():
            return {"error": (done.stdout + done.stderr).strip()[-300:]}
        held = json.loads(report.read_text())
    if not run.cases:
        reports.append(held)
    names = ("cases", "passed", "refused", "failed", "skipped", "plans", "plans_checked")
    return {name: held[name] for name in names} | {
        "alarms": sum(
            line.startswith("E ") and any(x in line for x in SAID) for line in done.stdout.splitlines()
        ),
        "of": run.cases or "the whole kit", "seconds": round(time.monotonic() - began),
        "device": held["device"], "date": str(date.today()), "commit": held["commit"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="backends, by commas")
    parser.add_argument("--jobs", type=int, default=0, help="workers of each kit")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of each search")
    parser.add_argument("--seconds", type=float, default=3600, help="of each kit")
    parser.add_argument("--end", type=float, default=float("inf"), help="seconds of all of them")
    parser.add_argument("--out", type=Path, default=Path("false_alarms.json"))
    parser.add_argument("--reports", type=Path, help="where whole kits' reports go, for proofs.py")
    args = parser.parse_args()
    reports = json.loads(args.reports.read_text()) if args.reports and args.reports.exists() else []
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    end, there = time.monotonic() + args.end, isas()
    for run in RUNS:
        isa = run.environment.get("POLYATTN_CPU_ISA")
        name = f"{run.backend} {isa}" if isa else run.backend
        chosen = args.only is None or run.backend in args.only.split(",")
        left = min(args.seconds, end - time.monotonic())
        if not chosen or "alarms" in rows.get(name, ()) or isa not in (None, *there) or left < 10:
            continue
        rows[name] = judged(run, args.jobs, args.budget, left, reports)
        if args.reports:
            args.reports.write_text(json.dumps(reports, indent=1) + "\n")
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, rows[name], flush=True)
    done = [row for row in rows.values() if "alarms" in row]
    words = ("cases", "failed", "plans", "plans_checked", "alarms")
    print(len(done), "kits:", ", ".join(f"{sum(row[w] for row in done)} {w}" for w in words))


if __name__ == "__main__":
    main()
