"""Times variants of the decode over narrow caches, and prefills both ways. An experiment."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import replace

import torch
from measuring import build, error_of
from polyattn.kernel import Frame, KVCache
from polyattn.workload.clock import Clock
from polyattn.workload.pages import fill
from polyattn_triton import planning
from polyattn_triton.configs import Config
from polyattn_triton.hopper import packing, widening
from suites.eight_bit import Other
from table import LLAMA, K, Row

SPEC = LLAMA.replace(block_size=16)
STEPS = {
    "1x1k": [(1, 1024)],
    "1x8k": [(1, 8192)],
    "4x8k": [(1, 8192)] * 4,
    "64x4k": [(1, 4096)] * 64,
    "1x128k": [(1, 128 * K)],
    "16x4k": [(1, 4096)] * 16,
}


H = 1  # heads first
FOUR = ("int4", "nvfp4")


def decodes():
    """Yield (format, step, stages, registers, splits, heads first and probe, portable config, layout)."""
    for row in ((3, 168, 3), (3, 168, -12), (4, 255, 2), (2, 168, 3), (4, 168, 3), (3, 216, 2), (2, 128, 4),
                (3, 255, 2), (3, 168, 6)):  # fmt: skip
        for form in FOUR:
            yield (form, "64x4k", *row, H, None, "HND")
    for row in ((3, 168, 2), (2, 168, 3), (4, 255, 1), (3, 168, -9)):
        yield ("fp8_e4m3", "64x4k", *row, H, None, "HND")
    yield ("int4", "64x4k", 3, 168, 3, 3, None, "HND")
    yield ("fp8_e4m3", "64x4k", 3, 168, 2, 3, None, "HND")
    for row in ((3, 168, 2), (3, 168, -9), (4, 255, -6), (2, 168, -12)):
        yield ("fp8_e4m3", "64x4k", *row, H, None, "NHD")
    for row in ((3, 168, 3), (4, 255, 2), (3, 255, 2), (5, 255, 2), (3, 168, -12), (3, 168, -8)):
        for form in FOUR:
            yield (form, "64x4k", *row, H, None, "NHD")
    for layout in ("HND", "NHD"):
        for splits in (96, 128, 64, 192, -12):
            for form in FOUR:
                yield (form, "1x128k", 3, 168, splits, H, None, layout)
        for splits in (83, 64, 128, -8):
            yield ("fp8_e4m3", "1x128k", 3, 168, splits, H, None, layout)
    yield ("fp8_e4m3", "1x128k", 0, 0, 16, 0, (16, 64, 4, 3), "NHD")
    for step, splits, portable in (
        ("1x8k", (32, 48, 64), 16), ("4x8k", (16, 24, 32), 12), ("16x4k", (6, 8, 9), 3), ("1x1k", (8, 16), 8),
    ):  # fmt: skip
        for form in ("fp8_e4m3", "int4"):
            for split in splits:
                yield (form, step, 3, 168, split, H, None, "HND" if form == "int4" else "NHD")
        yield ("fp8_e4m3", step, 0, 0, portable, 0, (16, 64, 4, 3), "NHD")


class Decodes:
    def __init__(self, device):
        self.device, self.clock, self.works = device, Clock(device), {}

    def run(self, what, timed):
        form, step, stages, registers, splits, heads_first, config, layout = what
        packing.HEADS_FIRST, packing.PROBE = bool(heads_first & 1), heads_first >> 1
        packing.OPTIONS = {"num_warps": 1, "maxnreg": registers}
        key = form, step, layout
        if key not in self.works:
            self.works.clear()
            packing.PACKED = replace(packing.PACKED, num_stages=3)
            row = Row("", SPEC, STEPS[step], {})
            other = Other("", "TRITON_ATTN", {"kv_cache_dtype": form})
            self.works[key] = work = build(row, other, self.device)
            if layout != work.cache.format.layout:
                there = replace(work.cache.format, layout=layout)
                work.cache = KVCache.allocate(there, work.cache.num_blocks, self.device)
                fill(work.cache)
        work = self.works[key]
        backend = work.plan.calls[0].backend
        packing.PACKED = replace(packing.PACKED, num_stages=stages or 3)
        usual = backend.packed if backend.packed is None else packing.PACKED
        if config is not None:
            usual = Config(*config)
        backend.packed = packing.PACKED if config is None else None
        backend.decode_config = backend.few_config = usual
        backend.by_one = 0 if config is None else 16
        backend.splits = lambda batch: max(splits, 1)
        backend._reserve(backend.rows, 16384)
        backend._sites.clear()
        with contextlib.ExitStack() as stack:
            for name, there in (
                ("leaves_tail", lambda *_: splits < 0), ("fitting", lambda *_: -splits),
            ):  # fmt: skip
                stack.callback(setattr, planning, name, getattr(planning, name))
                setattr(planning, name, there)
            backend._residents.clear()
            plan = backend.plan_rows(work.batch.copy())
        frame = Frame(work.query, None, None, work.cache, work.layer.params, work.out, None)

        def call():
            backend.run(plan, frame)

        call()
        torch.cuda.synchronize()
        if not timed:
            return None
        return {"way": plan.way, "grid": plan.grid, "error": round(error_of(work, call), 5),
                "us": round(self.clock.us(call), 1)}  # fmt: skip


def prefills():
    steps = [[(n, n)] for n in (256, 512, 1024, 2048, 4096, 8192)] + [
        [(256, 4096)], [(64, 4096)], [(128, 8192)], [(512, 512)] * 8,
    ]  # fmt: skip
    for form in ("nvfp4", "fp8_e4m3", "mxfp4"):
        for step in steps:
            for way in ("copies", "direct"):
                yield form, step, way


class Prefills:
    def __init__(self, device):
        self.device, self.clock, self.works = device, Clock(device), {}

    def run(self, what, timed):
        form, step, way = what
        widening.ROWS_A_KEY, widening.LEAST = (
            (-(1 << 40), -(1 << 60)) if way == "copies" else (1 << 40, 1)
        )
        key = form, tuple(step)
        if key not in self.works:
            self.works.clear()
            other = Other("", "TRITON_ATTN", {"kv_cache_dtype": form})
            self.works[key] = build(Row("", SPEC, step, {}), other, self.device)
        work = self.works[key]
        backend = work.plan.calls[0].backend
        plan = backend.plan_rows(work.batch.copy())
        assert (plan.widening is not None) is (way == "copies")
        frame = Frame(work.query, None, None, work.cache, work.layer.params, work.out, None)

        def call():
            backend.run(plan, frame)

        call()
        torch.cuda.synchronize()
        if not timed:
            return None
        return {"way": plan.way, "us": round(self.clock.us(call), 1)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["decodes", "prefills"])
    parser.add_argument("--warm", default="")
    parser.add_argument("--seconds", type=float, default=60)
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    made = {"decodes": (decodes, Decodes), "prefills": (prefills, Prefills)}[chosen.what]
    every = list(made[0]())
    if chosen.warm:
        mine, of = map(int, chosen.warm.split("/"))
        every = every[mine::of]
    runner = made[1](torch.device("cuda"))
    for what in every:
        if time.monotonic() > end:
            print("the time was up", flush=True)
            break
        try:
            with torch.no_grad():
                result = runner.run(what, not chosen.warm)
        except Exception as problem:
            result = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
        if result is not None:
            print(json.dumps([what, result]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
