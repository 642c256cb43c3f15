"""What must a step of a recurrence cost at least?"""

from __future__ import annotations

from math import prod

from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.cache.state_cache import StateCacheSpec
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of


def step_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Each token: three multiply-adds an element of the state; a sequence: its state in and out."""
    form = form_of(spec)
    state = prod(shape_of(spec, form.state))
    width = sum(prod(shape_of(spec, letters, 1)) for letters in form.inputs.values())
    width += prod(shape_of(spec, form.output, 1))
    size = STORAGE_DTYPES[spec.dtype].itemsize
    seqs = sum(count > 0 for count in batch.query_lens)
    state_dtype = StateCacheSpec.for_layer(spec, 1).dtype
    states = 2 * seqs * state * STORAGE_DTYPES[state_dtype].itemsize
    return Cost(6 * batch.num_tokens * state, batch.num_tokens * width * size + states)
