"""What memory does a prefill over 128k keys take on the CPU? 32 heads, soft cap.

python benchmarks/long_prefill.py BACKEND [--queries 256] [--keys 131072] [--seconds 150]

The last queries of the prompt, which see all keys; as many queries as keys are a whole prefill. What is
printed is the process's peak while the layer plans and runs, beyond what it had before: its inputs,
output and cache. A run that isn't done in time is stopped, and says so.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch
from polyattn import Attention, Batch, KVCache, LayerSpec, select
from polyattn.families.attention import reference
from polyattn.workload.compare import output_error
from torch import Tensor

ROWS = 5
STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def gib(field: str) -> float:
    """Return a figure of this process's memory: VmRSS is now, VmHWM the peak."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 2**20


def error(spec: LayerSpec, query: Tensor, out: Tensor, cache: KVCache) -> float:
    """Return the largest error of a few rows, the last among them, beside float64."""
    keys, values = (each.flatten(0, 1)[:, :1] for each in (cache.key, cache.value))
    part, worst = spec.replace(num_heads=4, num_kv_heads=1), 0.0
    for row in torch.linspace(0, len(query) - 1, ROWS).long().tolist():
        length = len(keys) - len(query) + row + 1
        seen = keys[:length], values[:length]
        expected, _ = reference.attend(part, query[row : row + 1, :4], *seen)
        worst = max(worst, output_error(out[row : row + 1, :4], expected))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--keys", type=int, default=131_072)
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, logit_soft_cap=50.0)
    layer = Attention(select(spec, "cpu", backend=args.backend))
    form = layer.group.cache_format
    assert form is not None
    blocks = -(-args.keys // form.block_size)
    cache = layer.group.allocate_cache(blocks)
    cache.key.zero_()
    cache.value.zero_()
    query, key, value = (
        torch.empty(args.queries, h, 128, dtype=torch.bfloat16).normal_() for h in (32, 8, 8)
    )
    out = torch.zeros_like(query)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    batch = Batch.from_lens([args.queries], [args.keys], table, form.block_size)
    FORGET.write_text("5")  # the peak counts from here
    before, began, ticks = gib("VmRSS"), time.time(), time.process_time()

    def say(how: str) -> None:
        print(
            f"{args.backend}, {args.queries} queries over {args.keys} keys: {how} after "
            f"{time.time() - began:.0f} s ({time.process_time() - ticks:.0f} s of processor), "
            f"{gib('VmHWM') - before:.2f} GiB beyond {before:.2f}",
            flush=True,
        )

    def stop() -> None:
        say("stopped")
        os._exit(0)

    timer = threading.Timer(args.seconds, stop)
    timer.start()
    layer(query, key, value, cache, batch, out=out)
    timer.cancel()
    say("done")
    print(f"largest relative error of {ROWS} rows in 4 heads: {error(spec, query, out, cache):.2g}")


if __name__ == "__main__":
    main()
