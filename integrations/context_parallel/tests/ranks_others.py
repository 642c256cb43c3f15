"""What else the ranks of a test do: placed keys, Star Attention, tensor parallelism, and going wrong."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from polyattn import (
    Attention,
    Batch,
    CustomMask,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    PolyattnError,
    select,
)
from polyattn.families.attention import reference
from polyattn.families.attention.workload import widths
from polyattn.families.mla import reference as reference_latent
from polyattn.families.mla.workload import latent_weights
from polyattn.kernel import STORAGE_DTYPES
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_context_parallel import ContextAttention, ContextGroup, ContextParallel
from polyattn_context_parallel.heads import heads_of_rank
from ranks_worker import Case, mesh_of, run_cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float64", block_size=16, needs_lse=True
)


def attention_inputs(
    spec: LayerSpec, tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normal (query, key, value) of `tokens` tokens."""
    query, key, value = (
        torch.randn(tokens, *width, generator=generator).to(STORAGE_DTYPES[spec.dtype])
        for width in widths(spec)
    )
    return query, key, value


def worst(spec: LayerSpec, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """The larger error of output and LSE, as a multiple of what is allowed."""
    allowed = tolerance_of(spec)
    return max(
        output_error(found[0], expected[0]) / allowed.output,
        lse_error(found[1], expected[1]) / allowed.lse,
    )


def star(rank: int, size: int, spec: LayerSpec) -> float:
    """Both phases: each rank's part of two contexts, then a question of several tokens, then one."""
    context = ContextParallel(mesh_of(size))
    generator = torch.Generator().manual_seed(7)
    group = LayerGroup(spec)
    sinks = torch.randn(4, generator=generator) if spec.learned_sinks else None
    shared = ContextGroup(group, context, keys="placed", prefill="star")
    layer = ContextAttention(shared, Attention(group, sinks=sinks))
    params = layer.layer.params
    # The second context is so short that the last rank has none of it, and others less than a question.
    parts = [[40, 9] if r == 0 else [37 - r, 0 if r == size - 1 else 2] for r in range(size)]
    contexts = [attention_inputs(spec, sum(lens), generator) for lens in parts]
    cache = shared.allocate_cache(16)
    table = torch.arange(16, dtype=torch.int32).flip(0).view(2, 8)
    mine = parts[rank]
    plan = shared.plan(Batch.from_lens(mine, mine, table, 16), queries="own")
    found = layer(*contexts[rank], cache, plan)
    errors = [worst(spec, found, _anchored(spec, parts, contexts, rank, params))]

    query_lens, held, news = [6, 3], [list(lens) for lens in parts], []
    for _ in range(2):
        new = attention_inputs(spec, sum(query_lens), generator)
        news.append((query_lens, new))
        last = rank == size - 1
        if last:
            held[-1] = [a + b for a, b in zip(held[-1], query_lens, strict=True)]
            batch = Batch.from_lens(query_lens, held[-1], table, 16)
        else:
            batch = Batch([0, query_lens[0], sum(query_lens)], held[rank], table)
        found = layer(*new, cache, shared.plan(batch))
        again = _all_keys([*zip(parts, contexts, strict=True), *news])
        rows = [slice(0, query_lens[0]), slice(query_lens[0], sum(query_lens))]
        each = [reference.attend(spec, new[0][rows[i]], *again[i], params) for i in range(2)]
        expected = torch.cat([e[0] for e in each]), torch.cat([e[1] for e in each])
        errors.append(worst(spec, found, expected))
        query_lens = [1, 1]
    return max(errors)


def _anchored(
    spec: LayerSpec, parts: Any, contexts: Any, rank: int, params: Any
) -> tuple[Tensor, Tensor]:
    """Star Attention's first phase in float64, a sequence at a time."""
    outs, lses, first, anchor = [], [], 0, 0
    for seq, count in enumerate(parts[rank]):
        query, key, value = (t[first : first + count] for t in contexts[rank])
        if rank:
            stop = anchor + parts[0][seq]
            key = torch.cat([contexts[0][1][anchor:stop], key])
            value = torch.cat([contexts[0][2][anchor:stop], value])
        out, lse = reference.attend(spec, query, key, value, params)
        outs.append(out)
        lses.append(lse)
        first, anchor = first + count, anchor + parts[0][seq]
    return torch.cat(outs), torch.cat(lses)


def _all_keys(runs: list[tuple[list[int], Any]]) -> list[tuple[Tensor, Tensor]]:
    """Every rank's keys and values of each sequence, then the new ones, in this order."""
    found = []
    for seq in range(2):
        cuts = [slice(sum(lens[:seq]), sum(lens[: seq + 1])) for lens, _ in runs]
        keys, values = (
            torch.cat([given[which][cut] for cut, (_, given) in zip(cuts, runs, strict=True)])
            for which in (1, 2)
        )
        found.append((keys, values))
    return found


def latent_decode(rank: int, size: int, spec: LayerSpec) -> float:
    """An MLA layer's rows of one token over placed latents."""
    context = ContextParallel(mesh_of(size))
    generator = torch.Generator().manual_seed(8)
    group = LayerGroup(spec)
    weights = latent_weights(spec, generator)
    assert spec.latent is not None
    shared = ContextGroup(group, context, keys="placed")
    layer = ContextAttention(shared, LatentAttention(group, *weights))
    lens = [20 + 13 * r for r in range(size)]
    lens[-1] = 0
    rows = [torch.randn(n, spec.latent.size, generator=generator) for n in lens]
    query = torch.randn(1, spec.num_heads, spec.head_size, generator=generator)
    new = torch.randn(1, spec.latent.size, generator=generator)
    cache = shared.allocate_cache(8)
    table = torch.arange(8, dtype=torch.int32)[None]
    cache.key.view(-1, spec.latent.size)[: lens[rank]] = rows[rank]
    if rank == 0:
        batch = Batch.from_lens([1], [lens[0] + 1], table, 16)
    else:
        batch = Batch([0, 1], [lens[rank]], table)
    latent, rope = new.split([spec.latent.rank, spec.latent.rope_head_size], 1)
    found = layer(query, latent.contiguous(), rope.contiguous(), cache, shared.plan(batch))
    expected = reference_latent.attend(spec, query, torch.cat([*rows, new]).double(), weights)
    return worst(spec, found, expected)


def tensor_parallel(rank: int, size: int, queue: Any) -> float:
    """Two ranks share heads and two share keys; every rank has its heads of the whole context."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tensor", "context"))
    context = ContextParallel(mesh["context"])
    heads = mesh["tensor"].get_local_rank()
    generator = torch.Generator().manual_seed(3)
    query, key, value = attention_inputs(SPEC, 50, generator)
    spec = SPEC.replace(num_heads=2, num_kv_heads=1)
    group = LayerGroup(spec)
    shared = ContextGroup(group, context)
    layer, cache = ContextAttention(shared, Attention(group)), shared.allocate_cache(4)
    cuts = slice(2 * heads, 2 * heads + 2), slice(heads, heads + 1)
    own = query[:, cuts[0]].contiguous(), *(t[:, cuts[1]].contiguous() for t in (key, value))
    table = torch.arange(4, dtype=torch.int32)[None]
    errors = []
    for start, stop in ((0, 47), (47, 48), (48, 50)):
        batch = Batch.from_lens([stop - start], [stop], table, shared.block_size)
        found = layer(*(t[start:stop] for t in own), cache, shared.plan(batch))
        whole = reference.attend(SPEC, query[start:stop], key[:stop], value[:stop])
        errors.append(worst(spec, found, (whole[0][:, cuts[0]], whole[1][:, cuts[0]])))
    return max(errors)


def said(call: Callable[[], Any]) -> tuple[str, float]:
    """What a call raised, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except PolyattnError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    except Exception:
        return traceback.format_exc(), time.monotonic() - started
    return "nothing", time.monotonic() - started


def going_wrong(rank: int, size: int, queue: Any) -> dict[str, Any]:
    """Ranks that disagree, that refuse, that fail alone, and one that dies."""
    mesh = mesh_of(size)
    context = ContextParallel(mesh, timeout=60)
    other = SPEC.replace(sliding_window=8) if rank else SPEC
    found = {"spec": said(lambda: ContextGroup(LayerGroup(other), context))}
    table = torch.zeros(size, 4, dtype=torch.int32)
    group = LayerGroup(SPEC)
    shared = ContextGroup(group, context)
    size_of = shared.block_size

    def batch(*lens: int) -> Batch:
        return Batch.from_lens([1] * len(lens), list(lens), table[: len(lens)], size_of)

    found["lengths"] = said(lambda: shared.plan(batch(5, 6 + rank)))
    found["sequences"] = said(lambda: shared.plan(batch(*[5] * (1 + rank))))
    found["one refuses"] = said(
        lambda: shared.plan(Batch.from_lens([1], [5], table[:1], size_of if rank else 7))
    )
    # Nobody is left behind by any of those: the next step runs.
    layer, cache = ContextAttention(shared, Attention(group)), shared.allocate_cache(4)
    query, key, value = attention_inputs(SPEC, 1, torch.Generator().manual_seed(1))
    step = shared.plan(batch(1))
    found["goes on"] = said(lambda: layer(query, key, value, cache, step))
    # What all ranks are given wrong, all refuse.
    checking = ContextGroup(group, ContextParallel(mesh, timeout=60))
    layer = ContextAttention(checking, Attention(group, checks=True))
    beyond = Batch.from_lens([1], [5], table[:1] + 99, checking.block_size)
    step = checking.plan(beyond)
    found["a table"] = said(lambda: layer(query, key, value, cache, step))
    # A tensor that one rank alone is given wrong: it says so, and the others wait no longer than told.
    short = ContextParallel(mesh, timeout=10)
    shared = ContextGroup(group, short)
    layer = ContextAttention(shared, Attention(group))
    step = shared.plan(batch(1))
    bad = query[:0] if rank == size - 1 else query
    found["a shape"] = said(lambda: layer(bad, key, value, cache, step))
    found["after it"] = said(lambda: layer(query, key, value, cache, step))
    last = ContextParallel(mesh, timeout=60)
    shared = ContextGroup(group, last)
    layer = ContextAttention(shared, Attention(group))
    step = shared.plan(batch(1))
    dist.barrier()
    if rank == size - 1:
        queue.put((rank, found))
        queue.close()
        queue.join_thread()
        os._exit(1)
    found["death"] = said(lambda: layer(query, key, value, cache, step))
    found["a plan after it"] = said(lambda: shared.plan(batch(1)))
    return found


def refused(rank: int, size: int, asked: dict[str, Any]) -> dict[str, str]:
    """What each way of asking is refused with; every rank says the same."""
    context = ContextParallel(mesh_of(size))
    found = {}
    for name, (spec, options) in asked.items():
        found[name] = said(lambda: ContextGroup(LayerGroup(spec), context, **options))[0]  # noqa: B023
    shared, table = ContextGroup(LayerGroup(SPEC), context), torch.zeros(1, 1, dtype=torch.int32)
    masked = Batch([0, 1], [5], table, mask=CustomMask.tree([[-1]]))
    found["a step's mask"] = said(lambda: shared.plan(masked))[0]
    ends, lens = torch.tensor([[0, 1], [5, 0]], dtype=torch.int32)
    bounds = Batch.on_buffers([0, 1], [9], ends, lens[:1], table, None)
    found["a step of bounds"] = said(lambda: shared.plan(bounds))[0]
    bounded = LayerGroup(select(SPEC.replace(length_bounds=True), "cpu", backend="VANILLA"))
    found["a layer of bounds"] = said(lambda: ContextGroup(bounded, context))[0]
    group = LayerGroup(heads_of_rank(SPEC.replace(alibi=True), size))
    by_heads = ContextGroup(group, context, keys="heads")
    found["slopes"] = said(lambda: ContextAttention(by_heads, Attention(group)))[0]
    reader = ContextAttention(shared, Attention(shared.group, own_keys=False))
    step = shared.plan(Batch.from_lens([1], [1], table, shared.block_size))
    rows = torch.zeros(1, SPEC.num_heads, SPEC.head_size, dtype=torch.float64)
    keys = rows[:, : SPEC.num_kv_heads]
    cache = shared.allocate_cache(1)
    found["a reader's keys"] = said(lambda: reader(rows, keys, keys, cache, step))[0]
    return found


def run_all(
    rank: int,
    size: int,
    queue: Any,
    cases: dict[str, Case],
    more: dict[str, tuple[Callable[..., Any], Any]],
) -> dict[str, Any]:
    """Run everything that two ranks can do without losing each other; findings, or errors, by name."""
    found = run_cases(rank, size, cases)
    for name, (work, given) in more.items():
        try:
            found[name] = work(rank, size, given)
        except Exception:
            found[name] = traceback.format_exc()
    return found
