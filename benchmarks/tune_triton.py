"""Sweeps TRITON_ATTN's launch configurations on this GPU and prints the best of each shape.

    python benchmarks/tune_triton.py [--out FILE.json] [--quick]

Every variant is compiled first, by several processes; then each is timed alone. The winners go into
`polyattn_triton/configs.py` by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from polyattn import LayerSpec, select
from polyattn.cli.benching import Step
from polyattn.cost import batch_cost
from timing import kernel_us

SPECS = {
    "128": LayerSpec(num_heads=32, num_kv_heads=8, head_size=128),
    "64": LayerSpec(num_heads=64, num_kv_heads=8, head_size=64),
    "256": LayerSpec(num_heads=16, num_kv_heads=8, head_size=256),
}
DECODE = [(1, 8192), (16, 4096), (64, 4096), (128, 8192)]
PREFILL = [(1, 2048, 2048), (1, 8192, 8192), (4, 512, 4608)]


def decode_configs(head: str) -> list[tuple[int, ...]]:
    blocks = {"64": (64, 128), "128": (32, 64, 128), "256": (16, 32, 64)}[head]
    return list(itertools.product((16,), blocks, (2, 4), (2, 3)))


def prefill_configs(head: str) -> list[tuple[int, ...]]:
    blocks = {"64": (64, 128), "128": (32, 64, 128), "256": (32, 64)}[head]
    return [
        c
        for c in itertools.product((64, 128), blocks, (4, 8), (2, 3))
        if not (head == "256" and c[1] == 64 and c[3] > 2)
    ]


def make(head: str, phase: str, config: tuple[int, ...], shape: tuple[int, ...]) -> Step:
    from polyattn_triton.configs import Config

    selection = select(SPECS[head], "cuda", backend="TRITON_ATTN")
    backend: Any = getattr(selection.runtime, phase)
    for kind in ("decode",) if phase == "decode" else ("prefill", "paged"):
        setattr(backend, f"{kind}_config", Config(*config))
    if phase == "decode":
        queries, lens = [1] * shape[0], [shape[1]] * shape[0]
    else:
        queries, lens = [shape[1]] * shape[0], [shape[2]] * shape[0]
    return Step(selection, queries, lens, torch.device("cuda"))


def compile_one(job: tuple[str, str, tuple[int, ...], tuple[int, ...]]) -> str:
    try:
        make(*job).run()
        torch.cuda.synchronize()
        return "ok"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--heads", nargs="+", default=["128"])
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    small: dict[str, tuple[int, ...]] = {"decode": (4, 512), "prefill": (1, 300, 900)}
    configs = {"decode": decode_configs, "prefill": prefill_configs}
    jobs = [(h, p, c, small[p]) for h in args.heads for p in configs for c in configs[p](h)]
    jobs += [(h, "prefill", c, (1, 300, 300)) for h in args.heads for c in prefill_configs(h)]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        state = dict(
            zip(((j[0], j[1], j[2]) for j in jobs), pool.map(compile_one, jobs), strict=True)
        )
    print({reason: list(state.values()).count(reason) for reason in set(state.values())})
    rows = []
    for head in args.heads:
        for phase, shapes in (("decode", DECODE), ("prefill", PREFILL)):
            for shape in shapes:
                found = []
                for config in configs[phase](head):
                    if state[head, phase, config] != "ok":
                        continue
                    step = make(head, phase, config, shape)
                    try:
                        us = kernel_us(step.run, repeats=7)
                    except Exception:  # out of shared memory
                        continue
                    cost = batch_cost(SPECS[head], step.batch)
                    row = {"head": head, "phase": phase, "shape": shape, "config": config, "us": us}
                    row |= {"tb_s": cost.bytes / us / 1e6, "tflop_s": cost.flops / us / 1e6}
                    found.append(row)
                    del step
                found.sort(key=lambda r: r["us"])
                rows += found
                for row in found[:4]:
                    print(
                        f"{head} {phase} {shape} {row['config']}: {row['us']:.1f} us, "
                        f"{row['tb_s']:.2f} TB/s, {row['tflop_s']:.0f} TFLOP/s", flush=True
                    )  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
