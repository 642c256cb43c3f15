"""What memory a prefill over 128k keys takes on the CPU: 32 heads, soft cap, the longest rows there are.

python benchmarks/long_prefill.py BACKEND [--queries 256] [--keys 131072] [--seconds 150]

The last queries of the prompt, which see all keys; what is printed is the process's peak beyond its
inputs, output and cache. A run that isn't done in time is stopped, and says so.
"""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time

import torch
from polyattn import Attention, Batch, LayerSpec, select


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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
    query, key, value = (torch.randn(args.queries, h, 128).bfloat16() for h in (32, 8, 8))
    out = torch.zeros_like(query)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    batch = Batch.from_lens([args.queries], [args.keys], table, form.block_size)
    before, began = peak_gib(), time.time()

    def say(how: str) -> None:
        beyond = peak_gib() - before
        print(
            f"{args.backend}: {how} after {time.time() - began:.0f} s, {beyond:.2f} GiB beyond",
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


if __name__ == "__main__":
    main()
