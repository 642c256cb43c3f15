"""Context parallelism on several GPUs of one host over NCCL, beside one of them.

    torchrun --nproc-per-node=2 benchmarks/h200_context.py [--out FILE.json] [--shrink 1]

The layer has 32/8 heads of 128 in bfloat16. `decode`: one sequence of 524,288 tokens, its next token.
`all_gather`, `ring`, `heads`: a prompt of 131,072 tokens, every rank its share. Each beside the same
step of the layer on one GPU: microseconds of a layer's whole call, host and device, and the largest
difference of an output, relative to the outputs' size. Without a GPU it runs over gloo: `--shrink 128`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("POLYATTN_TIMINGS", "0")

import torch
import torch.distributed as dist
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.workload.compare import output_error
from polyattn_context_parallel import ContextAttention, ContextGroup, ContextParallel
from polyattn_context_parallel.heads import heads_of_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

KIND = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, needs_lse=True)
BACKEND = "TRITON_ATTN" if KIND == "cuda" else None
"""By name: a group loads its candidates, and FlashInfer's compile for minutes."""
WAYS = {"decode": 524_288, "all_gather": 131_072, "ring": 131_072, "heads": 131_072}


def group(spec: LayerSpec) -> LayerGroup:
    device = f"cuda:{torch.cuda.current_device()}" if KIND == "cuda" else "cpu"
    return LayerGroup(select(spec, device, backend=BACKEND))


def median_us(call: Callable[[], object], calls: int) -> float:
    """Return the median microseconds of a call among `calls` one after another, on all ranks at once."""
    times = []
    for _ in range(6):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        if KIND == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(times[1:])


def random(*shape: int, seed: int) -> Tensor:
    """Return the same bfloat16 numbers on every rank."""
    generator = torch.Generator(KIND).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=KIND, dtype=torch.bfloat16)


def step(way: str, length: int, context: ContextParallel) -> dict[str, Any]:
    """Run a step on one rank and on all of them."""
    decode = way == "decode"
    one = group(SPEC.replace(needs_lse=False))
    spec = heads_of_rank(SPEC, context.size) if way == "heads" else SPEC
    assert one.cache_format is not None
    size = one.cache_format.block_size
    shared = ContextGroup(
        group(spec.replace(block_size=size)),
        context,
        keys="heads" if way == "heads" else "blocks",
        prefill="ring" if way == "ring" else "all_gather",
    )
    layer, tokens = Attention(one), 1 if decode else length
    inputs = [random(tokens, heads, 128, seed=heads + at) for at, heads in enumerate((32, 8, 8))]

    def batch(block: int) -> Batch:
        table = torch.arange(length // block, dtype=torch.int32, device=KIND)[None]
        return Batch.from_lens([tokens], [length], table, block)

    whole = one.allocate_cache(length // size)
    own = shared.allocate_cache(length // shared.block_size)
    if decode:
        _share(whole, own, context)
    plan, steps = one.plan(batch(size)), batch(shared.block_size)
    parallel = ContextAttention(shared, Attention(shared.group))
    planned = shared.plan(steps, queries="all" if decode else "own")
    rows = torch.arange(1, device=KIND) if decode else shared.tokens(steps)
    mine = [tensor[rows].contiguous() for tensor in inputs]
    expected, out = layer(*inputs, whole, plan), parallel(*mine, own, planned)[0]
    calls = 50 if decode else 2
    one_us = median_us(lambda: layer(*inputs, whole, plan), calls)
    us = median_us(lambda: parallel(*mine, own, planned), calls)
    error = output_error(out, expected[rows].double().cpu())
    return {"one_us": one_us, "us": us, "faster": one_us / us, "difference": error}


def _share(whole: KVCache, own: KVCache, context: ContextParallel) -> None:
    """Fill a cache, and each rank's blocks of it."""
    for seed, (all_keys, part) in enumerate(((whole.key, own.key), (whole.value, own.value))):
        all_keys.copy_(random(*all_keys.shape, seed=seed))
        part.copy_(all_keys.unflatten(0, (-1, context.size))[:, context.rank])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    if KIND == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if KIND == "cuda" else "gloo")
    context = ContextParallel(init_device_mesh(KIND, (dist.get_world_size(),)))
    found: dict[str, Any] = {}
    with torch.no_grad():
        for way, length in WAYS.items():
            found[way] = step(way, length // options.shrink, context)
            if context.rank == 0:
                print(way, json.dumps(found[way]), flush=True)
    if options.out and context.rank == 0:
        options.out.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
