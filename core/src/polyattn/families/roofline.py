"""What must a step cost at least? Operations and bytes of a batch, whatever kernel runs it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from polyattn.runtime.batch import Batch
from polyattn.runtime.kv_cache import STORAGE_DTYPES
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and bytes when each input is read once and the output written."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


def batch_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Return what one layer of `spec` must do for `batch`. A multiply-add counts as two."""
    if spec.kind.is_recurrent:
        return _recurrent_cost(spec, batch)
    if spec.latent is not None:
        return _latent_cost(spec, batch)
    pairs = keys = 0
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        pairs += visible_pairs(spec, query, length)
        keys += _keys_read(spec, query, length)
    width = spec.head_size + spec.v_head_size
    kv_bytes = keys * spec.num_kv_heads * width * STORAGE_DTYPES[spec.stored_dtype].itemsize
    qo_bytes = batch.num_tokens * spec.num_heads * width * STORAGE_DTYPES[spec.dtype].itemsize
    return Cost(2 * pairs * spec.num_heads * width, kv_bytes + qo_bytes)


def _recurrent_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Each token: three multiply-adds an element of the state; a sequence: its state in and out."""
    form = form_of(spec)
    state = prod(shape_of(spec, form.state))
    width = sum(prod(shape_of(spec, letters, 1)) for letters in form.inputs.values())
    width += prod(shape_of(spec, form.output, 1))
    size = STORAGE_DTYPES[spec.dtype].itemsize
    seqs = sum(count > 0 for count in batch.query_lens)
    states = 2 * seqs * state * (4 if form.state_in_float32 else size)
    return Cost(6 * batch.num_tokens * state, batch.num_tokens * width * size + states)


def _latent_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Decodes and sparse layers absorbed; other prefills expanded, the up-projection included."""
    assert spec.latent is not None
    latent, flops, rows = spec.latent, 0, 0
    for query, length in zip(batch.query_lens, batch.lens, strict=True):
        pairs = visible_pairs(spec, query, length)
        if latent.topk:
            pairs = min(pairs, query * latent.topk)
        if query == 1 or latent.topk:
            flops += 2 * pairs * spec.num_heads * (latent.size + latent.rank)
        else:
            nope = spec.head_size - latent.rope_head_size
            flops += 2 * pairs * spec.num_heads * (spec.head_size + spec.v_head_size)
            flops += 2 * length * spec.num_heads * latent.rank * (nope + spec.v_head_size)
        rows += min(length, pairs) if query else 0
    width = spec.num_heads * (spec.head_size + spec.v_head_size)
    size = STORAGE_DTYPES[spec.dtype].itemsize
    cached = rows * latent.size * STORAGE_DTYPES[spec.stored_dtype].itemsize
    return Cost(flops, cached + batch.num_tokens * width * size)


def visible_pairs(spec: LayerSpec, queries: int, keys: int) -> int:
    """Return how many (query, key) pairs the mask leaves for one sequence and one head."""
    if not spec.causal:
        return queries * keys
    first = keys - queries  # the first query's position
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
    if spec.sliding_window is not None and spec.causal:
        return min(keys, queries + spec.sliding_window - 1 + spec.sink_tokens)
    if spec.chunk_size is not None:
        first = keys - queries
        return keys - first // spec.chunk_size * spec.chunk_size
    return keys
