"""Tries tile sizes of the MLA and the recurrent kernels on one GPU; prints the best of each.

    python benchmarks/tune_families.py [--jobs 12]

Every candidate is compiled by a process of its own first, side by side; then all are timed by one.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from typing import Any

import polyattn_triton.mla as mla
import polyattn_triton.scan as scan
from families import LatentDecode, Scan, model_spec
from polyattn_triton.configs import MLAConfig, ScanConfig
from timing import kernel_us

MLA_CANDIDATES = [
    MLAConfig(64, 64, 8, 1, hopper=True), MLAConfig(64, 64, 8, 2, apart=True),
    MLAConfig(64, 64, 8, 2), MLAConfig(64, 32, 8, 4, apart=True), MLAConfig(32, 64, 4, 2),
]  # fmt: skip
PREFILL = [
    ScanConfig(v, c, w, s)
    for v, c, w, s in itertools.product((32, 64), (32, 64), (4, 8), (1, 2, 3))
    if not (c == 32 and w == 8)
]
LINEAR = [ScanConfig(v, 64, w, s) for v, w, s in itertools.product((32, 64), (4, 8), (2, 3))]
STEPS = [ScanConfig(v, 1, w, 1) for v, w in itertools.product((8, 16, 32, 64), (2, 4, 8))]
FEW = [ScanConfig(v, 1, w, 1) for v, w in itertools.product((16, 32, 64), (2, 4))]
DELTA = [ScanConfig(v, c, 4, s) for v, c, s in itertools.product((32, 64), (16, 32), (1, 2))]
DELTA += [ScanConfig(128, 32, 8, 1), ScanConfig(64, 32, 8, 2)]


def jobs() -> list[tuple[str, Any]]:
    deepseek, mamba2 = model_spec("deepseek-v3"), model_spec("mamba2-2.7b")
    gdn = model_spec("qwen3-next-80b-a3b")
    linear = model_spec("minimax-text-01")
    long, many = ([4096] * 8, [4096] * 8), ([1] * 128, [4096] * 128)
    found: list[tuple[str, Any]] = []
    for config in MLA_CANDIDATES:
        found.append(("mla", (config, lambda: LatentDecode(deepseek, "TRITON_MLA", 64, 4096))))
    for name, spec, lens, configs in (
        ("mamba2 prefill", mamba2, long, PREFILL),
        ("mamba2 decode", mamba2, many, STEPS),
        ("linear prefill", linear, long, LINEAR),
        ("linear decode", linear, many, FEW),
        ("gdn prefill", gdn, long, DELTA),
        ("gdn decode", gdn, many, FEW),
    ):
        for config in configs:
            make = lambda spec=spec, lens=lens: Scan(spec, "TRITON_SCAN", *lens)  # noqa: E731
            found.append((name, (config, make)))
    return found


def run(name: str, config: Any, make: Any, timed: bool) -> float:
    if name == "mla":
        mla.mla_config = lambda *_: config
    else:
        scan.pick_scan = lambda *_: config
    call = make()
    call()
    return kernel_us(call, repeats=5) if timed else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--share", type=int)
    parser.add_argument("--time", type=int)
    parser.add_argument("--only", default="", help="a part of the names: mla, decode, gdn")
    args = parser.parse_args()
    everything = [job for job in jobs() if args.only in job[0]]
    if args.share is not None:
        for name, (config, make) in everything[args.share :: args.jobs]:
            try:
                run(name, config, make, timed=False)
            except Exception as error:
                print(name, config, type(error).__name__, str(error)[:80], file=sys.stderr)
        return
    if args.time is not None:
        for at, (name, (config, make)) in list(enumerate(everything))[args.time :]:
            try:
                print(at, run(name, config, make, timed=True), flush=True)
            except Exception as error:
                print(
                    at,
                    "failed",
                    type(error).__name__,
                    str(error)[:60].replace("\n", " "),
                    flush=True,
                )
                if "CUDA error" in str(error):
                    return
        return
    shares = [
        subprocess.Popen(
            [sys.executable, __file__, "--only", args.only, "--jobs", str(args.jobs),
             "--share", str(i)],
            stderr=subprocess.DEVNULL,
        )
        for i in range(args.jobs)
    ]  # fmt: skip
    for share in shares:
        share.wait()
    results: dict[str, list[tuple[float, Any]]] = {}
    start = 0
    while start < len(everything):  # a kernel that faults takes its process along, not the rest
        found = subprocess.run(
            [sys.executable, __file__, "--only", args.only, "--time", str(start)], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        ).stdout.splitlines()  # fmt: skip
        for line in found:
            at, us = int(line.split()[0]), line.split()[1]
            name, (config, _) = everything[at]
            if us == "failed":
                print(name, config, line)
            else:
                results.setdefault(name, []).append((float(us), config))
        start = at + 1 if found else start + 1
    for name, found in results.items():
        for us, config in sorted(found, key=lambda item: item[0])[:5]:
            print(f"{name:16} {us:9.1f} us  {config}")


if __name__ == "__main__":
    main()
