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
from polyattn.kernel import Frame
from polyattn.workload.clock import Clock
from polyattn_triton import planning
from polyattn_triton.configs import Config
from polyattn_triton.hopper import packing, widening
from suites.eight_bit import Other
from table import LLAMA, K, Row

SPEC = LLAMA.replace(block_size=16)
STEPS = {"64x4k": [(1, 4096)] * 64, "1x128k": [(1, 128 * K)], "16x4k": [(1, 4096)] * 16}


def decodes():
    """Yield (format, step, packed, stages, registers, splits, heads first, portable config)."""
    four = [
        (3, 168, 3, 0), (3, 168, -12, 0), (3, 168, 3, 1), (4, 168, 3, 0), (2, 168, 3, 0), (3, 128, 4, 0), (2, 128, 4, 0),
        (3, 128, 4, 1), (3, 168, 6, 0), (3, 216, 2, 0), (4, 255, 2, 0), (3, 168, 12, 0),
    ]  # fmt: skip
    for row in four:
        for form in ("int4", "nvfp4"):
            yield (form, "64x4k", *row, None)
    eight = [
        (3, 168, 2, 0), (3, 168, 2, 1), (2, 168, 3, 0), (2, 128, 3, 0), (2, 160, 3, 1), (4, 255, 1, 0),
        (4, 216, 1, 0), (3, 216, 2, 0), (3, 168, 4, 0), (3, 168, 3, 0), (5, 255, 1, 0), (6, 255, 1, 0),
        (6, 255, 1, 1), (3, 168, -8, 0), (6, 255, -4, 0), (4, 216, -6, 0), (3, 168, -9, 0),
    ]  # fmt: skip
    for row in eight:
        yield ("fp8_e4m3", "64x4k", *row, None)
    for form in ("int4", "nvfp4", "fp8_e4m3"):
        for probe in (2, 4, 3):  # copies alone, products alone, copies alone heads first
            yield (form, "64x4k", 3, 168, 2 if form == "fp8_e4m3" else 3, probe, None)
    for config, splits in (
        ((16, 64, 2, 3), 1), ((16, 64, 2, 4), 1), ((16, 64, 2, 5), 1), ((16, 64, 2, 2), 1),
        ((16, 64, 1, 3), 1), ((16, 32, 1, 4), 2), ((16, 32, 1, 3), 2), ((16, 128, 2, 2), 1),
        ((16, 128, 4, 2), 1), ((16, 64, 4, 3), 1), ((16, 64, 2, 3), 2), ((16, 32, 2, 4), 1),
    ):  # fmt: skip
        yield ("fp8_e4m3", "64x4k", 0, 0, splits, 0, config)
    for splits in (96, 128, 64, 192, 48, -12, -8):
        for form in ("int4", "nvfp4"):
            yield (form, "1x128k", 3, 168, splits, 0, None)
    for splits in (64, 96, 128, 32, -8, -4):
        yield ("fp8_e4m3", "1x128k", 3, 168, splits, 0, None)
    for splits in (16, 32):
        yield ("fp8_e4m3", "1x128k", 0, 0, splits, 0, (16, 64, 4, 3))
    for form in ("int4", "nvfp4", "fp8_e4m3"):
        for splits in (8, 12):
            yield (form, "16x4k", 3, 168, splits, 0, None)
    yield ("fp8_e4m3", "16x4k", 0, 0, 3, 0, (16, 64, 4, 3))


class Decodes:
    def __init__(self, device):
        self.device, self.clock, self.works = device, Clock(device), {}

    def run(self, what, timed):
        form, step, stages, registers, splits, heads_first, config = what
        packing.HEADS_FIRST, packing.PROBE = bool(heads_first & 1), heads_first >> 1
        packing.OPTIONS = {"num_warps": 1, "maxnreg": registers}
        if (form, step) not in self.works:
            self.works.clear()
            packing.PACKED = replace(packing.PACKED, num_stages=3)
            row = Row("", SPEC, STEPS[step], {})
            other = Other("", "TRITON_ATTN", {"kv_cache_dtype": form})
            self.works[form, step] = build(row, other, self.device)
        work = self.works[form, step]
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
        widening.ROWS_A_KEY, widening.LEAST = (-(1 << 40), -(1 << 60)) if way == "copies" else (1 << 40, 1)
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
