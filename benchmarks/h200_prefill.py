"""Prefill on Hopper: variants of the Gluon kernel beside TRITON_ATTN and FlashAttention-3.

    python benchmarks/h200_prefill.py [--out FILE.json] [--seconds 300] [--only TEXT ...] [--limit 100]

Each variant is a process of its own with a time limit, so that a hang or an illegal access ends nothing
else; processes compile side by side and take turns with the clock. A variant's results over ragged
lengths, chunks after a context, a permuted table, NaN in every slot and output that nobody may read or
leave, are checked against float64 before it is timed. Device times with a cold L2 (`timing.py`), median
of twenty. A table is printed last; exit 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h200_prefill_variants import STEPS, VARIANTS, Step, Variant

CHECKS = {
    "fresh": ([1, 5, 127, 128, 129, 300, 1000], [1, 5, 127, 128, 129, 300, 1000]),
    "chunks": ([100, 512, 33, 1, 64, 700], [1000, 2001, 40, 513, 64, 3333]),
}
IN_PIECES = {
    "1 x 100": ([100], [100]),
    "8 x 200": ([200] * 8, [200] * 8),
    "16 x 60 after 500": ([60] * 16, [560] * 16),
    "1 x 512 after 8k": ([512], [8704]),
    "1 x 16 after 128k": ([16], [131088]),
}
"""Steps of few tiles, whose keys are cut; for backends alone."""
BACKENDS = ("TRITON_ATTN", "TRITON_ATTN portable", "FLASH_ATTN_V3")
LAYERS = (
    ((32, 8), 128, 0, True),
    ((32, 8), 64, 0, True),
    ((32, 8), 128, 1024, True),
    ((16, 4), 256, 0, True),
    ((32, 8), 128, 0, False),
    ((28, 4), 128, 0, True),
)


@contextmanager
def device(how: int) -> Iterator[None]:
    """Use the device: with others (`LOCK_SH`), or alone, for the clock (`LOCK_EX`)."""
    with (Path(tempfile.gettempdir()) / "h200_prefill.lock").open("w") as lock:
        fcntl.flock(lock, how)
        yield


def of_variant(variant: Variant) -> dict[str, Any]:
    """Check a variant, then time it."""
    import torch
    from polyattn.workload.tolerance import TOLERANCES

    row: dict[str, Any] = {"name": variant.name, "us": {}, "tflops": {}, "errors": {}}
    torch.manual_seed(time.time_ns() % (1 << 31))
    most = TOLERANCES[variant.dtype]
    Step(variant, [200, 3], [200, 3]).run()  # compiles, out of the others' way
    torch.cuda.synchronize()
    for name, (queries, lens) in CHECKS.items():
        if not variant.page and queries != lens:
            continue
        with device(fcntl.LOCK_SH):
            step = Step(variant, queries, lens)
            off, off_lse = step.error(40)
        row["errors"][name] = off, off_lse
        if not (off <= most.output and off_lse <= most.lse):
            row["wrong"] = True
        del step
    if row.get("wrong"):
        return row
    steps = {}
    for name in variant.steps:
        queries, lens = STEPS[name]
        if not variant.page and queries != lens:
            continue
        with device(fcntl.LOCK_SH):
            step = Step(variant, queries, lens)
            off, _ = step.error(12)
        row["errors"][name] = off, 0.0
        if off <= most.output:
            steps[name] = step
        else:
            row["wrong"] = True
    times = rounds({name: step.run for name, step in steps.items()}, 3)
    for name, step in steps.items():
        row["us"][name] = times[name]
        row["tflops"][name] = step.flops() / times[name] / 1e6
    return row


def rounds(calls: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """Time calls in turns, alone on the device: the median of `count` medians, microseconds.

    Clocks follow the power that was drawn before: one look would tell of those who came earlier.
    """
    from timing import kernel_us

    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        with device(fcntl.LOCK_EX):
            for name, call in calls.items():
                found[name].append(kernel_us(call, repeats=10))
    return {name: statistics.median(times) for name, times in found.items()}


def of_backends(
    paged: bool, heads: tuple[int, int], size: int, window: int, causal: bool
) -> list[dict[str, Any]]:
    """Time the backends on the same steps, in turns; FlashAttention's keys lie in its own blocks."""
    import h200_ragged as ragged
    import torch
    from polyattn import LayerSpec

    spec = LayerSpec(
        num_heads=heads[0], num_kv_heads=heads[1], head_size=size, sliding_window=window or None,
        causal=causal,
    )  # fmt: skip
    end = f" {'paged' if paged else 'packed'}, {heads[0]}/{heads[1]} of {size}"
    end += f", window {window}" * bool(window) + ", not causal" * (not causal)
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name + end, "us": {}, "errors": {}} for name in BACKENDS
    }
    for step, (queries, lens) in (STEPS | IN_PIECES).items():
        if not paged and queries != lens:
            continue
        calls: dict[str, Any] = {}
        for name in BACKENDS:
            tweak = (lambda backend: setattr(backend, "hopper", None)) if "port" in name else None
            rows_of_step = tuple(zip(queries, lens, strict=True))
            run = ragged.Run(ragged.Step(step, spec, rows_of_step), name.split()[0], tweak)
            if paged:
                run.new = [(None, None)] * len(run.new)
            run()  # compiles, out of the others' way
            torch.cuda.synchronize()
            calls[name] = run
            way = "+".join(str(getattr(plan, "way", "")) for _, plan, _ in run.calls)
            rows[name].setdefault("ways", {})[step] = way
            with device(fcntl.LOCK_SH):
                if causal and not window:  # as its reference is
                    rows[name]["errors"][step] = run.error(), 0.0
                elif "port" in name:
                    ours, theirs = calls["TRITON_ATTN"].out.double(), run.out.double()
                    off = float((ours - theirs).norm() / theirs.norm())
                    rows["TRITON_ATTN"]["errors"][step] = off, 0.0
        for name, us in rounds(calls, 5).items():
            rows[name]["us"][step] = us
        del calls, run
        torch.cuda.empty_cache()
    return list(rows.values())


def worker(text: str) -> None:
    """Do one job and print its rows."""
    job = json.loads(text)
    if "paged" in job:
        rows = of_backends(**(job | {"heads": tuple(job["heads"])}))
    else:
        rows = [of_variant(Variant(**(job | {"steps": tuple(job["steps"])})))]
    print("ROWS " + json.dumps(rows), flush=True)


def spawn(name: str, job: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """Run a job in a process of its own."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        rows = [{"name": name, "failed": f"more than {limit:.0f} s"}]
    else:
        lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("ROWS ")]
        failed = done.stderr.strip()[-600:] or f"exit code {done.returncode}"
        rows = json.loads(lines[-1]) if lines else [{"name": name, "failed": failed}]
    print(json.dumps({"rows": rows, "seconds": time.perf_counter() - started}), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    """Print a line a variant."""
    names = [*STEPS, *(IN_PIECES if any("1 x 100" in row.get("us", ()) for row in rows) else ())]
    print(f"\n{'us':50}" + "".join(f"{name:>20}" for name in names) + "   worst error")
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:50}failed: {row['failed'].splitlines()[-1][:150]}")
            continue
        text = ""
        for name in names:
            us, rate = row["us"].get(name), row.get("tflops", {}).get(name)
            cell = "-" if us is None else f"{us:.0f}" + (f" ({rate:.0f} TF)" if rate else "")
            text += f"{cell:>20}"
        worst = max((off for off, _ in row["errors"].values()), default=-1.0)
        print(f"{row['name']:50}{text}   {worst:.2g}{'  WRONG' if row.get('wrong') else ''}")


def main() -> int:
    """Run all jobs, a few at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--limit", type=float, default=100)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
        return 0
    started = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    jobs: list[tuple[str, dict[str, Any]]] = [(v.name, asdict(v)) for v in VARIANTS]
    backends = [
        (
            f"backends, {heads=} {paged=} {size=} {window=} {causal=}",
            {"paged": paged, "heads": heads, "size": size, "window": window, "causal": causal},
        )
        for heads, size, window, causal in LAYERS
        for paged in (True, False)[: 1 if window or size == 256 else 2]
    ]
    jobs = jobs[:1] + backends + jobs[1:]
    jobs = [job for job in jobs if not given.only or any(text in job[0] for text in given.only)]
    rows: list[dict[str, Any]] = []

    def do(job: tuple[str, dict[str, Any]]) -> None:
        if time.perf_counter() - started < given.seconds:
            rows.extend(spawn(*job, given.limit))

    with ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(do, jobs))
    order = [name for name, _ in jobs]
    rows.sort(key=lambda row: order.index(row["name"]) if row["name"] in order else -1)
    table(rows)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row.get("wrong") or "failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
