"""FlashInfer's own calls over a step's tensors, without polyattn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WORKSPACE = 256 << 20


def pages(work: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return FlashInfer's forms, int32 on the host: query bounds, page bounds, pages, lengths."""
    size, batch = work.cache.block_size, work.batch
    lens = torch.tensor(batch.lens)
    counts = -(-lens // size)
    used = torch.cat([row[:n] for row, n in zip(batch.block_table, counts.tolist(), strict=True)])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return torch.tensor(batch.starts).int(), bounds, used.int(), lens.int()


def _heads(work: Any) -> tuple[int, int, int]:
    return work.spec.num_heads, work.spec.num_kv_heads, work.spec.head_size


def _last(work: Any, bounds: Tensor, lens: Tensor) -> Tensor:
    return lens - (bounds[1:] - bounds[:-1] - 1) * work.cache.block_size


def decode(work: Any) -> Callable[[], object]:
    """The decode wrapper, on tensor cores."""
    import flashinfer

    _, bounds, used, lens = pages(work)
    buffer = torch.zeros(WORKSPACE, dtype=torch.uint8, device=work.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=True)
    wrapper.plan(
        bounds, used, _last(work, bounds, lens), *_heads(work), work.cache.block_size,
        q_data_type=work.query.dtype, kv_data_type=work.cache.key.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(work.query, (work.cache.key, work.cache.value), out=work.out)


def _prefill(work: Any, backend: str) -> Callable[[], object]:
    import flashinfer

    queries, bounds, used, lens = pages(work)
    buffer = torch.zeros(WORKSPACE, dtype=torch.uint8, device=work.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=backend)
    wrapper.plan(
        queries, bounds, used, _last(work, bounds, lens), *_heads(work), work.cache.block_size,
        causal=True, sm_scale=work.spec.scale, q_data_type=work.query.dtype,
        kv_data_type=work.cache.key.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(work.query, (work.cache.key, work.cache.value), out=work.out)


def fa2(work: Any) -> Callable[[], object]:
    """The paged prefill over all rows, FlashAttention-2's way."""
    return _prefill(work, "fa2")


def fa3(work: Any) -> Callable[[], object]:
    """The paged prefill over all rows, FlashAttention-3's way."""
    return _prefill(work, "fa3")


def holistic(work: Any) -> Callable[[], object]:
    """`BatchAttention`: one kernel for mixed steps."""
    import flashinfer

    queries, bounds, used, lens = pages(work)
    heads, kv_heads, size = _heads(work)
    wrapper = flashinfer.BatchAttention(kv_layout="NHD")
    wrapper.plan(
        queries.to(work.device), bounds.to(work.device), used, lens.to(work.device), heads, kv_heads,
        size, size, work.cache.block_size, causal=True, sm_scale=work.spec.scale,
    )  # fmt: skip
    return lambda: wrapper.run(work.query, (work.cache.key, work.cache.value), out=work.out)


def cascade(work: Any) -> Callable[[], object]:
    """`MultiLevelCascadeAttentionWrapper`, over the levels that a step's block table has."""
    import flashinfer
    from polyattn.runtime.step.shared_prefix import shared_prefixes

    size, batch, device = work.cache.block_size, work.batch, work.device
    table = torch.from_numpy(batch.host_block_table)
    levels = shared_prefixes(batch.host_block_table, batch.lens, size)
    ends = [level[0].first + level[0].count for level in levels]
    queries, bounds, used, last, first = [], [], [], [], 0
    for level, end in zip(levels, ends, strict=True):
        rows = [run.rows[0] for run in level]
        queries.append([*rows, batch.num_seqs])
        bounds.append([n * (end - first) for n in range(len(rows) + 1)])
        used.append(table[rows, first:end].flatten())
        last.append([size] * len(rows))
        first = end
    counts = [-(-n // size) - first for n in batch.lens]
    queries.append([*range(batch.num_seqs + 1)])
    bounds.append([0, *torch.tensor(counts).cumsum(0).tolist()])
    used.append(torch.cat([row[first : first + n] for row, n in zip(table, counts, strict=True)]))
    last.append([n - (-(-n // size) - 1) * size for n in batch.lens])
    buffer = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(queries), buffer, "NHD")
    forms = ([torch.as_tensor(each).int().to(device) for each in part]
             for part in (queries, bounds, used, last))  # fmt: skip
    wrapper.plan(*forms, *_heads(work), size, causal=False, q_data_type=work.query.dtype)
    cache = torch.stack([work.cache.key, work.cache.value], dim=1)
    return lambda: wrapper.run(work.query, cache)
