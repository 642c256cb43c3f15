"""Has the driver assemble vLLM's FlashAttention-2 before its kit runs: a process for each kernel family.

    CUDA_CACHE_PATH=DIR CUDA_CACHE_MAXSIZE=4294967296 python benchmarks/h200_fa2_warm.py \\
        [--seconds 400] [--processes 24] [--dtypes bfloat16 float16]

vLLM's build holds code for sm_80 and PTX, which the driver assembles for sm_90 when a file's first kernel
is called: for minutes, on one core, in every process that can't find the result in its cache. A file
holds a dtype, a head size, causal or not, over pages or keys as they lie: 24 for each dtype. The kit's
workers find them in the cache afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

SIZES = (64, 128, 256, 96, 32, 192)


def touch(dtype: str, size: int, causal: bool, paged: bool) -> None:
    """Call one kernel of the file, over a few keys."""
    import torch
    from polyattn_cuda.providers import vllm_library

    torch.ops.load_library(str(vllm_library("_vllm_fa2_C")))
    ops = torch.ops._vllm_fa2_C
    kind = {"dtype": getattr(torch, dtype), "device": "cuda"}
    starts = torch.tensor([0, 16], dtype=torch.int32, device="cuda")
    query = torch.randn(16, 4, size, **kind)
    if paged:
        keys = torch.randn(1, 16, 2, size, **kind)
        table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
        where = (torch.zeros_like(starts), starts[1:], None, table)
    else:
        keys = torch.randn(16, 2, size, **kind)
        where = (starts, None, None, None)
    ops.varlen_fwd(
        query, keys, keys, torch.empty_like(query), starts, *where, None, 16, 16, 0.0,
        size**-0.5, False, causal, -1, 0 if causal else -1, 0.0, False, 0, None,
    )  # fmt: skip
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--processes", type=int, default=24)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--one", nargs=4)
    options = parser.parse_args()
    if options.one:
        dtype, size, causal, paged = options.one
        touch(dtype, int(size), causal == "True", paged == "True")
        return
    from polyattn_cuda.providers import vllm_library

    if vllm_library("_vllm_fa2_C") is None:
        sys.exit("no _vllm_fa2_C.abi3.so in an installed vllm's folder: nothing to assemble")
    started = time.monotonic()
    # The largest first: over pages, and not causal (with windows and ALiBi in the same file).
    files = [
        (dtype, size, causal, paged)
        for paged in (True, False)
        for dtype in options.dtypes
        for causal in (False, True)
        for size in SIZES
    ]

    def one(file: tuple[str, int, bool, bool]) -> None:
        left = options.seconds - (time.monotonic() - started)
        if left < 1:
            print(*file, "not begun", flush=True)
            return
        command = [sys.executable, __file__, "--one", *map(str, file)]
        try:
            done = subprocess.run(command, timeout=left, capture_output=True, text=True)
            said = "ready" if done.returncode == 0 else done.stderr[-200:]
        except subprocess.TimeoutExpired:
            said = "not finished"
        print(*file, said, f"at {time.monotonic() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(one, files))


if __name__ == "__main__":
    main()
