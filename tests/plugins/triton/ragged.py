"""Runs Triton's backends over uneven steps in its interpreter, beside the float64 reference.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the ways that
were run.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

import torch
from polyattn import Device, LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import AttentionKind, Batch, Frame, KVCache, LatentSpec, LayerParams
from polyattn.selection.cache_format import format_of
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_triton.attention import TritonAttention
from polyattn_triton.mla import TritonMLA

torch.set_num_threads(1)
DEVICE = Device("cpu", "x86_64", torch_device="cpu")
BLOCK = 16
BASE = LayerSpec(num_heads=8, num_kv_heads=2, head_size=32, dtype="float32", needs_lse=True)
SPECS = {
    "plain": BASE,
    "groups of 7": BASE.replace(num_heads=14),
    "window, sink tokens": BASE.replace(sliding_window=21, sink_tokens=3),
    "window": BASE.replace(sliding_window=60),
    "chunks": BASE.replace(chunk_size=70),
    "soft cap, sinks": BASE.replace(num_heads=10, logit_soft_cap=1.5, learned_sinks=True),
    "ALiBi": BASE.replace(alibi=True),
    "not causal": BASE.replace(causal=False),
    "int8": BASE.replace(kv_cache_dtype="int8"),
    "captured": BASE.replace(graph_capture="single_token_decode"),
    "wide groups": BASE.replace(num_heads=20, num_kv_heads=1, head_size=264),
    "latent": LayerSpec(
        kind=AttentionKind.MLA, num_heads=20, num_kv_heads=1, head_size=48, v_head_size=32,
        dtype="float32", latent=LatentSpec(rank=64, rope_head_size=16), needs_lse=True,
    ),
}  # fmt: skip
SPECS["latent, not causal"] = SPECS["latent"].replace(causal=False)
STEPS: dict[str, list[tuple[int, int]]] = {
    "one long decode": [(1, 300), (1, 5), (1, 0), (1, 70)],
    "equal decodes": [(1, 290), (1, 300)],
    "few tokens": [(4, 260), (3, 3), (0, 9), (1, 1), (9, 40)],
    "drafts": [(16, 150), (3, 3), (0, 9), (14, 40)],  # of large groups: two tiles a sequence
    "long prefill": [(20, 260), (3, 9), (0, 5)],
    "nothing": [(0, 7), (0, 0)],
}


def filled(spec: LayerSpec, lens: list[int], seed: int) -> tuple[KVCache, torch.Tensor]:
    """Return a cache whose other slots are NaN, and a table whose other entries point there."""
    chance = torch.Generator().manual_seed(seed)
    needed = [-(-n // BLOCK) for n in lens]
    form = format_of(spec, DEVICE, "NHD", BLOCK)
    cache = KVCache.allocate(form, sum(needed) + 2)
    integer = cache.key.dtype == torch.int8
    for stored in (cache.key, cache.value):
        stored.fill_(127 if integer else torch.nan)
    order = (torch.randperm(sum(needed) + 1, generator=chance) + 1).int().split([*needed, 1])[:-1]
    table = torch.zeros(len(lens), max(needed) + 1, dtype=torch.int32)
    for row, (blocks, length) in enumerate(zip(order, lens, strict=True)):
        table[row, : len(blocks)] = blocks
        at = torch.arange(length)
        where = blocks[at // BLOCK].long(), at % BLOCK
        for stored in (cache.key,) if form.value_in_key else (cache.key, cache.value):
            noise = torch.randn(length, *stored.shape[2:], generator=chance)
            stored[where] = (noise * 25).round().to(torch.int8) if integer else noise
    return cache, table


def check(name: str, step: str, sms: int, splits: int = 0) -> str:
    """Run a step twice; raise if it is wrong or not the same bits. Returns the way.

    `splits`: of even lengths, and no program merges any.
    """
    spec = SPECS[name]
    queries, lens = [q for q, _ in STEPS[step]], [n for _, n in STEPS[step]]
    cache, table = filled(spec, lens, sms)
    chance = torch.Generator().manual_seed(7)
    quantized = spec.kv_cache_dtype != "auto"
    params = LayerParams(
        sinks=torch.randn(spec.num_heads, generator=chance) if spec.learned_sinks else None,
        alibi_slopes=torch.rand(spec.num_heads, generator=chance) / 10 if spec.alibi else None,
        k_scale=0.04 if quantized else 1.0, v_scale=0.06 if quantized else 1.0,
    )  # fmt: skip
    form = cache.format
    query = torch.randn(sum(queries), spec.num_heads, form.head_size, generator=chance)
    backend: Any = (TritonMLA if spec.latent else TritonAttention)(spec, form, DEVICE)
    if spec.latent:
        backend.kernels.programs = sms
    else:
        backend.num_sms = sms
        if splits:
            backend.splits, backend.by_one = lambda batch: splits, 0
    starts = [0, *accumulate(queries)]
    batch = Batch(starts, lens, table)
    plan = backend.plan(batch)
    found = []
    for _ in range(2):
        out = torch.full((*query.shape[:2], form.v_head_size), torch.nan)
        lse = torch.full(query.shape[:2], torch.nan)
        backend.run(plan, Frame(query, None, None, cache, params, out, lse))
        found.append((out, lse))
    (out, lse), again = found
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), "other bits"
    plain = spec
    if spec.latent:  # absorbed: attention of all heads to one key, whose first part is the value
        plain = LayerSpec(
            num_heads=spec.num_heads, num_kv_heads=1, head_size=form.head_size,
            v_head_size=form.v_head_size, dtype=spec.dtype, scale=spec.scale, causal=spec.causal,
        )  # fmt: skip
    wanted, wanted_lse = reference.forward(plain, query, None, None, cache, batch, params)
    limit = tolerance_of(spec)
    if query.numel():
        error, off = output_error(out, wanted), lse_error(lse, wanted_lse)
        assert error <= limit.output and off <= limit.lse, (name, step, sms, error, off)
    return str(plan.way)


if __name__ == "__main__":
    names = sys.argv[1].split(";") if len(sys.argv) > 1 else list(SPECS)
    for name in names:
        for step in STEPS:
            if name == "captured" and step != "one long decode":
                continue
            print(f"{name}, {step}: {check(name, step, 4)}", flush=True)
        if not name.startswith(("latent", "captured")):
            for splits in (3, 8):
                way = check(name, "equal decodes", 4, splits)
                print(f"{name}, equal decodes in {splits}: {way}", flush=True)
