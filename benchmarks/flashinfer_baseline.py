"""FlashInfer's own calls, without polyattn: the yardstick of the H200 bars.

python benchmarks/flashinfer_baseline.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import flashinfer
import torch
from timing import host_us, kernel_us

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
DECODE = [(1, 8192), (4, 8192), (16, 4096), (64, 4096), (128, 8192)]
PREFILL = [
    (1, 2048, "fa2"),
    (1, 8192, "fa2"),
    (1, 2048, "fa3"),
    (1, 8192, "fa3"),
    (1, 16384, "fa3"),
]


def pages(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    each = length // PAGE
    indptr = torch.arange(batch + 1, dtype=torch.int32) * each
    indices = torch.randperm(batch * each, device="cuda").to(torch.int32)
    last = torch.full((batch,), PAGE, dtype=torch.int32)
    shape = (batch * each, PAGE, KV_HEADS, SIZE)
    cache = tuple(torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    return indptr, indices, last, cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--build-only", action="store_true")
    args = parser.parse_args()
    buffer = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    rows = []
    for batch, length in DECODE:
        indptr, indices, last, cache = pages(batch, length)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            buffer, "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            indptr, indices, last, HEADS, KV_HEADS, SIZE, PAGE,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        query = torch.randn(batch, HEADS, SIZE, device="cuda").bfloat16()
        out = torch.empty_like(query)

        def run() -> None:
            wrapper.run(query, cache, out=out)  # noqa: B023

        run()
        if args.build_only:
            break
        us = kernel_us(run)
        moved = 2 * batch * length * KV_HEADS * SIZE * 2
        row = {
            "phase": "decode",
            "batch": batch,
            "length": length,
            "us": us,
            "host_us": host_us(run),
        }
        rows.append(row | {"tb_s": moved / us / 1e6})
        print(rows[-1], flush=True)
    for batch, length, backend in PREFILL:
        indptr, indices, last, cache = pages(batch, length)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=backend)
        wrapper.plan(
            torch.tensor([0, length], dtype=torch.int32), indptr, indices, last, HEADS, KV_HEADS,
            SIZE, PAGE, causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        query = torch.randn(length, HEADS, SIZE, device="cuda").bfloat16()
        out = torch.empty_like(query)

        def run() -> None:
            wrapper.run(query, cache, out=out)  # noqa: B023

        run()
        if args.build_only:
            continue
        us = kernel_us(run)
        flops = 2 * length * (length + 1) * HEADS * SIZE
        row = {"phase": "prefill", "batch": batch, "length": length, "backend": backend, "us": us}
        rows.append(row | {"tflop_s": flops / us / 1e6})
        print(rows[-1], flush=True)
    if args.out and rows:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
