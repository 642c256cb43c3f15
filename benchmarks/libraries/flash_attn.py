"""FlashAttention-3's own call over a step's pages, as vLLM's wrapper of its build makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def varlen(work: Any) -> Callable[[], object]:
    """Packed queries over pages, all rows in one call."""
    from polyattn_cuda.providers import vllm_library

    library, batch = vllm_library("_vllm_fa3_C"), work.batch
    if library is None:
        raise ImportError("no _vllm_fa3_C.abi3.so in an installed vllm's folder")
    torch.ops.load_library(str(library))
    keys = batch.seq_lens.new_zeros(batch.num_seqs + 1)
    keys[1:] = batch.seq_lens.cumsum(0)

    def call() -> Tensor:
        out = torch.empty_like(work.query)
        torch.ops._vllm_fa3_C.fwd(
            work.query, work.cache.key, work.cache.value, None, None, None, out,
            batch.query_start_loc, None, None, None, keys.diff(), max(batch.query_lens),
            max(batch.lens), batch.block_table, None, None, None, None, None, None, None, None,
            work.spec.scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out

    return call
