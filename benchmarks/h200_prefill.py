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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

STEPS = {
    "1 x 8192": ([8192], [8192]),
    "4 x 2048": ([2048] * 4, [2048] * 4),
    "ragged 8192": ([3517, 412, 2703, 1560], [3517, 412, 2703, 1560]),
    "4 x 512 after 4096": ([512] * 4, [4608] * 4),
    "1 x 2048 after 30k": ([2048], [32768]),
}
CHECKS = {
    "fresh": ([1, 5, 127, 128, 129, 300, 1000], [1, 5, 127, 128, 129, 300, 1000]),
    "chunks": ([100, 512, 33, 1, 64, 700], [1000, 2001, 40, 513, 64, 3333]),
}
BACKENDS = ("TRITON_ATTN", "TRITON_ATTN portable", "FLASH_ATTN_V3")
LAYERS = (((32, 8), 128, 0), ((32, 8), 64, 0), ((32, 8), 128, 1024), ((16, 4), 256, 0))


@dataclass(frozen=True)
class Variant:
    """One compiled kernel; `page` 0: keys by token, not over pages."""

    name: str
    page: int = 16
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int = 0
    block_m: int = 128
    block_n: int = 128
    stages: int = 2
    turns: bool = True
    way: str = "whole"  # or in pieces, or one program a tile ("many")
    at_once: int = 8
    dtype: str = "bfloat16"
    lse: bool = False
    steps: tuple[str, ...] = tuple(STEPS)


BASE = Variant("pages of 16")
VARIANTS = (
    BASE,
    replace(BASE, name="pages of 16, a program a tile, 2 heads", way="many", at_once=2),
    replace(BASE, name="pages of 16, a program a tile, 1 head", way="many", at_once=1),
    replace(BASE, name="pages of 16, no turns", turns=False),
    replace(BASE, name="pages of 16, 64 keys, 4 stages", block_n=64, stages=4),
    replace(BASE, name="pages of 64", page=64),
    replace(BASE, name="pages of 256", page=256),
    replace(BASE, name="packed", page=0),
    replace(BASE, name="packed, a program a tile, 2 heads", page=0, way="many", at_once=2),
    replace(BASE, name="pieces", way="pieces"),
    replace(BASE, name="28/4 heads, lse", heads=28, kv_heads=4, lse=True),
    replace(BASE, name="28/4 heads, lse, pieces", heads=28, kv_heads=4, lse=True, way="pieces"),
    replace(BASE, name="8/8 heads, fp16", heads=8, dtype="float16", steps=("1 x 8192",)),
    replace(BASE, name="size 64", size=64, stages=3),
    replace(BASE, name="size 64, no turns", size=64, stages=3, turns=False),
    replace(BASE, name="size 64, 192 rows", size=64, stages=3, block_m=192),
    replace(BASE, name="size 64, pieces, lse", size=64, stages=3, way="pieces", lse=True),
    replace(BASE, name="window 1024", window=1024),
    replace(BASE, name="window 1024, packed", window=1024, page=0),
    replace(
        BASE, name="window 100, pieces", window=100, way="pieces", lse=True, steps=("1 x 8192",)
    ),
    replace(BASE, name="size 256", size=256, block_n=64, heads=16, kv_heads=4),
    replace(
        BASE, name="size 256, pieces", size=256, block_n=64, heads=16, kv_heads=4, way="pieces"
    ),
)


class Step:
    """Tensors of a step, and the tiles dealt out, the longest first."""

    def __init__(self, variant: Variant, queries: list[int], lens: list[int]):
        import numpy as np
        import torch
        from polyattn import LayerSpec
        from polyattn_triton.descriptors import described
        from polyattn_triton.prefill_hopper import prefill_hopper_kernel
        from polyattn_triton.schedule import Rates, Tiles, key_tiles, rows_of, stretches

        v, device = variant, "cuda"
        dtype = getattr(torch, v.dtype)
        self.variant, self.queries, self.lens = v, queries, lens
        self.group = v.heads // v.kv_heads
        total = sum(queries)
        page = v.page or 64
        blocks = [-(-n // page) for n in lens]
        count = sum(blocks) + 3
        order = torch.randperm(count)
        self.table = torch.full((len(lens), max(blocks) + 2), 1 << 29, dtype=torch.int32)
        stored = torch.full(
            (2, count, page, v.kv_heads, v.size), torch.nan, dtype=dtype, device=device
        )
        packed = torch.full(
            (2, sum(lens) + 5, v.kv_heads, v.size), torch.nan, dtype=dtype, device=device
        )
        self.keys: list[Any] = []
        at = first = 0
        for index, (length, held) in enumerate(zip(lens, blocks, strict=True)):
            ids = order[first : first + held]
            first += held
            self.table[index, :held] = ids.int()
            fresh = torch.randn(2, length, v.kv_heads, v.size, device=device).to(dtype)
            packed[:, at : at + length] = fresh
            padded = torch.full(
                (2, held * page, *fresh.shape[2:]), torch.nan, dtype=dtype, device=device
            )
            padded[:, :length] = fresh
            stored[:, ids.to(device)] = padded.view(2, held, page, *fresh.shape[2:])
            self.keys.append((fresh[0], fresh[1]))
            at += length
        self.table = self.table.to(device)
        self.query = torch.randn(total, v.heads, v.size, device=device).to(dtype)
        self.out = torch.full_like(self.query, torch.nan)
        self.lse = torch.full((total, v.heads), torch.nan, device=device)
        self.scale = v.size**-0.5
        kept = stored if v.page else packed
        box = min(page, v.block_n) if v.page else v.block_n
        self.kept = kept
        key, value = described(kept[0], box), described(kept[1], box)
        assert key is not None and value is not None
        q, n = np.array(queries), np.array(lens)
        seq, row = rows_of(q, self.group, v.block_m)
        last = np.minimum(row + v.block_m, q[seq] * self.group) - 1
        context = (n - q)[seq]
        spec = LayerSpec(
            num_heads=v.heads, num_kv_heads=v.kv_heads, head_size=v.size,
            sliding_window=v.window or None,
        )  # fmt: skip
        seen = key_tiles(
            spec, context + row // self.group, context + last // self.group, n[seq], v.block_n
        )
        longest = np.argsort(-seen, kind="stable")
        work = np.concatenate([seq[longest], row[longest]]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(q)]).astype(np.int32)
        key_starts = np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
        self.ints = [
            torch.from_numpy(a).to(device) for a in (n.astype(np.int32), starts, key_starts, work)
        ]
        lens_on, starts_on, key_starts_on, work_on = self.ints
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        strides = (
            *self.query.stride()[:2], *key[1], *value[1], *self.out.stride()[:2],
            self.lse.stride(0), self.table.stride(0),
        )  # fmt: skip
        split = v.way == "pieces"
        programs = max(1, sms // v.kv_heads) if split else min(sms, len(longest) * v.kv_heads)
        if v.way == "many":
            programs = len(longest) * v.kv_heads
        height = 2 * programs * v.kv_heads * v.block_m if split else 1
        self.parts = torch.full((height, v.size), torch.nan, device=device)
        self.part_lse = torch.full((height,), torch.nan, device=device)
        if split:
            tiles = Tiles(seq, row, seen)
            work_on = torch.from_numpy(stretches(tiles.keys, programs, Rates(1, 2)).work(tiles)).to(
                device
            )
        args = (
            self.query, self.out, self.lse, self.parts, self.part_lse,
            self.table, lens_on, starts_on, key_starts_on, work_on, self.scale, 1.0, *strides[:10],
            key[0], value[0], *strides[10:], len(longest),
            v.at_once if v.kv_heads % v.at_once == 0 else v.kv_heads,
            self.group, v.kv_heads, v.size, v.block_m, v.block_n, v.page or 1, bool(v.page), True,
            v.window, v.lse, split, v.stages, v.turns, 2 if v.size <= 128 else 1,
        )  # fmt: skip
        grid = (programs, v.kv_heads if split else 1, 1)

        def run() -> None:
            prefill_hopper_kernel[grid](*args, num_warps=4)
            if split:
                self.merge(programs, work_on, starts_on)

        self.run = run

    def merge(self, programs: int, work: Any, starts: Any) -> None:
        """Merge the pieces' parts."""
        from polyattn_triton.decode import merge_kernel
        from polyattn_triton.launch import merge_constants, merge_rows

        v, one = self.variant, self.part_lse
        constants = merge_constants(self.group, v.size, v.block_m, True, False, False, v.lse, False)
        merge_kernel[(programs, -(-v.block_m // merge_rows(v.block_m, v.size)), v.kv_heads)](
            self.parts, self.part_lse, self.out, self.lse, one, one, one, starts, work, 1.0,
            *self.out.stride()[:2], self.lse.stride(0), *constants, num_warps=4,
        )  # fmt: skip

    def flops(self) -> float:
        """Multiplications and additions of the two products, what the mask hides left out."""
        pairs = sum(
            q * (n - q) + q * (q + 1) / 2 for q, n in zip(self.queries, self.lens, strict=True)
        )
        return 4.0 * pairs * self.variant.heads * self.variant.size

    def error(self, rows: int) -> tuple[float, float]:
        """The worst error of up to `rows` tokens' heads a sequence, and the LSE's, in float64."""
        import torch

        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.run()
        torch.cuda.synchronize()
        worst = worst_lse = 0.0
        token = 0
        for (key, value), count, length in zip(self.keys, self.queries, self.lens, strict=True):
            picked = torch.unique(
                torch.cat([torch.randperm(count)[:rows], torch.tensor([0, count - 1])])
            )
            for part in picked.cuda().split(16):
                query = self.query[token + part].double().unflatten(1, (-1, self.group))
                scores = torch.einsum("thgd,khd->thgk", query, key.double()) * self.scale
                place = torch.arange(length, device="cuda") - (length - count + part)[:, None]
                hidden = place > 0
                if self.variant.window:
                    hidden |= place <= -self.variant.window
                scores.masked_fill_(hidden[:, None, None], -torch.inf)
                wanted = torch.einsum("thgk,khd->thgd", scores.softmax(-1), value.double()).flatten(
                    1, 2
                )
                got = self.out[token + part].double()
                off = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                worst = max(worst, float(off.nan_to_num(nan=9e9).max()))
                if self.variant.lse:
                    lse = scores.logsumexp(-1).flatten(1, 2)
                    off = (self.lse[token + part].double() - lse).abs()
                    worst_lse = max(worst_lse, float(off.nan_to_num(nan=9e9).max()))
            token += count
        if not bool(torch.isfinite(self.out).all()):
            worst = 9e9
        return worst, worst_lse


@contextmanager
def device(how: int) -> Iterator[None]:
    """Use the device: with others (`LOCK_SH`), or alone, for the clock (`LOCK_EX`)."""
    with (Path(tempfile.gettempdir()) / "h200_prefill.lock").open("w") as lock:
        fcntl.flock(lock, how)
        yield


def of_variant(variant: Variant) -> dict[str, Any]:
    """Check a variant, then time it."""
    import torch
    from polyattn.checking.tolerance import TOLERANCES

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
    paged: bool, heads: tuple[int, int], size: int, window: int
) -> list[dict[str, Any]]:
    """Time the backends on the same steps, in turns; FlashAttention's keys lie in its own blocks."""
    import h200_ragged as ragged
    import torch
    from polyattn import LayerSpec

    spec = LayerSpec(
        num_heads=heads[0], num_kv_heads=heads[1], head_size=size, sliding_window=window or None
    )
    end = f" {'paged' if paged else 'packed'}, {heads[0]}/{heads[1]} of {size}"
    end += f", window {window}" * bool(window)
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name + end, "us": {}, "errors": {}} for name in BACKENDS
    }
    for step, (queries, lens) in STEPS.items():
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
                if not window:  # its reference knows none
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
    print(f"\n{'us':50}" + "".join(f"{name:>20}" for name in STEPS) + "   worst error")
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:50}failed: {row['failed'].splitlines()[-1][:150]}")
            continue
        text = ""
        for name in STEPS:
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
            f"backends, {paged=} {size=} {window=}",
            {"paged": paged, "heads": heads, "size": size, "window": window},
        )
        for heads, size, window in LAYERS
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
