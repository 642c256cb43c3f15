"""Runs TRITON_ATTN, interpreted, in ways that must not change a bit: other batches or steps, no cache.

Pieces are of 32 keys. Products are of float64, rounded: those of a host's BLAS follow from a row's place.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from polyattn.conformance.harness.base import Harness
from polyattn.families.attention import reference
from polyattn.kernel import Batch, Frame, LayerParams, LayerSpec
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_triton import alike
from polyattn_triton.attention import TritonAttention
from test_ragged import BASE, DEVICE
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

REQUESTS = [(1, 70), (20, 60), (1, 31), (5, 103), (24, 24)]
SPEC = BASE.replace(num_heads=4, num_kv_heads=1, head_size=16)
PROMPT, CUTS = 75, (0, 40, 41, 44, 64, 75)


def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def run(backend: Any, batch: Batch, query: Any, cache: Any, *keys: Any) -> list[Any]:
    """Run a step, compare it with float64, and return output and LSE."""
    spec: LayerSpec = backend.spec
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
    key, value = keys or (None, None)
    backend.run(backend.plan(batch), Frame(query, key, value, cache, LayerParams(), out, lse))
    wanted, wanted_lse = reference.forward(spec, query, key, value, cache, batch, LayerParams())
    limit = tolerance_of(spec)
    assert output_error(out, wanted) <= limit.output and lse_error(lse, wanted_lse) <= limit.lse
    return [out, lse]


def drawn(spec: LayerSpec, lengths: list[tuple[int, int]]) -> Any:
    """Draw a step; its cache as it is after the step."""
    harness = Harness("TRITON_ATTN", DEVICE, 3)
    return harness.step(harness.layer(spec.replace(batch_invariant=False)), lengths).remembered()


def in_any_batch(spec: LayerSpec) -> None:
    work = drawn(spec, REQUESTS)
    cache, table = work.held, work.batch.block_table
    query, *new = (x.split(work.batch.query_lens) for x in (work.query, work.key, work.value))
    backend: Any = TritonAttention(spec, cache.format, DEVICE)
    backend.num_sms, backend.piece, backend.tall_piece, alike.PIECE = 132, 32, 32, 32
    backend.long = backend.tall_long = 50  # from which on pieces are longer
    backend.early = True  # drafts beside decodes, in a workspace of their own
    alike.SIZES, alike.START, alike.MERGE, alike.PART = np.array([32]), 0, 0, 0

    def step(chosen: list[int]) -> list[Any]:
        queries, lens = zip(*(REQUESTS[i] for i in chosen), strict=True)
        batch = Batch([0, *accumulate(queries)], list(lens), table[chosen])
        given = [torch.cat([x[i] for i in chosen]) for x in (query, *new)]
        found = run(backend, batch, given[0], cache, *given[1:])
        return list(zip(*(part.split(list(queries)) for part in found), strict=True))

    kinds = backend.classes(Batch([0, 20, 44], [60, 24], table[[1, 4]])).tolist()
    assert kinds == [-32, alike.FRESH]
    alone = [step([i])[0] for i in range(len(REQUESTS))]
    assert not backend.spaces[1].parts.numel()
    for chosen in ([0, 1, 2, 3, 4], [4, 3, 0, 0]):
        for i, found in zip(chosen, step(chosen), strict=True):
            same(found, alone[i])
    assert backend.spaces[1].parts.numel()


def in_any_steps(spec: LayerSpec) -> None:
    """Chunks, a decode and drafts beside the whole prompt, and beside that without a cache."""
    work = drawn(spec, [(PROMPT, PROMPT)])
    query, cache, table = work.query, work.held, work.batch.block_table
    backend: Any = TritonAttention(spec, cache.format, DEVICE)
    backend.steps_piece = 32
    whole = run(backend, Batch([0, PROMPT], [PROMPT], table), query, cache)
    for first, last in pairwise(CUTS):
        batch = Batch([0, last - first], [last], table)
        same(run(backend, batch, query[first:last], cache), [x[first:last] for x in whole])
    given: Any = TritonAttention(spec.replace(cached=False, block_size=None), None, DEVICE)
    given.steps_piece, given.room = 32, 1  # each tile in a launch of its own
    same(run(given, Batch([0, PROMPT], [PROMPT], None), query, None, work.keys, work.values), whole)


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), int((one != other).sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    InterpreterBuilder.create_dot = dot
    in_any_batch(SPEC.replace(batch_invariant="batch"))
    for fields in ({}, {"sliding_window": 21, "sink_tokens": 3}):
        in_any_steps(SPEC.replace(batch_invariant="calls", **fields))
    print("same bits")
