"""Context parallelism on two GPUs of one host over NCCL, beside one of them; checked in float64.

    python benchmarks/h200_context.py [--out FILE.json] [--sections decode all_gather ...] [--device cpu]

Each section runs in two fresh processes, so that none takes another down, for at most `--limit` seconds.
The layer has 32/8 heads of 128 in bfloat16. `decode`: one sequence of 524,288 tokens, its next token; the
time of a layer's whole call, host and device, and of one GPU's; `decode_graph` within a CUDA graph.
`all_gather`, `ring`, `heads`: a prompt of 131,072 tokens, every rank its share. Rows are compared with
attention in float64 on the device (a few heads, of a prompt a few rows). `death`: one rank exits; the
other has to raise within the timeout. A table is printed last. `--device cpu` tries it out with gloo and
small sizes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
os.environ.setdefault("NCCL_IB_DISABLE", "1")  # one host
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("POLYATTN_TIMINGS", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from polyattn import (
    Attention,
    Batch,
    KVCache,
    LayerGroup,
    LayerSpec,
    select,
)
from polyattn.workload.compare import output_error
from polyattn_context_parallel import (
    ContextAttention,
    ContextGroup,
    ContextParallel,
    ParallelError,
)
from polyattn_context_parallel.heads import heads_of_rank, own_heads
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, needs_lse=True)
BACKEND = {"cuda": "TRITON_ATTN", "cpu": None}
"""One by name: a group loads its candidates, and FlashInfer's compile for minutes."""
SIZES = {"cuda": (524_288, 131_072), "cpu": (4_096, 1_024)}
RANKS = 2
STARTED = time.monotonic()


def stage(rank: int, text: str) -> None:
    """Say what a rank has come to, and when: what a section hangs at is the last of it."""
    print(f"    rank {rank} +{time.monotonic() - STARTED:6.1f} s: {text}", flush=True)


class Machine:
    """One rank's device, clock and ranks."""

    def __init__(self, rank: int, kind: str, timeout: float = 60.0):
        self.rank, self.kind = rank, kind
        self.device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        self.sync()
        self.say("device")
        seen = torch.ones(1, device=self.device)
        dist.all_reduce(seen)
        assert float(seen) == RANKS
        self.say("first collective")
        self.context = ContextParallel(init_device_mesh(kind, (RANKS,)), timeout=timeout)
        self.context.agree("the start", "here")
        self.say("ranks joined")
        self.decode_len, self.prompt_len = SIZES[kind]

    def say(self, text: str) -> None:
        stage(self.rank, text)

    def group(self, spec: LayerSpec) -> LayerGroup:
        found = LayerGroup(select(spec, str(self.device), backend=BACKEND[self.kind]))
        self.say(f"group: {found.selection.decision.summary()}")
        return found

    def sync(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def us(self, call: Callable[[], object], calls: int, repeats: int = 5) -> float:
        """Return the median microseconds of a call among `calls` one after another."""
        for _ in range(3):
            call()
        times = []
        for _ in range(repeats):
            self.sync()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            self.sync()
            times.append((time.perf_counter() - started) / calls * 1e6)
        return statistics.median(times)

    def alone_us(self, call: Callable[[], object], calls: int) -> float:
        """Time a call on the first rank alone, while the other waits."""
        found = self.us(call, calls) if self.rank == 0 else 0.0
        self.sync()
        dist.barrier()
        return found

    def random(self, *shape: int, seed: int) -> Tensor:
        """Return the same bfloat16 numbers on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.bfloat16)

    def graph_us(self, call: Callable[[], object], inner: int = 20) -> float:
        """Return the microseconds of a call within a CUDA graph of `inner` of them."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                call()
        return self.us(graph.replay, 3) / inner


def attention64(query: Tensor, key: Tensor, value: Tensor, positions: list[int]) -> Tensor:
    """Return causal attention in float64; `query` (rows, heads, size) at these positions."""
    rows = []
    each = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(each, 1) for t in (key, value))
    for row, position in enumerate(positions):
        scores = torch.einsum("hd,khd->hk", query[row].double(), key[: position + 1])
        weights = torch.softmax(scores * SPEC.scale, 1)
        rows.append(torch.einsum("hk,khd->hd", weights, value[: position + 1]))
    return torch.stack(rows)


def decode(machine: Machine, graph: bool = False) -> dict[str, Any]:
    context, length = machine.context, machine.decode_len
    one = machine.group(SPEC.replace(needs_lse=False))
    form = one.cache_format
    assert form is not None
    blocks = length // form.block_size
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    table = table.to(torch.int32)[None].to(machine.device)
    whole = one.allocate_cache(blocks)
    machine.say("cache")
    whole.key.copy_(machine.random(*whole.key.shape, seed=2))
    whole.value.copy_(machine.random(*whole.value.shape, seed=3))
    query, key, value = (
        machine.random(1, heads, 128, seed=seed) for heads, seed in ((32, 4), (8, 5), (8, 6))
    )
    layer = Attention(one)
    plan = one.plan(Batch.from_lens([1], [length], table, form.block_size))
    single = layer(query, key, value, whole, plan)
    machine.sync()
    machine.say("one GPU's first step")
    found: dict[str, Any] = {"backend": one.selection.decision.summary()}
    if graph:
        found["one_us"] = machine.graph_us(lambda: layer(query, key, value, whole, plan))
    else:
        found["one_us"] = machine.alone_us(lambda: layer(query, key, value, whole, plan), 50)
    dist.barrier()

    group = machine.group(SPEC.replace(block_size=form.block_size))
    shared = ContextGroup(group, context)
    half = blocks // RANKS
    cache = shared.allocate_cache(half)
    # Engine block b is the sequence's blocks 2 b and 2 b + 1, one a rank, in the order of `table`.
    mine = table[0].view(half, RANKS)[:, machine.rank].long()
    cache.key.copy_(whole.key[mine])
    cache.value.copy_(whole.value[mine])
    engine = torch.arange(half, dtype=torch.int32, device=machine.device)[None]
    parallel = ContextAttention(shared, Attention(group))
    batch = Batch.from_lens([1], [length], engine, shared.block_size)
    step = shared.plan(batch)
    found["plan_us"] = machine.us(lambda: shared.plan(batch), 20)
    machine.say("planned")
    out = parallel(query, key, value, cache, step)[0]
    machine.sync()
    machine.say("first step")
    dist.barrier()
    if graph:
        found["two_us"] = machine.graph_us(lambda: parallel(query, key, value, cache, step))
    else:
        found["two_us"] = machine.us(lambda: parallel(query, key, value, cache, step), 50)
    keys = whole.key[table[0].long()].flatten(0, 1)
    values = whole.value[table[0].long()].flatten(0, 1)
    # Two KV heads' groups: in float64 all of them are 17 GB.
    expected = attention64(query[:, :8], keys[:, :2], values[:, :2], [length - 1]).cpu()
    found["error"] = output_error(out[:, :8], expected)
    found["one_error"] = output_error(single[:, :8], expected)
    found["same_bits"] = same_bits(out)
    return found


def same_bits(out: Tensor) -> bool:
    """Whether every rank has the same output."""
    everyones = [torch.empty_like(out) for _ in range(RANKS)]
    dist.all_gather(everyones, out.contiguous())
    return all(torch.equal(everyones[0], other) for other in everyones)


def prompt(machine: Machine, way: str) -> dict[str, Any]:
    context, length = machine.context, machine.prompt_len
    query, key, value = (
        machine.random(length, heads, 128, seed=seed) for heads, seed in ((32, 4), (8, 5), (8, 6))
    )
    one = machine.group(SPEC.replace(needs_lse=False))
    form = one.cache_format
    assert form is not None
    found: dict[str, Any] = {"backend": one.selection.decision.summary()}

    def table(blocks: int) -> Tensor:
        return torch.arange(blocks, dtype=torch.int32, device=machine.device)[None]

    if way == "all_gather":  # the others' sections needn't repeat it
        layer, cache = Attention(one), one.allocate_cache(length // form.block_size)
        batch = Batch.from_lens(
            [length], [length], table(length // form.block_size), form.block_size
        )
        plan = one.plan(batch)
        found["one_us"] = machine.alone_us(lambda: layer(query, key, value, cache, plan), 2)
        del cache
    spec = SPEC if way != "heads" else heads_of_rank(SPEC, RANKS)
    group = machine.group(spec)
    keys = "heads" if way == "heads" else "blocks"
    prefill = "ring" if way == "ring" else "all_gather"
    shared = ContextGroup(group, context, keys=keys, prefill=prefill)  # type: ignore[arg-type]
    blocks = length // shared.block_size
    own: KVCache = shared.allocate_cache(blocks)
    parallel = ContextAttention(shared, Attention(group))
    batch = Batch.from_lens([length], [length], table(blocks), shared.block_size)
    step = shared.plan(batch, queries="own")
    tokens = shared.tokens(batch)
    mine = [t[tokens].contiguous() for t in (query, key, value)]
    machine.say("planned")
    out = parallel(*mine, own, step)[0]
    machine.sync()
    machine.say("first step")
    dist.barrier()
    found["two_us"] = machine.us(lambda: parallel(*mine, own, step), 2)
    rows = [0, 1, len(tokens) // 3, len(tokens) // 2, len(tokens) - 1]
    positions = [int(tokens[row]) for row in rows]
    heads = own_heads(8, 1, 4)  # two KV heads, eight query heads
    chosen = slice(heads.start * 4, heads.stop * 4)
    expected = attention64(query[positions][:, chosen], key[:, heads], value[:, heads], positions)
    found["error"] = output_error(out[rows][:, chosen], expected.cpu())
    return found


def death(machine: Machine) -> dict[str, Any]:
    context = ContextParallel(machine.context.mesh, timeout=5.0)
    shared = ContextGroup(machine.group(SPEC), context)
    table = torch.zeros(1, 1, dtype=torch.int32, device=machine.device)
    batch = Batch.from_lens([1], [1], table, shared.block_size)
    shared.plan(batch)
    if machine.rank:
        os._exit(0)
    started = time.perf_counter()
    try:
        shared.plan(batch)
    except ParallelError as error:
        return {"seconds": time.perf_counter() - started, "says": str(error)[:300]}
    return {"seconds": time.perf_counter() - started, "says": "no error"}


SECTIONS: dict[str, Callable[[Machine], dict[str, Any]]] = {
    "decode": decode,
    "decode_graph": lambda machine: decode(machine, graph=True),
    "all_gather": lambda machine: prompt(machine, "all_gather"),
    "ring": lambda machine: prompt(machine, "ring"),
    "heads": lambda machine: prompt(machine, "heads"),
    "death": death,
}


def run(rank: int, kind: str, port: int, section: str, queue: Any, limit: float) -> None:
    stage(rank, "imported")
    faulthandler.dump_traceback_later(max(limit - 8.0, 1.0), exit=False)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=90)
    )
    stage(rank, "process group")
    try:
        with torch.no_grad():
            found = SECTIONS[section](Machine(rank, kind))
    except Exception:
        found = {"failed": traceback.format_exc()[-1500:]}
    stage(rank, "done")
    queue.put((rank, found))
    queue.close()
    queue.join_thread()
    os._exit(0)


def section(name: str, kind: str, limit: float) -> dict[int, Any]:
    """Run a section in two processes; what each of them found in time."""
    spawn = mp.get_context("spawn")
    queue = spawn.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        spawn.Process(target=run, args=(rank, kind, store.port, name, queue, limit))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, Any] = {}
    until = time.monotonic() + limit
    while len(found) < RANKS and time.monotonic() < until:
        try:
            rank, value = queue.get(timeout=1)
            found[rank] = value
        except Exception:
            if not any(rank.is_alive() for rank in ranks) and queue.empty():
                break
    for rank in ranks:
        rank.join(1)
        if rank.is_alive():
            rank.kill()
            rank.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--device", default="cuda", choices=SIZES)
    parser.add_argument("--limit", type=float, default=100.0)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.sections:
        started = time.monotonic()
        results[name] = section(name, options.device, options.limit)
        print(f"{name}: {time.monotonic() - started:.0f} s", json.dumps(results[name]), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1))
    print(f"\n{'':12}{'one us':>12}{'two us':>12}{'ratio':>8}{'error':>10}")
    alone = results.get("all_gather", {}).get(0, {}).get("one_us")
    for name, ranks in results.items():
        first = ranks.get(0, {})
        one, two = first.get("one_us", alone), first.get("two_us")
        if two is None:
            print(f"{name:12}{json.dumps(first)[-300:]}")
            continue
        ratio = f"{one / two:8.2f}" if one else f"{'-':>8}"
        errors = max(rank.get("error", float("inf")) for rank in ranks.values())
        print(f"{name:12}{one or 0:12.0f}{two:12.0f}{ratio}{errors:10.2g}")


if __name__ == "__main__":
    main()
