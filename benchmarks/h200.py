"""The matrix of backends on one GPU: models x kinds of steps, with the selector's choice.

    python benchmarks/h200.py --out DIR [--models NAME ...] [--backends NAME ...] [--keep NAME ...]

With `--backends` only these are timed, and their rows are added to the matrix that is in DIR: for
libraries that can't be installed beside the others. With `--keep` the rows of these backends in DIR's
matrix are kept. Both are marked as of another run.
Device times with a cold L2 (see `timing.py`), the median of ten; each cell's result was checked on
one token against the float64 reference. Writes matrix.json and bars.json; `report.py` draws them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from floor import read_us
from polyattn import LayerSpec, Role, discover, register, select
from polyattn.errors import PolyattnError
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.plugin import hookimpl
from polyattn.runtime.step.cost import batch_cost
from polyattn.tools.cli.benching import full_step, measure_limits, sampled_error
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.cli.models import bundled
from timing import graph_us, host_us, kernel_us, latencies_us

MODELS = [
    "llama-3.1-8b", "llama-3.1-70b", "mistral-7b-v0.1", "phi-3-mini-4k", "gpt-oss-20b", "falcon-7b",
    "lfm2-1.2b", "gemma-2-9b", "gemma-3-12b",
]  # fmt: skip
STEPS = {
    "decode": ("64q1s4k", 0),
    "prefill": ("q4k", 0),
    "chunked": ("4q512s4k", 0),
    "mixed": ("32q1s2k_2q1k", 0),
    "shared prefix": ("32q1s5k", 4096),
}
DEVICE = torch.device("cuda")
CUDA_CORES = "FLASHINFER on CUDA cores"
"""As its decode wrapper is without `use_tensor_cores`."""


def spec_of(model: str) -> LayerSpec:
    specs = LayerSpec.from_hf_config(bundled("models", f"{model}.json"))
    return next(s for s in specs if s.kind.value == "attention" and s.role is Role.DECODER)


def jit_is_too_long(name: str, spec: LayerSpec) -> bool:
    """FlashInfer compiles minutes for each of these; only head sizes 64 and 128 are built."""
    unusual = spec.sliding_window or spec.logit_soft_cap or spec.head_size == 256
    return name == "FLASHINFER" and bool(unusual)


class WithoutLongJit:
    """A policy plugin: leaves FlashInfer out where its variants aren't built on this machine."""

    @hookimpl
    def polyattn_api_versions(self) -> tuple[int, int]:
        return (1, 1)

    @hookimpl
    def polyattn_rank(self, spec: LayerSpec, ranking: tuple[str, ...]) -> list[str]:
        return [name for name in ranking if not jit_is_too_long(name, spec)]


def cell(spec: LayerSpec, kind: str, named: str | None) -> dict[str, Any]:
    text, shared = STEPS[kind]
    lengths = parse_batch(text)
    queries, lens = [q for q, _ in lengths], [n for _, n in lengths]
    try:
        selection = select(spec, "cuda", backend=named)
        step = full_step(selection, list(zip(queries, lens, strict=True)), shared)
        error = sampled_error(step)
        us = kernel_us(step.call, repeats=10)
    except (PolyattnError, RuntimeError, NotImplementedError) as problem:
        return {"cannot": str(problem)[:300]}
    cost = batch_cost(spec, step.batch)
    return {
        "us": us, "error": error, "tb_s": cost.bytes / us / 1e6, "tflop_s": cost.flops / us / 1e6,
        "ran": selection.decision.summary(),
    }  # fmt: skip


def matrix(models: list[str], only: list[str]) -> list[dict[str, Any]]:
    rows = []
    names = only or [
        b.name for b in discover().backends.values() if "cuda" in b.capabilities.platforms
    ]
    for model in models:
        spec = spec_of(model)
        for kind in STEPS:
            found = []
            for name in sorted(names):
                if name == "FLEX_ATTENTION" or jit_is_too_long(name, spec):
                    continue
                scope = {"decode": "decode=", "shared prefix": "decode=", "mixed": ""}.get(
                    kind, "prefill="
                )
                other = "decode=TRITON_ATTN" if scope == "prefill=" else "prefill=TRITON_ATTN"
                named = f"{scope}{name},{other}" if scope else name
                found.append(
                    {"model": model, "step": kind, "backend": name} | cell(spec, kind, named)
                )
            if only:
                rows += found
                continue
            row = {"model": model, "step": kind, "backend": "(selected)"} | cell(spec, kind, None)
            timed = [r["us"] for r in found if "us" in r]
            if timed and "us" in row:
                row["over_best"] = row["us"] / min(timed)
            rows += [*sorted(found, key=lambda r: r.get("us", 1e12)), row]
            best = ", ".join(f"{r['backend']} {r['us']:.0f}" for r in sorted(
                (r for r in found if "us" in r), key=lambda r: r["us"])[:5])  # fmt: skip
            print(f"{model} {kind}: {best} | selected {row.get('us', 0):.0f} us", flush=True)
    return rows


DECODERS = ("TRITON_ATTN", "FLASHINFER", CUDA_CORES, "FLASHINFER_TRTLLM", "FLASH_ATTN_V3")


def decode_step(spec: LayerSpec, name: str, batch: int, length: int) -> AttentionWorkload:
    """Return a step of decodes by one backend."""
    selection = select(spec, "cuda", backend=f"decode={name.split()[0]},prefill=TRITON_ATTN")
    step = full_step(selection, [(1, length)] * batch)
    if name == CUDA_CORES:
        backend = step.plan.calls[0].backend
        backend.tensor_cores = False
        del step.plan  # its wrapper goes back, and away with those that were made before
        backend.pool.idle.clear()
        assert step.plan
    return step


def timed_decode(step: AttentionWorkload) -> dict[str, float]:
    """Time a step's attention alone through our layer, and by the backend's own call."""
    error = sampled_error(step)
    (call,) = step.plan.calls
    view, params = step.cache.in_blocks_of(call.block_size)[0], step.layer.params

    def own() -> None:
        call.backend.run(call.plan, step.query, None, None, view, params, step.out, None)

    attend = step.but(key=None, value=None).call
    row = {
        "us": kernel_us(attend), "error": error, "host_us": host_us(attend),
        "own_host_us": host_us(own), "graph_us": graph_us(attend),
        "graph_own_us": graph_us(own),
    }  # fmt: skip
    return row | {"layer_adds_us": row["host_us"] - row["own_host_us"]}


def bars() -> dict[str, Any]:
    """Decode and prefill against FlashInfer's own calls; host overhead; CUDA graphs."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    found: dict[str, Any] = {}
    for batch, length in ((1, 8192), (4, 8192), (16, 4096), (64, 4096), (128, 8192)):
        steps = {name: decode_step(spec, name, batch, length) for name in DECODERS}
        row: dict[str, Any] = {name: timed_decode(step) for name, step in steps.items()}
        latencies = latencies_us(
            {name: step.but(key=None, value=None).call for name, step in steps.items()}
        )
        for name, latency in latencies.items():
            row[name]["latency_us"] = latency
        row["read"] = read_us(2 * batch * length * spec.num_kv_heads * spec.head_size * 2)
        found[f"decode {batch} x {length}"] = row
        print(f"decode {batch} x {length}", json.dumps(row), flush=True)
    for length in (2048, 8192, 16384):
        row = {}
        for name in ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3", "CUDNN_ATTENTION"):
            named = f"prefill={name},decode=TRITON_ATTN"
            step = full_step(select(spec, "cuda", backend=named), [(length, length)])
            us = kernel_us(step.call)
            cost = batch_cost(spec, step.batch)
            row[name] = {"us": us, "tflop_s": cost.flops / us / 1e6}
        row["ratio"] = row["FLASHINFER"]["us"] / row["TRITON_ATTN"]["us"]
        found[f"prefill 1 x {length}"] = row
        print(f"prefill 1 x {length}", json.dumps(row), flush=True)
    return found


CACHES = {
    "auto": ("TRITON_ATTN", "FLASHINFER"),
    "fp8_e4m3": ("TRITON_ATTN", "FLASHINFER"),
    "fp8_e5m2": ("TRITON_ATTN",),
    "int8": ("TRITON_ATTN",),
}
"""Who is timed over which cache: FlashInfer's other variants compile for long."""


def quantized() -> dict[str, Any]:
    """Decode over 8-bit caches."""
    found = {}
    for cached, names in CACHES.items():
        spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype=cached)
        for name in names:
            row = {}
            for batch, length in ((1, 8192), (16, 4096), (64, 4096)):
                step = decode_step(spec, name, batch, length)
                sampled_error(step)
                row[f"{batch} x {length}"] = kernel_us(
                    step.but(key=None, value=None).call, repeats=10
                )
            found[f"{spec.stored_dtype} {name}"] = row
            print(spec.stored_dtype, name, row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--backends", nargs="+", default=[])
    parser.add_argument("--keep", nargs="+", default=[])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    register(WithoutLongJit(), "without-long-jit")
    path = args.out / "matrix.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": []}
    if args.backends:
        before["rows"] += [row | {"other_run": True} for row in matrix(args.models, args.backends)]
        path.write_text(json.dumps(before, indent=1) + "\n")
        return
    kept = [row | {"other_run": True} for row in before["rows"] if row["backend"] in args.keep]
    import triton

    facts = {
        "date": str(date.today()), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
        "limits": measure_limits(spec_of("llama-3.1-8b"), DEVICE),
    }  # fmt: skip
    print(facts, flush=True)
    (args.out / "bars.json").write_text(
        json.dumps(facts | {"bars": bars(), "quantized": quantized()}, indent=1) + "\n"
    )
    rows = matrix(args.models, [])
    path.write_text(json.dumps(facts | {"rows": rows + kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
