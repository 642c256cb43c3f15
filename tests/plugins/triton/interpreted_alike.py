"""Runs requests in batches and alone on TRITON_ATTN, interpreted, with pieces of 32 keys: same bits."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from polyattn.families.attention import reference
from polyattn.kernel import Batch, Frame, LayerParams
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_triton.attention import TritonAttention
from ragged import BASE, DEVICE, filled

REQUESTS = [(1, 70), (20, 60), (1, 31), (3, 33), (24, 24)]
SPEC = BASE.replace(num_heads=4, num_kv_heads=1, head_size=16, batch_invariant="batch")


def run(backend: Any, cache: Any, query: Any, table: Any, chosen: list[int]) -> tuple[Any, Any]:
    lens = [REQUESTS[i] for i in chosen]
    starts = [0, *accumulate(q for q, _ in lens)]
    out = torch.full((starts[-1], SPEC.num_heads, SPEC.head_size), torch.nan)
    lse = torch.full((starts[-1], SPEC.num_heads), torch.nan)
    given = torch.cat([query[i] for i in chosen])
    batch = Batch(starts, [n for _, n in lens], table[chosen])
    plan = backend.plan(batch)
    backend.run(plan, Frame(given, None, None, cache, LayerParams(), out, lse))
    wanted, wanted_lse = reference.forward(SPEC, given, None, None, cache, batch, LayerParams())
    limit = tolerance_of(SPEC)
    assert output_error(out, wanted) <= limit.output and lse_error(lse, wanted_lse) <= limit.lse
    return out.split([q for q, _ in lens]), lse.split([q for q, _ in lens])


def main() -> None:
    torch.set_num_threads(1)
    cache, table = filled(SPEC, [n for _, n in REQUESTS], 3)
    chance = torch.Generator().manual_seed(1)
    query = [torch.randn(q, SPEC.num_heads, SPEC.head_size, generator=chance) for q, _ in REQUESTS]
    backend = TritonAttention(SPEC, cache.format, DEVICE)
    backend.piece = 32
    alone = [run(backend, cache, query, table, [i]) for i in range(len(REQUESTS))]
    for chosen in ([0, 1, 2, 3, 4], [4, 3, 0, 0]):
        outs, lses = run(backend, cache, query, table, chosen)
        for i, out, lse in zip(chosen, outs, lses, strict=True):
            assert torch.equal(out, alone[i][0][0]) and torch.equal(lse, alone[i][1][0]), (
                i,
                chosen,
            )
    print("same bits")


main()
