"""What must a step of attention cost at least?"""

from __future__ import annotations

from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost
from polyattn.spec.kinds import ITEM_BYTES
from polyattn.spec.layer import LayerSpec


def step_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Return the visible products, and the bytes of keys, values, queries and outputs."""
    pairs = keys = 0
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        pairs += visible_pairs(spec, query, length)
        keys += _keys_read(spec, query, length)
    width = spec.head_size + spec.v_head_size
    kv_bytes = int(keys * spec.num_kv_heads * width * ITEM_BYTES[spec.stored_dtype])
    qo_bytes = batch.num_tokens * spec.num_heads * width * STORAGE_DTYPES[spec.dtype].itemsize
    return Cost(2 * pairs * spec.num_heads * width, kv_bytes + qo_bytes)


def visible_pairs(spec: LayerSpec, queries: int, keys: int) -> int:
    """Return how many (query, key) pairs the mask leaves for one sequence and one head."""
    if not spec.causal:
        return queries * keys
    first = keys - queries  # the first query's position
    if spec.dense_context and not first:
        return keys * (keys + 1) // 2
    if spec.chunk_size is not None:
        return sum(p % spec.chunk_size + 1 for p in range(first, keys))
    window = spec.sliding_window or keys
    growing = max(0, min(keys, window) - first)  # queries that don't fill the window yet
    total = growing * (2 * first + growing + 1) // 2
    full = queries - growing
    sinks = sum(min(spec.sink_tokens, p + 1 - window) for p in range(keys - full, keys))
    return total + full * window + (sinks if spec.sink_tokens else 0)


def _keys_read(spec: LayerSpec, queries: int, keys: int) -> int:
    if queries == 0:
        return 0
    if spec.dense_context and queries == keys:
        return keys
    if spec.sliding_window is not None and spec.causal:
        return min(keys, queries + spec.sliding_window - 1 + spec.sink_tokens)
    if spec.chunk_size is not None:
        first = keys - queries
        return keys - first // spec.chunk_size * spec.chunk_size
    return keys
