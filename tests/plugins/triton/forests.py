"""Runs TRITON_ATTN over shared prefixes in Triton's interpreter, beside the float64 reference.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the heights of
the tiles that were run.
"""

from __future__ import annotations

import sys
from itertools import accumulate

import torch
from polyattn import Device, LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Levels, SharedRun
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.runtime.step.shared_prefix import check_forest
from polyattn.selection.cache_format import format_of
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_triton import prefix
from polyattn_triton.attention import TritonAttention
from polyattn_triton.prefix import PrefixPlan

torch.set_num_threads(1)
DEVICE = Device("cpu", "x86_64", torch_device="cpu")
BLOCK = 16
BASE = LayerSpec(num_heads=4, num_kv_heads=1, head_size=32, dtype="float32", needs_lse=True)
SPECS = {
    "plain": BASE,
    "groups of 7": BASE.replace(num_heads=14, num_kv_heads=2, needs_lse=False),
    "one head a group": BASE.replace(num_heads=2, num_kv_heads=2, head_size=40),
    "soft cap, sinks": BASE.replace(logit_soft_cap=1.5, learned_sinks=True),
    "values of 48": BASE.replace(v_head_size=48),
    "int8": BASE.replace(kv_cache_dtype="int8"),
    "int8, scales of heads, sinks": BASE.replace(
        num_heads=8, num_kv_heads=2, kv_cache_dtype="int8", scales="head", learned_sinks=True
    ),
    "several tokens": BASE.replace(logit_soft_cap=1.5),
    "several tokens, int8": BASE.replace(kv_cache_dtype="int8", learned_sinks=True),
    "a window": BASE.replace(sliding_window=50, needs_lse=True),
    "several tokens, a window": BASE.replace(sliding_window=50),
    "ALiBi": BASE.replace(alibi=True),
    "several tokens, a window, ALiBi": BASE.replace(sliding_window=70, alibi=True),
    "captured": BASE.replace(graph_capture="single_token_decode"),
}
Forest = tuple[Levels, list[int]]
FORESTS: dict[str, Forest] = {
    "one run": (((SharedRun((0, 1, 2), 0, 5),),), [81, 100, 150]),
    "a row without, padding": (((SharedRun((0, 3), 0, 3),),), [50, 20, 0, 49, 90]),
    "many rows": (((SharedRun(tuple(range(20)), 0, 6),),), [97 + 3 * i for i in range(20)]),
    "three levels": (
        (
            (SharedRun((0, 1, 2, 3, 4, 6), 0, 4),),
            (SharedRun((0, 2, 4), 4, 3), SharedRun((1, 6), 4, 1)),
            (SharedRun((2, 4), 7, 2),),
        ),
        [130, 100, 150, 65, 200, 33, 90],
    ),
    "nothing shared": ((), [40, 0, 70]),
}


def filled(spec: LayerSpec, forest: Forest, seed: int) -> tuple[KVCache, torch.Tensor]:
    """Return a cache whose other slots are NaN, and a table whose other entries point there."""
    levels, lens = forest
    chance = torch.Generator().manual_seed(seed)
    needed = [-(-n // BLOCK) for n in lens]
    cache = KVCache.allocate(format_of(spec, DEVICE, "NHD", BLOCK), sum(needed) + 2)
    integer = cache.key.dtype == torch.int8
    for stored in (cache.key, cache.value):
        stored.fill_(127 if integer else torch.nan)
    order = (torch.randperm(sum(needed) + 1, generator=chance) + 1).int().split([*needed, 1])[:-1]
    table = torch.zeros(len(lens), max(needed) + 1, dtype=torch.int32)
    for row, blocks in enumerate(order):
        table[row, : len(blocks)] = blocks
    for run in (run for level in levels for run in level):
        columns = slice(run.first, run.first + run.count)
        table[list(run.rows), columns] = table[run.rows[0], columns]
    for row, length in enumerate(lens):
        at = torch.arange(length)
        where = table[row, at // BLOCK].long(), at % BLOCK
        for stored in (cache.key, cache.value):
            noise = torch.randn(length, *stored.shape[2:], generator=chance)
            stored[where] = (noise * 25).round().to(torch.int8) if integer else noise
    return cache, table


def params_of(spec: LayerSpec, chance: torch.Generator) -> LayerParams:
    scales: tuple[object, object] = (1.0, 1.0)
    if spec.kv_cache_dtype != "auto":
        scales = (0.04, 0.06)
    if spec.scales == "head":
        scales = tuple(x * torch.arange(1, spec.num_kv_heads + 1) for x in scales)  # type: ignore
    params = LayerParams(
        sinks=torch.randn(spec.num_heads, generator=chance) if spec.learned_sinks else None,
        k_scale=scales[0], v_scale=scales[1],
        alibi_slopes=torch.rand(spec.num_heads, generator=chance) / 8 if spec.alibi else None,
    )  # fmt: skip
    if spec.scales == "head":
        params.q_scale = params.out_scale = torch.ones(spec.num_kv_heads)
    return params


def check(name: str, which: str, sms: int) -> PrefixPlan:
    """Run a step twice; raise if it is wrong or not the same bits."""
    spec, forest = SPECS[name], FORESTS[which]
    levels, lens = forest
    check_forest(levels, lens)
    cache, table = filled(spec, forest, sms)
    chance = torch.Generator().manual_seed(7)
    params = params_of(spec, chance)
    # As many new tokens as a row's own keys, and one of a padding row.
    shared = [0] * len(lens)
    for run in (run for level in levels for run in level):
        for row in run.rows:
            shared[row] = (run.first + run.count) * BLOCK
    most = 3 if name.startswith("several") else 1
    queries = [
        max(1, min(most + row % 2, n - s)) if most > 1 else 1
        for row, (n, s) in enumerate(zip(lens, shared, strict=True))
    ]
    tokens = sum(queries)
    query = torch.randn(tokens, spec.num_heads, spec.head_size, generator=chance)
    backend = TritonAttention(spec, cache.format, DEVICE)
    backend.num_sms = sms
    batch = Batch([0, *accumulate(queries)], lens, table, shared_prefix=levels)
    rows = tokens
    if name == "captured":  # what was planned for the most, refilled
        rows += 3
        buffers = StepBuffers(rows, 1, 13 * BLOCK, BLOCK, "cpu", sharing=True)
        plan = backend.plan(buffers.batch([13 * BLOCK] * rows))
        backend.plan(
            buffers.fill(Batch([0, 1, 2], [30, 20], table[:2])), plan
        )  # another step between
        backend.plan(buffers.fill(batch), plan)
        query = torch.cat([query, torch.randn(3, *query.shape[1:], generator=chance)])
    else:
        plan = backend.plan(batch)
    found = []
    for _ in range(2):
        out = torch.full((rows, spec.num_heads, spec.v_head_size), torch.nan)
        lse = torch.full((rows, spec.num_heads), torch.nan) if spec.needs_lse else None
        backend.run(plan, Frame(query, None, None, cache, params, out, lse))
        found.append((out, lse))
    (out, lse), again = found
    assert torch.equal(out, again[0]), "other bits"
    assert not out[tokens:].any(), "padding rows get zeros"
    count = tokens
    wanted, wanted_lse = reference.forward(spec, query[:count], None, None, cache, batch, params)
    limit = tolerance_of(spec)
    error = output_error(out[:count], wanted)
    off = 0.0 if lse is None else lse_error(lse[:count], wanted_lse)
    assert error <= limit.output and off <= limit.lse, (name, which, sms, error, off)
    assert isinstance(plan, PrefixPlan)
    return plan


TALL = ("many rows", "three levels")
"""Forests that are run in the highest tiles that there are, which few keys are not worth."""


if __name__ == "__main__":
    fastest = prefix.fastest
    names = sys.argv[1].split(";") if len(sys.argv) > 1 else list(SPECS)
    for name in names:
        for which in FORESTS:
            prefix.fastest = (lambda *args: args[-1][-1]) if which in TALL else fastest
            print(f"{name}, {which}: up to {check(name, which, 3).config.tall}", flush=True)
