"""What is compiled before the first step? Every kernel that a layer with functions of its own may run.

Steps are planned as any others are, of sequences whose blocks are all one; what they would launch is
compiled, and not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from polyattn.kernel import (
    INPUT_DTYPES,
    STORAGE_DTYPES,
    Batch,
    BlockSparseMask,
    CustomMask,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Pointwise,
)
from torch import Tensor

from polyattn_triton.launch import compiling_only

if TYPE_CHECKING:
    from polyattn_triton.attention import TritonAttention

SEQUENCES = 128
"""Enough for a full chip, whose tiles stay whole."""


def warm_up(backend: TritonAttention, phases: tuple[str, ...]) -> list[Any]:
    """Compile what `phases` may run, side by side, and return it."""
    spec, device = backend.spec, backend.torch_device
    cache = None if backend.cache is None else KVCache.allocate(backend.cache, 1, device)
    kind = STORAGE_DTYPES[spec.dtype if spec.qkv_dtype == "auto" else spec.qkv_dtype]
    leaves = STORAGE_DTYPES[spec.dtype if spec.out_dtype == "auto" else spec.out_dtype]
    sizes = ((spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size),
             (spec.num_kv_heads, spec.v_head_size))  # fmt: skip
    query, key, value = (torch.empty(1, *size, dtype=kind, device=device) for size in sizes)
    quantized = (key if cache is None else cache.key).dtype.itemsize == 1
    out = torch.empty(1, spec.num_heads, spec.v_head_size, dtype=leaves, device=device)
    lse = torch.empty(1, spec.num_heads, device=device) if spec.needs_lse else None
    heads = torch.ones(spec.num_heads, device=device)
    params = LayerParams(
        sinks=heads if spec.learned_sinks else None, alibi_slopes=heads if spec.alibi else None
    )
    if spec.scales != "number":
        one = torch.ones(spec.num_kv_heads, device=device)
        params.q_scale = params.k_scale = params.v_scale = params.out_scale = one
    pointwise = Pointwise.of(spec)
    masks = frozenset[str]() if pointwise is None else pointwise.mask_inputs
    # What masks read may come with the step, when key tiles are listed, or of the layer.
    later = {name for name in masks if not name.startswith("mask_")}
    with compiling_only(backend.compilers) as compiled:
        for batch in _steps_of(spec, phases, device, paged=cache is not None):
            for of_layer in (set[str](), later) if later else (later,):
                params.inputs = {name: batch.inputs[name] for name in of_layer}
                # A lone prompt stands for what is cut, which only some heads make worth it.
                plan = backend.plan_rows(_without(batch, of_layer), cut=batch.num_seqs == 1)
                backend.run(plan, Frame(query, key, value, cache, params, out, lse))
                if cache is not None and plan.fresh:
                    backend.run(plan, Frame(query, None, None, cache, params, out, lse))
                if plan.merging is None:
                    continue
                for merging in plan.merging.of_each_variant():
                    plan.merging = merging
                    backend.merge(plan, params, out, lse, quantized)
    return compiled


def _steps_of(
    spec: LayerSpec, phases: tuple[str, ...], device: torch.device, paged: bool
) -> Iterator[Batch]:
    for phase in phases:
        yield from steps(spec, phase, device, paged)


def _without(batch: Batch, names: set[str]) -> Batch:
    found = batch.copy()
    found.inputs = {name: t for name, t in batch.inputs.items() if name not in names}
    return found


def steps(spec: LayerSpec, phase: str, device: torch.device, paged: bool) -> Iterator[Batch]:
    """Yield steps of each way that a phase is planned."""
    few = max(1, 16 // spec.gqa_ratio)
    lens: tuple[tuple[list[int], list[int]], ...]
    if phase == "decode":
        lens = (
            ([1], [16]), ([1], [4096]), ([1], [1 << 17]), ([1, 1], [16, 8192]),
            ([1] * 8 * SEQUENCES, [16] * 8 * SEQUENCES),
        )  # fmt: skip
    else:
        lens = (([600], [600]), ([512] * SEQUENCES, [512] * SEQUENCES))
        if paged:
            lens += (([600], [900]), ([512] * SEQUENCES, [1024] * SEQUENCES))
    if paged:
        lens += tuple(([n], [900]) for n in (few, 2 * few, 4 * few) if n > 1)
    for query_lens, seq_lens in lens:
        starts = [0, *accumulate(query_lens)]
        table = None
        if paged:
            table = torch.zeros(len(seq_lens), max(seq_lens), dtype=torch.int32, device=device)
        inputs = blank_inputs(spec, len(seq_lens), device)
        yield Batch(starts, seq_lens, table, device=device, inputs=inputs)
        if spec.mask is not None and max(query_lens) == 1:  # masks that leave none to ask
            rest = {name: t for name, t in inputs.items() if not name.startswith("mask_")}
            mask: CustomMask | BlockSparseMask = CustomMask(
                torch.ones(len(seq_lens), dtype=torch.bool)
            )
            if spec.mask == "block_sparse":
                mask = BlockSparseMask.of_pages(_all_pages(seq_lens, 128), 128)
            yield Batch(starts, seq_lens, table, device=device, mask=mask, inputs=rest)


def _all_pages(seq_lens: list[int], size: int) -> list[list[int]]:
    return [list(range(-(-n // size))) for n in seq_lens]


def blank_inputs(spec: LayerSpec, num_seqs: int, device: torch.device) -> dict[str, Tensor]:
    """Return something for all that a layer's functions read."""
    pointwise = Pointwise.of(spec)
    words = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "num_seqs": num_seqs}
    found = {}
    for name, declared in {} if pointwise is None else pointwise.inputs.items():
        shape = [words.get(d, 1) if isinstance(d, str) else d for d in declared.dims]
        found[name] = torch.ones(shape, dtype=INPUT_DTYPES[declared.dtype], device=device)
    return found
