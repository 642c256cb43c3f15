"""What must a step of MLA cost at least?"""

from __future__ import annotations

from polyattn.families.attention.roofline import visible_pairs
from polyattn.families.sparse.roofline import index_cost
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import row_widths


def step_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Decodes and sparse layers absorbed; other prefills expanded, the up-projection included."""
    assert spec.latent is not None
    latent, flops, rows = spec.latent, 0, 0
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        pairs = visible_pairs(spec, query, length)
        if spec.sparse is not None:
            pairs = min(pairs, query * spec.sparse.most)
        if query == 1 or spec.sparse is not None:
            flops += 2 * pairs * spec.num_heads * (latent.size + latent.rank)
        else:
            nope = spec.head_size - latent.rope_head_size
            flops += 2 * pairs * spec.num_heads * (spec.head_size + spec.v_head_size)
            flops += 2 * length * spec.num_heads * latent.rank * (nope + spec.v_head_size)
        rows += min(length, pairs) if query else 0
    width = spec.num_heads * (spec.head_size + spec.v_head_size)
    size = STORAGE_DTYPES[spec.dtype].itemsize
    cached = rows * row_widths(spec.stored_dtype, latent.size, latent.size)[0]
    return Cost(flops, cached + batch.num_tokens * width * size) + index_cost(spec, batch)
