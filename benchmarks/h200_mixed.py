"""Decodes and prefill in one launch or in two? Who takes a mixed step whole, beside the pairs.

    python benchmarks/h200_mixed.py [--out FILE.json] [--warm]

FlashAttention-3's varlen call, FlashInfer's `BatchAttention` and its paged FA2 prefill over all rows,
beside each backend's two calls and the pair of TRITON_ATTN and FLASH_ATTN_V3. Device times with a cold
L2, median of ten; each result is compared with the pair's. `--warm` compiles what FlashInfer needs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from h200_ragged import DEVICE, MHA, QWEN, SHARD, K, Run, Step
from rows import Rows
from timing import kernel_us

STEPS = [
    Step(f"{name}: {what}", spec, rows)
    for name, spec in (("28/4", QWEN), ("16/2", SHARD), ("16/16", MHA))
    for what, rows in (
        ("40 x 2k + 2 x 1k", ((1, 2 * K),) * 40 + ((K, K),) * 2),
        ("80 x 1k + 1,500", ((1, K),) * 80 + ((1500, 1500),)),
        ("10 x 8k + 512 after 8k", ((1, 8 * K),) * 10 + ((512, 8 * K + 512),)),
        ("1 x 64k + 31 x 1k + 1k", ((1, 64 * K),) + ((1, K),) * 31 + ((K, K),)),
    )
]


def pages(run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FlashInfer's forms: query and page bounds, pages, lengths."""
    size = run.cache.block_size
    queries, lens = (torch.tensor(part) for part in zip(*run.rows, strict=True))
    counts = -(-lens // size)
    used = torch.cat([row[:n] for row, n in zip(run.table, counts.tolist(), strict=True)])

    def bounds(parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), parts.cumsum(0)]).int()

    return bounds(queries), bounds(counts), used.int(), lens.int()


def holistic(run: Run) -> Callable[[], object]:
    """FlashInfer's one kernel for mixed steps."""
    import flashinfer

    spec, (queries, indptr, used, lens) = run.step.spec, pages(run)
    wrapper = flashinfer.BatchAttention(kv_layout="NHD")
    wrapper.plan(
        queries.to(DEVICE), indptr.to(DEVICE), used, lens.to(DEVICE), spec.num_heads,
        spec.num_kv_heads, spec.head_size, spec.head_size, run.cache.block_size, causal=True,
        sm_scale=spec.scale,
    )  # fmt: skip
    return lambda: wrapper.run(run.query, (run.cache.key, run.cache.value), out=run.out)


def paged(run: Run, backend: str) -> Callable[[], object]:
    """FlashInfer's paged prefill over all rows."""
    import flashinfer

    spec, (queries, indptr, used, lens) = run.step.spec, pages(run)
    buffer = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=backend)
    last = lens - (indptr[1:] - indptr[:-1] - 1) * run.cache.block_size
    wrapper.plan(
        queries, indptr, used, last, spec.num_heads, spec.num_kv_heads, spec.head_size,
        run.cache.block_size, causal=True, sm_scale=spec.scale, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(run.query, (run.cache.key, run.cache.value), out=run.out)


def library(run: Run, call: Callable[[], object], wanted: torch.Tensor) -> dict[str, Any]:
    """Time a library's own call over a step's tensors, and compare its result with ours."""
    run.out.fill_(torch.nan)
    call()
    error = float((run.out.double() - wanted.double()).norm() / wanted.double().norm())
    return {"us": kernel_us(call, repeats=10), "error": error, "right": error < 0.01}


def backends(step: Step, decode: str, prefill: str | None) -> dict[str, Any]:
    """Time backends' calls; some tokens are checked in float64."""
    run = Run(step, decode, prefill=prefill)
    error = run.error()
    return {"us": kernel_us(run, repeats=10), "error": error, "right": error < 0.01}


def measure(step: Step, rows: Rows) -> None:
    pair = Run(step, "TRITON_ATTN", prefill="FLASH_ATTN_V3")
    pair()
    wanted = pair.out.clone()
    for decode, prefill in (
        ("TRITON_ATTN", "FLASH_ATTN_V3"), ("FLASH_ATTN_V3", "FLASH_ATTN_V3"),
        ("FLASHINFER", "FLASHINFER"), ("FLASH_ATTN_V3", None),
    ):  # fmt: skip
        name = f"{decode} + {prefill}" if prefill else f"{decode}, one call"
        rows.add(f"{step.name}: {name}", partial(backends, step, decode, prefill))
    libraries = {
        "BatchAttention": holistic, "paged fa2": partial(paged, backend="fa2"),
        "paged fa3": partial(paged, backend="fa3"),
    }  # fmt: skip
    for name, make in libraries.items():
        rows.add(
            f"{step.name}: FlashInfer's {name}, one call",
            lambda make=make: library(pair, make(pair), wanted),  # type: ignore[misc]
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm", action="store_true", help="compile FlashInfer's kernel, no more")
    options = parser.parse_args()
    rows = Rows(options.seconds)
    if options.warm:
        small = Step("warm", QWEN, ((1, 64), (64, 64)))
        holistic(Run(small, "TRITON_ATTN"))()
        return
    for step in STEPS:
        measure(step, rows)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows.rows, indent=1) + "\n")
    print("wrong or failed:", rows.wrong() or "none")


if __name__ == "__main__":
    main()
