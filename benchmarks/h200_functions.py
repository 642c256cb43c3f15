"""A variant's functions inside Hopper's own prefill: right, how fast, and how long they take to compile.

    python benchmarks/h200_functions.py [--seconds 300] [--out FILE.json] [--only TEXT ...] [--ahead]

Rows of `h200_variants.py` by the kernel for Hopper and by the portable one, beside each other: results of
ragged prompts, chunks after a context, windows, pieces and layers without causality are held to float64,
and to the portable kernel's whole output; 4 x 4,096 is timed. Then groups are built in new processes with
an empty cache, and again with what the first left; the seven examples and a source by hand run on the
device. `hidden`: 64 decodes over 4,096 keys whose masks hide most, half or none, by lists of key tiles
and without. What fails is a row that says so. With TRITON_INTERPRET=1 the portable half is rehearsed.
`--ahead`: what the checked rows run is compiled before by processes side by side, one for each layer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from h200_variants import (
    BASE,
    DECODE,
    DEVICE,
    LONG,
    PREFILL,
    REHEARSAL,
    VARIANTS,
    Case,
    synchronize,
)
from polyattn import CustomMask, LayerGroup, register_variant, select
from polyattn.families.attention.alibi import alibi_slopes
from timing import kernel_us

HERE = Path(__file__).parent
FAMILIES = HERE.parent / "tests/families"
STEPS: dict[str, list[tuple[int, int]]] = {
    "ragged": [(n, n) for n in (16, 48, 128, 144, 304, 1008)],
    "chunks": [(96, 2000), (512, 2048), (32, 48), (700, 3344)],
    "pieces": [(128, 8704)],
}
if REHEARSAL:
    STEPS = {"ragged": [(16, 16), (32, 48)]}
FIELDS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"sliding_window": 200},
    "not causal": {"causal": False},
}
COMPILED = (
    "prefill plain", "prefill FlashSigmoid", "prefill soft cap generated", "prefill ALiBi generated",
    "prefill documents", "prefill relative bias", "decode FlashSigmoid",
)  # fmt: skip
ROWS: list[dict[str, Any]] = []


def functions() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return what sets each variant on a spec, and what its layer is given."""
    slopes = alibi_slopes(32).to(DEVICE)
    return {
        "FlashSigmoid": ({"variant": "flash_sigmoid"}, {"sigmoid_bias": -8.3}),
        "soft cap": ({"variant": "cap"}, {}),
        "ALiBi": ({"variant": "alibi_function"}, {"slopes": slopes}),
        "temperature": ({"variant": "tempered"}, {"temperature": slopes + 0.5}),
        "plain": ({}, {}),
    }


def attempt(name: str, work: Callable[[], dict[str, Any]]) -> None:
    """Add a row; what fails is one that says so."""
    try:
        ROWS.append({"row": name} | work())
    except Exception as problem:
        traceback.print_exc()
        ROWS.append({"row": name, "failed": f"{type(problem).__name__}: {str(problem)[:300]}"})
    print(json.dumps(ROWS[-1]), flush=True)
    if not REHEARSAL:
        torch.cuda.empty_cache()


def portable(case: Case) -> Case:
    """Let a case's layer plan for the portable kernel alone."""
    case.group.planner.chooser.chosen["prefill"].backend.hopper = None  # type: ignore[attr-defined]
    case.plan = case.group.plan(case.batch)
    return case


def way(case: Case) -> str:
    """Return which kernel a case's prefill is planned for."""
    plans = [call.plan for call in case.plan._calls]  # type: ignore[attr-defined]
    return ", ".join(f"{'hopper' if plan.at_once else 'portable'} {plan.way}" for plan in plans)


def check(
    fields: dict[str, Any], given: dict[str, Any], pairs: list[tuple[int, int]]
) -> dict[str, Any]:
    """Compare with float64, and with the portable kernel."""
    case = Case(BASE.replace(**fields), "TRITON_ATTN", pairs, layer=given)
    case()
    error, found, ran = case.error(), case.out.float().clone(), way(case)
    case.out.fill_(torch.nan)
    portable(case)()
    apart = float((case.out.float() - found).norm() / found.norm())
    right = error < 1.5e-2 and apart < 1e-2
    return {
        "ran": ran,
        "error": float(f"{error:.2g}"),
        "apart": float(f"{apart:.2g}"),
        "right": right,
    }


def timed(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Time 4 x 4,096 by both kernels."""
    case = Case(BASE.replace(**fields), "TRITON_ATTN", PREFILL, layer=given)
    case()
    ran = way(case)
    ours = 0.0 if REHEARSAL else kernel_us(case, 10)
    other = portable(case)
    other()
    theirs = 0.0 if REHEARSAL else kernel_us(other, 10)
    return {
        "ran": ran,
        "us": round(ours, 1),
        "portable_us": round(theirs, 1),
        "build_s": round(case.build_s, 2),
    }


def documents_of(length: int) -> dict[str, Any]:
    """Return what a step of decodes brings of documents so long."""
    row = torch.arange(LONG, device=DEVICE).div(length, rounding_mode="floor").int()
    return {"step": {"document": row.expand(len(DECODE), LONG).contiguous()}}


def hidden() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return what masks a layer has, and what a step of decodes brings of them."""
    last = torch.arange(LONG) // (LONG // 8) == 7
    last[: LONG // 64] = True  # the first keys, and the last eighth
    halves = torch.rand(LONG, generator=torch.Generator().manual_seed(0)) < 0.5
    of_step = {
        name: {"mask": CustomMask.pack([row[None]] * len(DECODE), "all")}
        for name, row in (("a mask's eighth", last), ("a mask's random half", halves))
    }
    return {
        "an eighth": ({"variant": "one_document"}, documents_of(LONG // 8)),
        "all seen": ({"variant": "one_document"}, documents_of(LONG)),
        **{name: ({"mask": "custom"}, given) for name, given in of_step.items()},
    }


def left_out(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Time decodes by lists of key tiles, and over all keys, beside each other."""
    case = Case(BASE.replace(**fields), "TRITON_ATTN", DECODE, **given)
    case()
    error, found, ran = case.error(), case.out.float().clone(), way(case)
    us = 0.0 if REHEARSAL else kernel_us(case, 10)
    began = time.perf_counter()
    case.plan = case.group.plan(case.batch)
    synchronize()
    plan_ms = 1e3 * (time.perf_counter() - began)
    backend = case.group.planner.chooser.chosen["decode"].backend  # type: ignore[attr-defined]
    backend.lister = None
    case.plan = case.group.plan(case.batch)
    case.out.fill_(torch.nan)
    case()
    apart = float((case.out.float() - found).norm() / found.norm())
    whole = 0.0 if REHEARSAL else kernel_us(case, 10)
    return {
        "ran": ran, "error": float(f"{error:.2g}"), "apart": float(f"{apart:.2g}"),
        "right": error < 1.5e-2 and apart < 1e-2, "us": round(us, 1), "all_keys_us": round(whole, 1),
        "plan_ms": round(plan_ms, 2),
    }  # fmt: skip


def compile_ahead(layers: list[str]) -> None:
    """Build layers (a function, and fields' label), each in a process of its own, at the same time."""
    began = time.perf_counter()
    building = [
        subprocess.Popen([sys.executable, __file__, "--build", layer], stdout=subprocess.DEVNULL)
        for layer in layers
    ]
    failed = [name for name, one in zip(layers, building, strict=True) if one.wait()]
    print(f"{len(layers)} layers ahead, {time.perf_counter() - began:.1f} s; failed: {failed}")


def build(layer: str) -> None:
    """Compile all that a layer runs; one without functions does so as it is called."""
    name, _, label = layer.partition(", ")
    fields, given = functions()[name]
    fields = fields | FIELDS[label]
    if "variant" in fields:
        LayerGroup(select(BASE.replace(**fields), DEVICE, backend="TRITON_ATTN", verify=False))
        return
    for pairs in STEPS.values():
        check(fields, given, pairs)


def compiled(name: str) -> dict[str, Any]:
    """Build a row's group in two processes, one after another; the first finds an empty cache."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            ran = subprocess.run(
                [sys.executable, str(HERE / "h200_variants.py"), "--only", name],
                env=os.environ | {"TRITON_CACHE_DIR": cache}, cwd=HERE, capture_output=True, text=True,
                timeout=90, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr[-300:]
            found.append(json.loads(ran.stdout.splitlines()[-1]))
    return {"new": found[0], "again": found[1]}


def by_script(script: Path, *words: str) -> dict[str, Any]:
    """Run a script of the tests on the device and return the last it says."""
    known = f"{FAMILIES}:{FAMILIES.parent}:{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=150, check=False,
        env=os.environ | {"PYTHONPATH": known},
    )  # fmt: skip
    lines = ran.stdout.splitlines()
    return {
        "lines": len(lines),
        "wrong": [line for line in lines if "WRONG" in line],
        "refused": [line for line in lines if "refused" in line],
        "last": lines[-1:],
        "stderr": ran.stderr[-200:] if not lines else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", default="functions.json")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names hold one of these")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--build", help="compile one layer's kernels, no more")
    args = parser.parse_args()
    until = time.time() + args.seconds
    for variant in VARIANTS:
        register_variant(variant)
    if args.build:
        build(args.build)
        return
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for name, (fields, given) in functions().items():
        jobs.append((f"4 x 4,096 {name}", lambda f=fields, g=given: timed(f, g)))  # type: ignore[misc]
    layer_of: dict[str, str] = {}
    for label, more in FIELDS.items():  # each function each way first
        for name, (fields, given) in functions().items():
            for step, pairs in STEPS.items():
                if name in ("FlashSigmoid", "ALiBi") or not label:
                    title = f"{name} {step} {label}".strip()
                    layer_of[title] = f"{name}, {label}"
                    jobs.append((title, lambda f=fields | more, g=given, p=pairs: check(f, g, p)))  # type: ignore[misc]
    for name, (fields, given) in hidden().items():
        jobs.append((f"hidden {name}", lambda f=fields, g=given: left_out(f, g)))  # type: ignore[misc]
    if not REHEARSAL:
        jobs += [(f"compiling {name}", lambda n=name: compiled(n)) for name in COMPILED]  # type: ignore[misc]
        for backend, dtype in (
            ("TRITON_ATTN", "bfloat16"),
            ("FLEX_ATTENTION", "bfloat16"),
            ("TORCH_SDPA", "bfloat16"),
        ):
            jobs.append((f"examples on {backend}", lambda b=backend, d=dtype: by_script(
                FAMILIES / "variant_examples.py", b, "cuda", d)))  # type: ignore[misc]  # fmt: skip
        jobs.append(
            (
                "a source by hand",
                lambda: by_script(FAMILIES / "device_written.py", "TRITON_ATTN", "cuda"),
            )
        )
    jobs = [job for job in jobs if not args.only or any(word in job[0] for word in args.only)]
    if args.ahead:
        compile_ahead(sorted({layer_of[name] for name, _ in jobs if name in layer_of}))
    for name, work in jobs:
        if time.time() > until:
            ROWS.append({"row": name, "failed": "no time left"})
        else:
            attempt(name, work)
        Path(args.out).write_text(json.dumps(ROWS, indent=1) + "\n")
    wrong = [
        row for row in ROWS if "failed" in row or row.get("right") is False or row.get("wrong")
    ]
    print(f"\n{len(ROWS)} rows, {len(wrong)} of them failed or wrong")
    for row in ROWS:
        print({k: v for k, v in row.items() if v not in ("", [])})


if __name__ == "__main__":
    main()
