"""FlashAttention-3's own call over a step's pages, as vLLM builds it (`engines/fa3.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def varlen(work: Any) -> Callable[[], object]:
    """Packed queries over pages, all rows in one call."""
    from engines import fa3
    from polyattn_cuda.providers import vllm_library

    if vllm_library("_vllm_fa3_C") is None:
        raise ImportError("no _vllm_fa3_C.abi3.so in an installed vllm's folder")
    library, batch = fa3.load(), work.batch
    keys = batch.seq_lens.new_zeros(batch.num_seqs + 1)
    keys[1:] = batch.seq_lens.cumsum(0)
    return lambda: library.flash_attn_varlen_func(
        work.query, work.cache.key, work.cache.value, max(batch.query_lens), batch.query_start_loc,
        max(batch.lens), keys, work.spec.scale, True, batch.block_table,
    )  # fmt: skip
