"""What must a step of attention cost at least?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost
from polyattn.spec.key_ranges import key_ranges
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import row_widths

Ints = NDArray[np.signedinteger[Any]]


def step_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Return the visible products, and the bytes of keys, values, queries and outputs."""
    pairs = keys = 0
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        pairs += visible_pairs(spec, query, length)
        keys += _keys_read(spec, query, length)
    width = spec.head_size + spec.v_head_size
    held = row_widths(spec.stored_dtype, spec.head_size, spec.v_head_size)
    kv_bytes = keys * spec.num_kv_heads * sum(held)
    qo_bytes = batch.num_tokens * spec.num_heads * width * STORAGE_DTYPES[spec.dtype].itemsize
    return Cost(2 * pairs * spec.num_heads * width, kv_bytes + qo_bytes)


def visible_pairs(spec: LayerSpec, queries: int, keys: int) -> int:
    """Return how many (query, key) pairs the mask leaves for one sequence and one head."""
    if spec.dense_context and queries == keys:
        return keys * (keys + 1) // 2
    place = np.arange(keys - queries, keys)
    return int(_seen(spec, place, place, np.full(queries, keys)).sum())


def _keys_read(spec: LayerSpec, queries: int, keys: int) -> int:
    if queries == 0 or (spec.dense_context and queries == keys):
        return min(queries, keys)
    return int(_seen(spec, *np.array([[keys - queries], [keys - 1], [keys]]))[0])


def _seen(spec: LayerSpec, first: Ints, last: Ints, keys: Ints) -> Ints:
    ranges = key_ranges(spec, first, last, keys, np.minimum, np.maximum)
    seen: Ints = ranges.kept_stop - ranges.kept_start + ranges.near_stop - ranges.near_start
    return seen
