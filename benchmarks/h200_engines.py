"""Engines on one GPU: nano-vllm with its graphs, transformers, flash-attn's functions, vLLM's builder.

    python benchmarks/h200_engines.py --nano FOLDER [--out FILE.json] [--only nano32,flash,...] [--gpus 4]

Each section is a process of its own, bounded in time, so that one that dies or hangs leaves the others;
a table comes last. FOLDER holds nano-vllm's sources (commit bb823b3: `nanovllm/`).

- `bounds`: TRITON_ATTN's conformance cases of decode planned by bounds, and of captured steps.
- `flash`: flash-attn's functions beside the formula in float64; captured decodes, replayed unplanned.
- `vllm`: the builder of polyattn-vllm under captured graphs.
- `nano32`: nano-vllm in float32 with its CUDA graphs: all greedy tokens equal transformers'.
- `nano`: in bf16, Qwen3-0.6B's shape, 256 requests: tokens a second beside FlashAttention-3 (vLLM's
  build, where it is there).
- `hf`: transformers: logits, greedy tokens, static caches, fullgraph compile, continuous batching.
- `host`: host time of a call on tiny tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "plugins/triton", "plugins/cuda", "plugins/cpu", "integrations/flash_attn",
           "integrations/transformers", "integrations/vllm")  # fmt: skip
LIMITS = {"flash": 100, "vllm": 60, "nano32": 110, "nano": 240, "host": 50, "hf": 220, "bounds": 90}
"""Sections in their order, and their most seconds."""
LANES = (("nano32", "nano"), ("flash", "hf"), ("vllm", "host", "bounds"))
"""What runs side by side where there are several GPUs; nano-vllm's processes meet at one port."""
CARRIED = Path("/tmp/engines-transformers")
"""Where a transformers of the version that the integration is made for is unpacked."""
Row = dict[str, Any]


def sections(nano: str) -> dict[str, Callable[[Any], None]]:
    """Return each section's rows, as functions that add them."""

    def flash(rows: Any) -> None:
        import torch
        from engines import functions

        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            rows.add(f"forward cases {dtype}", lambda d=dtype: functions.forward_cases(d, 24))
        for count in (1, 8, 64, 256):
            rows.add(
                f"captured, {count} rows over pages", lambda n=count: functions.captured(n, True)
            )
        rows.add("captured, 8 dense rows", lambda: functions.captured(8, False))

    def vllm(rows: Any) -> None:
        from engines import vllm_graphs

        vllm_graphs.stand_in()
        for label, layer in (
            ("bf16", {}), ("window of 40", {"sliding_window": 40}),
            ("soft cap", {"logits_soft_cap": 10.0}), ("fp8 cache", {"kv_cache_dtype": "fp8_e4m3"}),
        ):  # fmt: skip
            rows.add(f"vLLM's builder, graphs, {label}", lambda x=layer: vllm_graphs.replayed(**x))

    def nano32(rows: Any) -> None:
        from engines import nano as engine

        rows.add("nano-vllm, float32, graphs", lambda: engine.equal_tokens(nano))

    def nano16(rows: Any) -> None:
        from engines import nano as engine

        for row in engine.throughput(nano):
            rows.add(f"nano-vllm, bf16: {row.pop('what')}", lambda r=row: r)

    def host(rows: Any) -> None:
        from engines import functions

        for row in functions.host_times():
            rows.add(f"host: {row.pop('what')}", lambda r=row: r)

    def hf(rows: Any) -> None:
        import polyattn_transformers  # noqa: F401  (registers the name)
        from engines import hugging_face as tf

        for name in tf.MODELS:
            rows.add(f"{name}: logits", lambda n=name: tf.logits(n))
        for name in ("llama", "gpt_oss"):
            for mode in ("no padding", "left padding", "static cache", "beams"):
                rows.add(f"{name}: tokens, {mode}", lambda n=name, m=mode: tf.tokens(n, m))
        for name in ("llama", "gemma2"):
            rows.add(f"{name}: continuous batching", lambda n=name: tf.batching(n))
        rows.add("llama: fullgraph compile", lambda: tf.compiled("llama"))
        mode = "static cache, compiled"
        rows.add(f"llama: tokens, {mode}", lambda: tf.tokens("llama", mode))

    return {"flash": flash, "vllm": vllm, "nano32": nano32, "nano": nano16, "host": host, "hf": hf}


def run_section(name: str, nano: str, seconds: float, out: Path) -> int:
    """Run one section in this process; its rows go to `out` as they come."""
    from rows import Rows

    class Written(Rows):
        def add(self, what: str, measure: Callable[[], dict[str, Any]]) -> None:
            super().add(what, measure)
            out.write_text(json.dumps(self.rows))

    rows = Written(seconds)
    sections(nano)[name](rows)
    return len(rows.wrong())


def environment(section: str, gpu: int) -> dict[str, str]:
    """Return the environment of a section: this tree's sources first, whatever is installed."""
    paths = [str(ROOT / folder / "src") for folder in FOLDERS] + [str(ROOT / "benchmarks")]
    found = dict(
        os.environ, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=str(gpu)
    )
    found["PYTHONPATH"] = ":".join([*paths, os.environ.get("PYTHONPATH", "")])
    if section == "nano32":
        found["TORCHDYNAMO_DISABLE"] = "1"
    if section == "hf" and CARRIED.is_dir():
        found["PYTHONPATH"] = f"{CARRIED}:{found['PYTHONPATH']}"
    return found


def kit(limit: float, gpu: int) -> list[Row]:
    """Run the kit's cases of captured steps and of lengths that only the device knows."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
        "polyattn.conformance", "--polyattn-backend", "TRITON_ATTN", "--polyattn-device", "cuda",
        "-k", "bounds or graph",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd="/tmp", env=environment("bounds", gpu), capture_output=True, text=True,
        timeout=limit, check=False,
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    print(done.stdout[-1500:], flush=True)
    return [
        {"what": "TRITON_ATTN: kit, bounds and graphs", "found": last, "right": not done.returncode}
    ]


def main() -> int:
    """Run the sections. Returns how many rows are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nano", default=".nano")
    parser.add_argument("--out", type=Path, default=Path("engines.json"))
    parser.add_argument("--only", default=",".join(LIMITS))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--transformers", help="a wheel of transformers 5.23, for the section hf")
    parser.add_argument("--gpus", type=int, default=1, help="3 or more: sections side by side")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        return run_section(args.section, args.nano, args.seconds, args.out)
    if args.transformers:
        zipfile.ZipFile(args.transformers).extractall(CARRIED)
    end, found = time.monotonic() + args.seconds, list[Row]()

    def lane(gpu: int, names: list[str]) -> None:
        for name in names:
            limit = min(LIMITS[name], end - time.monotonic())
            print(f"== {name}, at most {limit:.0f} s", flush=True)
            found.extend(section_rows(name, args, limit, gpu))
            args.out.write_text(json.dumps(found, indent=1))

    wanted = args.only.split(",")
    lanes = [[n for n in names if n in wanted] for names in LANES] if args.gpus > 2 else [wanted]
    threads = [Thread(target=lane, args=each) for each in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n== summary")
    for row in found:
        shown = "  ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
            for k, v in row.items()
            if k != "what"
        )
        print(f"{row['what']:48} {shown}", flush=True)
    return sum("failed" in row or row.get("right") is False for row in found)


def section_rows(name: str, args: Any, limit: float, gpu: int) -> list[Row]:
    """Run a section in a process of its own; what it had found counts, however it ends."""
    if limit < 15:
        return [{"what": name, "failed": "no time was left"}]
    start = time.monotonic()
    out = Path(f"/tmp/engines-{os.getpid()}-{name}.json")
    how: str | None = None
    try:
        if name == "bounds":
            return kit(limit, gpu)
        subprocess.run(
            [sys.executable, __file__, "--section", name, "--nano", str(Path(args.nano).resolve()),
             "--out", str(out), "--seconds", str(limit - 10)],
            env=environment(name, gpu), timeout=limit, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        how = f"ended after {limit:.0f} s"
    except subprocess.CalledProcessError as error:
        how = None if out.exists() else f"died with {error.returncode}"
    found: list[Row] = json.loads(out.read_text()) if out.exists() else []
    if how:
        found.append({"what": name, "failed": how})
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
