"""What the ranks of a test do: each has its part of every sequence, the first compares with float64."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from polyattn import Attention, LatentAttention, LayerGroup, LayerSpec
from polyattn.workload.base import workload
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_context_parallel import ContextAttention, ContextGroup, ContextParallel
from polyattn_context_parallel.heads import heads_of_rank, own_heads
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Case:
    """A layer and one step of it. `query_lens`, `seq_lens`: of all ranks' sequences."""

    spec: dict[str, Any]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    queries: str = "all"
    group: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def spawned(size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Run `work(rank, size, *given)` in `size` processes of one thread; return what each found."""
    context = mp.get_context("forkserver")
    # Importing torch takes seconds, which each rank would spend.
    context.set_forkserver_preload(["torch.distributed.device_mesh"])
    queue = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_run, args=(rank, size, store.port, queue, work, given))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        until = time.monotonic() + 300
        while len(found) < size:
            assert time.monotonic() < until, f"ranks {sorted(set(range(size)) - found.keys())} hang"
            try:
                rank, value = queue.get(timeout=0.5)
                found[rank] = value
            except Empty:
                assert any(p.is_alive() for p in processes) or not queue.empty(), "ranks died"
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(size)]


def _run(rank: int, size: int, port: int, queue: Any, work: Callable[..., Any], given: Any) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    try:
        queue.put((rank, work(rank, size, queue, *given)))
    except Exception:
        queue.put((rank, traceback.format_exc()))
    # Not destroyed: a rank that failed has left the others at another place.
    queue.close()
    queue.join_thread()
    os._exit(0)


def run_cases(rank: int, size: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Run every case on this rank; its findings by name, or its error as text."""
    context = ContextParallel(init_device_mesh("cpu", (size,)), timeout=60)
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = run_case(case, context)
        except Exception:
            found[name] = traceback.format_exc()
            if context.broken:
                context = ContextParallel(init_device_mesh("cpu", (size,)), timeout=60)
    return found


def run_case(case: Case, context: ContextParallel) -> dict[str, Any]:
    """Return the errors against float64, each as a multiple of what is allowed, and the outputs' bits."""
    spec = LayerSpec(**{"needs_lse": True, **case.spec})
    made = Made(case, spec, context)
    if case.group.get("keys") == "heads":
        return made.by_heads()
    return made.by_blocks()


class Made:
    """The whole step, alike on every rank: a cache of everything, new tokens, parameters."""

    def __init__(self, case: Case, spec: LayerSpec, context: ContextParallel):
        self.case, self.spec, self.context = case, spec, context
        form = LayerGroup(spec).cache_format
        assert form is not None
        self.size = form.block_size
        self.engine_block = self.size * context.size
        lengths = list(zip(case.query_lens, case.seq_lens, strict=True))
        group = LayerGroup(spec.replace(block_size=self.engine_block))
        self.work: Any = workload(group, lengths, case.seed).remembered()
        self.given = [getattr(self.work, name) for name in self.work.names[:3]]
        self.batch, self.whole = self.work.batch, self.work.cache

    def layer(self, group: LayerGroup, heads: slice = slice(None)) -> Attention | LatentAttention:
        made = self.work.layer
        scale = made.params.k_scale
        if self.spec.latent is not None:
            weights = (each[heads].contiguous() for each in made.weights)
            return LatentAttention(group, *weights, k_scale=scale)
        sinks, slopes = (
            None if each is None else each[heads].contiguous()
            for each in (made.params.sinks, made.params.alibi_slopes)
        )
        return Attention(
            group, sinks=sinks, alibi_slopes=slopes, k_scale=scale, v_scale=made.params.v_scale
        )

    def by_blocks(self) -> dict[str, Any]:
        case, context = self.case, self.context
        group = LayerGroup(self.spec)
        shared = ContextGroup(group, context, **case.group)
        cache = shared.allocate_cache(self.whole.num_blocks)
        mine = slice(context.rank * self.size, (context.rank + 1) * self.size)
        for part, whole in ((cache.key, self.whole.key), (cache.value, self.whole.value)):
            part.copy_(whole[:, mine])
        layer = ContextAttention(shared, self.layer(group))
        plan = shared.plan(self.batch, queries=case.queries)
        rows: Any = slice(None)
        if case.queries == "own":
            rows = shared.tokens(self.batch)
        query, key, value = (t[rows] for t in self.given)
        out, lse = layer(query, key, value, cache, plan)
        again = layer(query, key, value, cache, plan)
        expected, expected_lse = self.work.expected
        heads = slice(None)
        if case.group.get("merge") == "all_to_all" and case.queries == "all":
            heads = own_heads(self.spec.num_heads, context.rank, context.size)
        found = self._compared(out, lse, expected[rows][:, heads], expected_lse[rows][:, heads])
        held = self.work.held
        found["stored"] = all(
            same(part, whole[:, mine])
            for part, whole in ((cache.key, held.key), (cache.value, held.value))
        )
        found["again"] = torch.equal(out, again[0])
        found["explained"] = plan.explain()
        return found

    def by_heads(self) -> dict[str, Any]:
        case, context = self.case, self.context
        group = LayerGroup(
            heads_of_rank(self.spec, context.size).replace(block_size=self.engine_block)
        )
        shared = ContextGroup(group, context, **case.group)
        kv = own_heads(self.whole.key.shape[2], context.rank, context.size)
        cache = shared.allocate_cache(self.whole.num_blocks)
        if self.spec.latent is not None:
            cache.key.copy_(self.whole.key)
        else:
            cache.key.copy_(self.whole.key[:, :, kv])
            cache.value.copy_(self.whole.value[:, :, kv])
        heads = own_heads(self.spec.num_heads, context.rank, context.size)
        layer = ContextAttention(shared, self.layer(group, heads))
        plan = shared.plan(self.batch, queries=case.queries)
        rows: Any = shared.tokens(self.batch) if case.queries == "own" else slice(None)
        out, lse = layer(*(t[rows] for t in self.given), cache, plan)
        expected, expected_lse = self.work.expected
        return self._compared(out, lse, expected[rows], expected_lse[rows])

    def _compared(
        self, out: Tensor, lse: Tensor, expected: Tensor, expected_lse: Tensor
    ) -> dict[str, Any]:
        allowed = tolerance_of(self.spec)
        return {
            "out": output_error(out, expected) / allowed.output,
            "lse": lse_error(lse, expected_lse) / allowed.lse,
            "bits": hashlib.sha256(bytes(out.contiguous().view(torch.uint8).flatten().tolist()
                                         )).hexdigest(),
            "rows": len(out),
        }  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two caches hold the same bits, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))
