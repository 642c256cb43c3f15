"""Do torch's operators and native calls, in turn with two threads each, cost what both cost alone?

python benchmarks/cpu_threads.py [--seconds N] [--out FILE.json]

Blocks of calls take turns: an operator alone, a native call alone, both in turn, as a layer has them.
Medians over the rounds in which other processes took less than a tenth of a core (five at least, or
the pair is left out), and what this process's threads waited for a processor (`schedstat`), as a share
of the wall time. Native threads sleep between calls; torch's spin a while after an operator, unless
OMP_WAIT_POLICY=passive is set before torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import cpu_native
import torch
from polyattn_cpu.native.backends import NativeAttention
from polyattn_cpu.native.library import isa

TASKS = Path("/proc/self/task")
CASES = (
    "decode 8x2048 bf16",
    "decode 64x512 bf16",
    "decode 8x64 4/2x32 fp32",
    "prefill 4x512 bf16",
)
LEAST_ROUNDS, QUIET = 5, 0.1
Call = Callable[[], object]
Round = dict[str, tuple[float, float]]


def operators() -> dict[str, Call]:
    """Return what a layer has beside attention: a product, a norm over many rows and over few."""
    few, many = torch.randn(8, 4096).bfloat16(), torch.randn(2048, 4096)
    weight = torch.randn(4096, 4096).bfloat16()
    return {
        "linear 8 x 4096 x 4096 bf16": lambda: few @ weight,
        "norm 2048 x 4096 fp32": lambda: torch.nn.functional.rms_norm(many, (4096,)),
        "norm 8 x 4096 bf16": lambda: torch.nn.functional.rms_norm(few, (4096,)),
    }


def waited() -> int:
    """Return nanoseconds in which threads of this process could have run and had no processor."""
    found = 0
    for task in TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            found += int((task / "schedstat").read_text().split()[1])
    return found


def others() -> float:
    """Return the seconds of processors that other processes have taken since the machine started."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()


def block(calls: list[Call], count: int) -> tuple[float, float]:
    """Call each in turn, `count` times; returns seconds for one turn and the share waited."""
    before, started = waited(), time.perf_counter()
    for _ in range(count):
        for call in calls:
            call()
    took = time.perf_counter() - started
    return took / count, (waited() - before) / took / 1e9


def rounds(operator: Call, native: Call, seconds: float) -> list[Round]:
    """Return rounds that nobody disturbed, within `seconds` or, until there are enough, ten times it."""
    kinds = {"torch": [operator], "native": [native], "both": [operator, native]}
    count = max(3, int(0.15 / block(kinds["both"], 3)[0]))
    found: list[Round] = []
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < (
        seconds if len(found) >= LEAST_ROUNDS else 10 * seconds
    ):
        taken = others()
        made = {kind: block(calls, count) for kind, calls in kinds.items()}
        if (others() - taken) / (time.perf_counter() - started - spent) < QUIET:
            found.append(made)
    return found


def compare(operator: Call, native: Call, seconds: float) -> dict[str, float] | None:
    """Return milliseconds of each alone and of both in turn, their ratio and the shares waited."""
    found = rounds(operator, native, seconds)
    if len(found) < LEAST_ROUNDS:
        return None
    row: dict[str, float] = {"rounds": len(found)}
    for kind in ("torch", "native", "both"):
        row[f"{kind}_ms"] = 1e3 * statistics.median(r[kind][0] for r in found)
        row[f"{kind}_waited"] = statistics.median(r[kind][1] for r in found)
    row["ratio"] = statistics.median(r["both"][0] / (r["torch"][0] + r["native"][0]) for r in found)
    return row


def main() -> None:
    """Measure each pair and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each pair (default: 3)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        native = cpu_native.Case(*cpu_native.CASES[case]).call(NativeAttention)
        for name, operator in operators().items():
            row = compare(operator, native, given.seconds)
            if row is None:
                print(f"{case:24} {name:28} left out: other processes took the cores", flush=True)
                continue
            rows.append({"native": case, "torch": name, **row})
            print(f"{case:24} {name:28} {row['torch_ms']:7.3f} + {row['native_ms']:7.3f} ms, in turn "
                  f"{row['both_ms']:7.3f}: x {row['ratio']:.2f}; waited {row['torch_waited']:.2f} "
                  f"{row['native_waited']:.2f} {row['both_waited']:.2f}; {row['rounds']} rounds",
                  flush=True)  # fmt: skip
    if given.out:
        policy = {n: os.environ.get(n) for n in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        found = {"date": str(date.today()), "isa": isa(), "torch": torch.__version__,
                 "cores": os.cpu_count(), "environment": policy, "rows": rows}  # fmt: skip
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
