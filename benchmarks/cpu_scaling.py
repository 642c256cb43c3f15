"""How do the native kernels scale with threads? Beside what as many threads read.

python benchmarks/cpu_scaling.py [--threads 1,2,4,8,16] [--seconds N] [--only NAME,NAME] [--out FILE.json]

Wall time, the least and the median of what fits into `--seconds`; the plan is made once for each number
of threads, as in a step of many layers. Lengths are skewed in `ragged` and `mixed`. Virtual cores that
share a core have one AMX unit between them, and one set of multipliers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import cpu_native
import torch
from cpu_bars_calls import timed
from polyattn_cpu.native.backends import NativeAttention
from polyattn_cpu.native.library import isa


def cases() -> dict[str, cpu_native.Case]:
    """Return the steps: of equal lengths, of one sequence, of many whose lengths differ much."""
    llama, skewed = cpu_native.LLAMA, [int(n) for n in 40 + torch.rand(32) ** 3 * 8000]
    named = {
        "decode 1x1024": (llama, [1], [1024]),
        "decode 1x32768": (llama, [1], [32768]),
        "decode ragged, 32 of 40 to 8,040": (llama, [1] * 32, skewed),
        "mixed, 512 after 512 and 31 decodes": (llama, [1] * 31 + [512], [700] * 31 + [1024]),
    }
    for name in ("decode 8x2048 bf16", "decode 1x8192 bf16", "decode 64x512 bf16", "prefill 1x2048 bf16",
                 "prefill 4x512 bf16", "decode 8x2048 MLA 16 heads bf16"):  # fmt: skip
        named[name] = cpu_native.CASES[name]
    return {name: cpu_native.Case(*given) for name, given in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    there = len(os.sched_getaffinity(0))
    counts = [n for n in map(int, chosen.threads.split(",")) if n <= there]
    memory, rows = torch.ones(64 << 20), []
    found = {
        name: case
        for name, case in cases().items()
        if not chosen.only or any(part in name for part in chosen.only.split(","))
    }
    print(f"{isa()}, {there} processors, torch {torch.__version__}, load {os.getloadavg()}")
    for count in counts:
        torch.set_num_threads(count)
        least, _ = timed(lambda: memory.sum(), chosen.seconds)
        rows.append({"case": "read", "threads": count, "gb_s": memory.nbytes / least / 1e9})
        print(f"read by {count}: {rows[-1]['gb_s']:.1f} GB/s", flush=True)
    for name, case in found.items():
        alone = 0.0
        for count in counts:
            torch.set_num_threads(count)
            least, median = timed(case.call(NativeAttention), chosen.seconds)
            alone = alone or least
            row = {"case": name, "threads": count, "ms": least * 1e3, "median_ms": median * 1e3,
                   "times": alone / least, "gb_s": case.bytes / least / 1e9,
                   "gflops": case.flops / least / 1e9}  # fmt: skip
            rows.append(row)
            print(f"{name:36} {count:3} threads {row['ms']:8.2f} ms, median {row['median_ms']:8.2f}, "
                  f"x {row['times']:5.1f}, {row['gb_s']:6.1f} GB/s, {row['gflops']:7.0f} GFLOP/s",
                  flush=True)  # fmt: skip
    if chosen.out:
        report = {"isa": isa(), "processors": there, "torch": torch.__version__,
                  "command": " ".join(["python", *sys.argv]), "rows": rows}  # fmt: skip
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
