"""What is compiled before the first step? Every kernel that a layer with functions of its own may run.

Steps are planned as any others are, of sequences whose blocks are all one; what they would launch is
compiled, and not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from polyattn.kernel import (
    INPUT_DTYPES,
    STORAGE_DTYPES,
    Batch,
    BlockSparseMask,
    CacheFormat,
    CustomMask,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Pointwise,
)
from torch import Tensor

SEQUENCES = 128
"""Enough for a full chip, whose tiles stay whole."""


def blank_frame(spec: LayerSpec, form: CacheFormat | None, device: torch.device) -> Frame:
    """Return tensors of one token, and a cache of one block, for kernels that don't run."""
    cache = None if form is None else KVCache.allocate(form, 1, device)
    kind = STORAGE_DTYPES[spec.dtype if spec.qkv_dtype == "auto" else spec.qkv_dtype]
    leaves = STORAGE_DTYPES[spec.dtype if spec.out_dtype == "auto" else spec.out_dtype]
    sizes = (
        (spec.num_heads, spec.head_size),
        (spec.num_kv_heads, spec.head_size),
        (spec.num_kv_heads, spec.v_head_size),
    )
    query, key, value = (torch.empty(1, *size, dtype=kind, device=device) for size in sizes)
    out = torch.empty(1, spec.num_heads, spec.v_head_size, dtype=leaves, device=device)
    lse = None
    if spec.needs_lse:
        lse = torch.empty(1, spec.num_heads, dtype=torch.float32, device=device)
    heads = torch.ones(spec.num_heads, dtype=torch.float32, device=device)
    params = LayerParams(
        sinks=heads if spec.learned_sinks else None, alibi_slopes=heads if spec.alibi else None
    )
    if spec.scales != "number":
        one = torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device)
        params.q_scale = params.k_scale = params.v_scale = params.out_scale = one
    return Frame(query, key, value, cache, params, out, lse)


def blank_steps(
    spec: LayerSpec, phases: tuple[str, ...], device: torch.device, paged: bool
) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
    """Yield steps of each way that `phases` are planned, each with what functions read of the layer.

    What masks read may come with the step, when key tiles are listed, or of the layer.
    """
    pointwise = Pointwise.of(spec)
    masks = frozenset[str]() if pointwise is None else pointwise.mask_inputs
    later = {name for name in masks if not name.startswith("mask_")}
    for phase in phases:
        for batch in steps(spec, phase, device, paged):
            for of_layer in (set[str](), later) if later else (later,):
                step = batch.copy()
                step.inputs = {n: t for n, t in batch.inputs.items() if n not in of_layer}
                yield step, {name: batch.inputs[name] for name in of_layer}


def steps(spec: LayerSpec, phase: str, device: torch.device, paged: bool) -> Iterator[Batch]:
    """Yield steps of each way that a phase is planned."""
    few = max(1, 16 // spec.gqa_ratio)
    lens: tuple[tuple[list[int], list[int]], ...]
    if phase == "decode":
        lens = (
            ([1], [16]),
            ([1], [4096]),
            ([1], [1 << 17]),
            ([1, 1], [16, 8192]),
            ([1] * 8 * SEQUENCES, [16] * 8 * SEQUENCES),
        )
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
                torch.ones(len(seq_lens), dtype=torch.bool, device="cpu")
            )
            if spec.mask == "block_sparse":
                mask = BlockSparseMask.of_pages(_all_pages(seq_lens, 128), 128)
            yield Batch(starts, seq_lens, table, device=device, mask=mask, inputs=rest)


def _all_pages(seq_lens: list[int], size: int) -> list[list[int]]:
    return [list(range(-(-n // size))) for n in seq_lens]


def blank_inputs(spec: LayerSpec, num_seqs: int, device: torch.device) -> dict[str, Tensor]:
    """Return an example of every input that a layer's functions read."""
    pointwise = Pointwise.of(spec)
    words = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "num_seqs": num_seqs}
    kernels = {}
    for name, declared in {} if pointwise is None else pointwise.inputs.items():
        shape = [words.get(d, 1) if isinstance(d, str) else d for d in declared.dims]
        kernels[name] = torch.ones(shape, dtype=INPUT_DTYPES[declared.dtype], device=device)
    return kernels
