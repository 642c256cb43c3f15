"""Engines on one GPU: transformers, vLLM's builder and its engine.

    python benchmarks/h200_engines.py [--out FILE.json] [--only serving,vllm,...]

Each section is a process of its own, bounded in time, so that one that dies or hangs leaves the others;
a table comes last. Those that time something go first, one after another; then those that compare, side
by side.

- `always`: vLLM's engine, whose graphs hold prompts and decodes, or drafts: tokens beside its own.
- `bits`: vLLM's engine, whose graphs hold decodes, at `VLLM_BATCH_INVARIANT`: alone and beside others.
- `serving`: vLLM's engine, where it is installed, under Poisson arrivals, on its backends and polyattn.
- `vllm`: the builder of polyattn-vllm under captured graphs.
- `hf-logits`, `hf-tokens`, `hf-batching`: transformers: logits, greedy tokens, static caches, fullgraph
  compile, continuous batching.
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
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "plugins/triton", "plugins/cuda", "plugins/cpu",
           "integrations/transformers", "integrations/torch", "integrations/vllm")  # fmt: skip
TIMED = {"always": 240, "bits": 120, "serving": 1200}
COMPARED = {
    "vllm": 150, "hf-logits": 150, "hf-tokens": 220, "hf-batching": 220,
}  # fmt: skip
LIMITS = TIMED | COMPARED
"""Sections in their order, and their most seconds."""
CARRIED = Path("/tmp/engines-transformers")
"""Where a transformers of the version that the integration is made for is unpacked."""
Row = dict[str, Any]
Options = argparse.Namespace
Section = Callable[[Any, Options], None]
"""Adds its rows; the second are the options."""


def vllm(rows: Any, args: Options) -> None:
    from engines import vllm_graphs

    vllm_graphs.stand_in()
    for label, layer in (
        ("bf16", {}),
        ("window of 40", {"sliding_window": 40}),
        ("soft cap", {"logits_soft_cap": 10.0}),
        ("fp8 cache", {"kv_cache_dtype": "fp8_e4m3"}),
        ("3 drafts", {"drafts": 3}),
        ("MLA", {"kind": "LatentRunner"}),
        ("MLA, 3 drafts", {"kind": "LatentRunner", "drafts": 3}),
    ):
        rows.add(f"vLLM's builder, graphs, {label}", lambda x=layer: vllm_graphs.replayed(**x))
        if "drafts" not in layer:
            rows.add(f"and of prompts and decodes, {label}", lambda x=layer: vllm_graphs.mixed(**x))


def serving(rows: Any, args: Options) -> None:
    import torch
    from engines import serving as load
    from pages import about

    rows.note(
        "serving, where",
        about(torch.device(load.DEVICE)) | {"vLLM": load.VERSION, "dtype": load.DTYPE},
    )
    for row in load.measured(rows.end - time.monotonic(), args.loads):
        rows.note(f"serving, {row.pop('what')}", row)


def always(rows: Any, args: Options) -> None:
    from engines import always as tokens

    for model, dtype, own, changed in (
        ("llama", "float16", "FLASH_ATTN", {"head_dim": 64}),
        ("llama", "float32", "TRITON_ATTN", {"head_dim": 64}),
        ("llama", "float32", "TRITON_ATTN", {"head_dim": 64, "drafts": "draft_model"}),
        ("llama", "float32", "TRITON_ATTN", {"head_dim": 64, "drafts": "eagle"}),
        (
            "deepseek_v3",
            "float16",
            "TRITON_MLA",
            {"first_k_dense_replace": 2, "qk_nope_head_dim": 128, "v_head_dim": 128},
        ),
    ):
        drafts = str(changed.get("drafts", ""))
        what = f"FULL graphs, {f'{model}, {drafts}'.rstrip(', ')}, {dtype}, beside {own}"
        rows.add(what, partial(tokens.compared, model, dtype, own, **changed))


def bits(rows: Any, args: Options) -> None:
    from engines import always as tokens

    for side in ("polyattn", "FLASH_ATTN"):
        what = f"log-probabilities at VLLM_BATCH_INVARIANT, llama, bfloat16, {side}"
        rows.add(what, partial(tokens.same_bits, "llama", "bfloat16", side, head_dim=64))


def hf_logits(rows: Any, args: Options) -> None:
    from engines import hugging_face as tf

    for name in tf.MODELS:
        rows.add(f"{name}: logits", lambda n=name: tf.logits(n))


def hf_tokens(rows: Any, args: Options) -> None:
    from engines import hugging_face as tf

    modes = ("no padding", "left padding", "static cache", "beams", "static cache, compiled")
    for mode in modes:
        for name in ("llama", "gpt_oss"):
            rows.add(f"{name}: tokens, {mode}", lambda n=name, m=mode: tf.tokens(n, m))


def hf_batching(rows: Any, args: Options) -> None:
    from engines import hugging_face as tf

    for name in ("llama", "gemma2"):
        rows.add(f"{name}: continuous batching", lambda n=name: tf.batching(n))
    rows.add("llama: fullgraph compile", lambda: tf.compiled("llama"))


SECTIONS: dict[str, Section] = {
    "vllm": vllm, "always": always, "bits": bits,
    "serving": serving,
    "hf-logits": hf_logits, "hf-tokens": hf_tokens, "hf-batching": hf_batching,
}  # fmt: skip


def run_section(args: Options) -> int:
    """Run one section in this process; its rows go to `args.out` as they come."""
    from rows import Rows

    class Written(Rows):
        def note(self, what: str, row: Row) -> None:
            super().note(what, row)
            args.out.write_text(json.dumps(self.rows))

    rows = Written(args.seconds)
    SECTIONS[args.section](rows, args)
    return len(rows.wrong())


def environment(section: str) -> dict[str, str]:
    """Return the environment of a section: this tree's sources first, whatever is installed."""
    paths = [str(ROOT / folder / "src") for folder in FOLDERS] + [str(ROOT / "benchmarks")]
    found = dict(os.environ, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
    # FlashInfer's sampler is compiled for two minutes at the first engine's start.
    found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if section in COMPARED:
        found["OMP_NUM_THREADS"] = "1"
    found["PYTHONPATH"] = ":".join([*paths, os.environ.get("PYTHONPATH", "")])
    if section == "bits":  # with what vLLM sets, too late where torch has its handles already
        found |= {
            "VLLM_BATCH_INVARIANT": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":16:8",
            "CUBLASLT_WORKSPACE_SIZE": "1",
        }
    if section in ("hf-logits", "hf-tokens", "hf-batching") and CARRIED.is_dir():
        found["PYTHONPATH"] = f"{CARRIED}:{found['PYTHONPATH']}"
    return found


def main() -> int:
    """Run the sections. Returns how many rows are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("engines.json"))
    parser.add_argument("--only", default=",".join(LIMITS))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument(
        "--transformers", help="a wheel of transformers 5.23, for the sections that use it"
    )
    parser.add_argument("--loads", default="", help="a regexp: the loads of `serving` that are run")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        return run_section(args)
    if args.transformers:
        zipfile.ZipFile(args.transformers).extractall(CARRIED)
    end, found = time.monotonic() + args.seconds, list[Row]()

    def run(name: str) -> None:
        limit = min(LIMITS[name], end - time.monotonic())
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        found.extend(section_rows(name, args, limit))
        args.out.write_text(json.dumps(found, indent=1))

    wanted = args.only.split(",")
    for name in TIMED:
        if name in wanted:
            run(name)
    threads = [Thread(target=run, args=[name]) for name in COMPARED if name in wanted]
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


def section_rows(name: str, args: Any, limit: float) -> list[Row]:
    """Run a section in a process of its own; what it had found counts, however it ends."""
    if limit < 15:
        return [{"what": name, "failed": "no time was left"}]
    start = time.monotonic()
    out = Path(f"/tmp/engines-{os.getpid()}-{name}.json")
    how: str | None = None
    try:
        subprocess.run(
            [sys.executable, __file__, "--section", name,
             "--loads", args.loads, "--out", str(out), "--seconds", str(limit - 10)],
            env=environment(name), timeout=limit, check=True,
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
