"""Sweeps TRITON_ATTN's launch configurations on this GPU and prints the best of each shape.

    python benchmarks/tune_triton.py [--heads NAME ...] [--workers N]

Every variant is compiled first, by several processes; then each is timed alone, decode with half, as
many and twice as many splits as are planned (marked *). The winners go into
`polyattn_triton/configs.py` by hand.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from polyattn import LayerSpec, select
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.tools.cli.benching import full_step, sampled_error
from timing import kernel_us

SPECS = {
    "128": LayerSpec(num_heads=32, num_kv_heads=8, head_size=128),
    "64": LayerSpec(num_heads=64, num_kv_heads=8, head_size=64),
    "256": LayerSpec(num_heads=16, num_kv_heads=8, head_size=256),
    "71 x 64": LayerSpec(num_heads=71, num_kv_heads=1, head_size=64),
    "32 / 32 x 96": LayerSpec(num_heads=32, num_kv_heads=32, head_size=96),
    "128, fp8": LayerSpec(
        num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8_e4m3"
    ),
}  # fmt: skip
DECODE = [(1, 8192), (4, 8192), (16, 4096), (32, 4096), (64, 4096), (128, 8192)]
PREFILL = [(4, 512, 4608), (1, 512, 8192), (8, 128, 4096), (1, 4096, 4096)]
Sizes = tuple[int, ...]


def decode_configs(spec: LayerSpec) -> list[Sizes]:
    """Tiles of rows and keys, warps, stages."""
    rows = 128 if spec.gqa_ratio > 16 else 16
    wide = spec.head_size > 128
    found = [(16, 2, 3), (16, 2, 4), (32, 2, 2), (32, 2, 3), (32, 4, 3)] if wide else [
        (32, 2, 3), (32, 2, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 4, 3),
    ]  # fmt: skip
    return [(rows, keys, max(warps, rows // 32), stages) for keys, warps, stages in found]


def prefill_configs(spec: LayerSpec) -> list[Sizes]:
    """Tiles of rows and keys, warps, stages."""
    wide = spec.head_size > 128
    return [(128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)] if wide else [
        (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 4, 2), (128, 32, 4, 4),
    ]  # fmt: skip


def make(name: str, phase: str, config: Sizes, shape: Sizes) -> tuple[AttentionWorkload, Any]:
    """Return a step of `shape` (sequences, [new tokens], length), and the backend that runs it."""
    from polyattn_triton.configs import Config

    selection = select(SPECS[name], "cuda", backend="TRITON_ATTN")
    new = shape[1] if phase == "prefill" else 1
    step = full_step(selection, list(zip([new] * shape[0], [shape[-1]] * shape[0], strict=True)))
    backend: Any = step.plan.calls[0].backend
    chosen = Config(*config)
    if phase == "decode":
        backend.decode_config = backend.few_config = chosen
    else:
        backend.prefill_config = backend.paged_config = chosen
    assert step.plan
    return step, backend


def compile_one(job: tuple[str, str, Sizes]) -> str:
    name, phase, config = job
    small: list[Sizes] = [(1, 1024), (600, 256)]
    if phase == "prefill":
        small = [(1, 128, 640), (1, 256, 256)]
    try:
        for shape in small:
            make(name, phase, config, shape)[0].run()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def set_splits(step: AttentionWorkload, backend: Any, splits: int) -> None:
    """Have the step planned with so many splits: twice as many as are planned have room."""
    backend.splits = lambda batch: splits
    assert step.plan


def time_decode(name: str, config: Sizes, shape: Sizes) -> list[tuple[float, str]]:
    step, backend = make(name, "decode", config, shape)
    sampled_error(step)
    planned, found = step.plan.calls[0].plan.splits, []
    for splits in sorted({max(1, planned // 2), planned, min(128, 2 * planned)}):
        set_splits(step, backend, splits)
        mark = "*" if splits == planned else ""
        found.append(
            (
                kernel_us(step.but(key=None, value=None).call, repeats=9),
                f"{config}, {splits} splits{mark}",
            )
        )
    return found


def time_prefill(name: str, config: Sizes, shape: Sizes) -> list[tuple[float, str]]:
    step, _ = make(name, "prefill", config, shape)
    sampled_error(step)
    return [(kernel_us(step.call, repeats=7), str(config))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", nargs="+", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    phases = (
        ("decode", decode_configs, DECODE, time_decode),
        ("prefill", prefill_configs, PREFILL, time_prefill),
    )
    jobs = [
        (name, phase, config)
        for name in args.heads
        for phase, configs, _, _ in phases
        for config in configs(SPECS[name])
    ]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        problems = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for job, problem in problems.items():
        if problem:
            print(*job, problem)
    for name in args.heads:
        for phase, configs, shapes, time in phases:
            for shape in shapes:
                found = [
                    timed
                    for config in configs(SPECS[name])
                    if not problems[name, phase, config]
                    for timed in time(name, config, shape)
                ]
                best = "; ".join(f"{us:.1f} us {what}" for us, what in sorted(found)[:5])
                print(f"{name}, {phase}, {shape}: {best}", flush=True)


if __name__ == "__main__":
    main()
