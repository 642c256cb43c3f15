"""What must a step of a sparse layer cost at least?"""

from __future__ import annotations

from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost
from polyattn.spec.kinds import ITEM_BYTES
from polyattn.spec.layer import LayerSpec


def step_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Return the products with chosen keys, and the bytes of those, of queries, outputs and the choice.

    This assumes that each token's choice is full, and that no two tokens choose the same key. A sequence
    that is shorter than its tokens' choices together is read once.
    """
    sparse = spec.sparse
    assert sparse is not None
    most, m = sparse.most, sparse.tokens_per_entry
    pairs = read = 0
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        for position in range(max(length - query, 0), length):
            pairs += min(((position if spec.causal else length - 1) + 1) // m, most)
        whole = length // m * spec.num_kv_heads
        read += min(whole, most * spec.num_kv_heads * query)
    width = spec.head_size + spec.v_head_size
    stored = spec.head_size if sparse.value_in_key else width
    item = STORAGE_DTYPES[spec.dtype].itemsize
    choices = 0 if sparse.newest else sparse.choices(spec.num_heads, spec.num_kv_heads)
    moved = int(read * stored * ITEM_BYTES[spec.stored_dtype])
    moved += batch.num_tokens * (spec.num_heads * width * item + 4 * choices * sparse.budget)
    return Cost(2 * pairs * spec.num_heads * width, moved) + index_cost(spec, batch)


def index_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Return the products with index keys, and the bytes of those, of index queries and of the choice.

    A sequence's keys are read once for all its tokens. Nothing where the layer has no indexer.
    """
    indexer, flops, moved = spec.indexer, 0, 0
    if indexer is None:
        return Cost(0, 0)
    m, item = indexer.tokens_per_entry, STORAGE_DTYPES[spec.dtype].itemsize
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        seen = sum((position + 1) // m for position in range(max(length - query, 0), length))
        flops += 2 * seen * indexer.num_heads * indexer.head_size
        moved += (length // m) * indexer.key_bytes(spec.dtype) if query else 0
    each = indexer.num_heads * (indexer.head_size * item + 4 * (indexer.fold == "weighted"))
    return Cost(flops, moved + batch.num_tokens * each)
