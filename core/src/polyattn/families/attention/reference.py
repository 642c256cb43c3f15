"""What is the right answer? Every feature of a `LayerSpec`, plain, slow, in float64 by default.

The definition of correctness: written to be read, one sequence at a time, one full score matrix,
and sharing no code with any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyattn.families.attention.alibi import alibi_slopes
from polyattn.families.attention.rope import query_temperature, rotate
from polyattn.families.attention.transforms import Places, Transforms
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.rows import decoded
from polyattn.runtime.functions.pointwise import Pointwise
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec
from polyattn.spec.rope import RopeSpec


def visible(spec: LayerSpec, num_queries: int, num_keys: int, first: int = 0) -> Tensor:
    """Return which keys each query sees, bool (num_queries, num_keys).

    The last query stands at the last key's position (bottom-right alignment), the first key at `first`.
    """
    key = torch.arange(num_keys, device="cpu") + first
    query = torch.arange(num_queries, device="cpu")[:, None] + (num_keys - num_queries) + first
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device="cpu")
    if spec.causal:
        mask &= key <= query
    if spec.dense_context and num_queries == num_keys:  # a whole prompt
        return mask
    near = torch.ones_like(mask)
    if spec.sliding_window is not None:
        near &= (query - key) < spec.sliding_window
        if not spec.causal and spec.window_right is None:
            near &= (key - query) < spec.sliding_window
    if spec.window_right is not None:
        near &= (key - query) <= spec.window_right
    mask &= near | (key < spec.sink_tokens)
    if spec.chunk_size is not None:
        mask &= (key // spec.chunk_size) == (query // spec.chunk_size)
    return mask


def attend(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: LayerParams | None = None,
    dtype: torch.dtype = torch.float64,
    inputs: Mapping[str, Tensor] | None = None,
    seq: int = 0,
    first: int = 0,
    sees: Callable[[LayerSpec, int, int, int], Tensor] = visible,
) -> tuple[Tensor, Tensor]:
    """Attend for one sequence, with all of its keys and values.

    `query` (queries, num_heads, head_size); `key`, `value` (keys, num_kv_heads, size). Returns
    the output (queries, num_heads, v_head_size) and the LSE (queries, num_heads) in `dtype`. A
    learned sink is part of the LSE. A query that sees nothing gets output 0 and LSE -inf, beside a
    sink, too. `inputs`: what a variant's or a mask's functions read beside the layer's own, `seq` the
    sequence's number for them; without a softmax the LSE is NaN. `first`: the first key's position.
    `sees`: the mask, as `visible` makes it.
    """
    params, ratio = params or LayerParams(), spec.gqa_ratio
    query, key, value = (t.detach().to("cpu", dtype) for t in (query, key, value))
    if spec.rope is not None and spec.rope.positions == "cache":
        each = key.repeat_interleave(ratio, dim=1)
        scores = products_in_cache(spec, spec.rope, query, each) * spec.scale
    else:
        of_groups = query.unflatten(1, (-1, ratio))
        scores = torch.einsum("qhgd,khd->hgqk", of_groups * spec.scale, key).flatten(0, 1)
    if spec.logit_soft_cap is not None:
        scores = spec.logit_soft_cap * torch.tanh(scores / spec.logit_soft_cap)
    num_queries, num_keys = query.shape[0], key.shape[0]
    if spec.alibi:
        slopes = params.alibi_slopes
        slopes = alibi_slopes(spec.num_heads) if slopes is None else slopes
        position = torch.arange(num_queries, device="cpu")[:, None] + (num_keys - num_queries)
        distance = (torch.arange(num_keys, device="cpu") - position).to(dtype)
        scores = scores + slopes.to("cpu", dtype)[:, None, None] * distance
    mask = sees(spec, num_queries, num_keys, first)
    if (pointwise := Pointwise.of(spec)) is not None:
        values = _widened({**(inputs or {}), **params.inputs}, dtype)
        places = _places(spec.num_heads, num_queries, num_keys, seq)
        scores = pointwise.score(scores, places, values)
        seen = pointwise.visible(places, values)
        mask = mask if seen is None else (mask & seen).expand_as(scores)
        if not pointwise.softmax:
            weights = scores.masked_fill(~mask, 0.0)
            none = scores.new_full((num_queries, spec.num_heads), torch.nan)
            return _weighted(weights, value, ratio), none
    if not num_keys:
        unseen = query.new_full((num_queries, spec.num_heads), -torch.inf)
        return query.new_zeros(*unseen.shape, value.shape[2]), unseen
    scores = scores.masked_fill(~mask, -torch.inf)
    if spec.learned_sinks:
        assert params.sinks is not None, "a layer with learned_sinks needs params.sinks"
        sinks = params.sinks.detach().to("cpu", dtype)[:, None, None]
        scores = torch.cat([scores, sinks.expand(-1, num_queries, 1)], dim=2)
        value = torch.cat([value, value.new_zeros(1, *value.shape[1:])])
    weights, total, lse = _exponentiated(scores, mask.any(-1))
    return _weighted(weights, value, ratio) / total.T[..., None], lse.T


def _exponentiated(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, which replace scores (num_heads, queries, keys), their sums and the LSE.

    `seen`: whether a query sees any key. A sum of no weights is 1.
    """
    top = scores.amax(2, keepdim=True)
    weights = scores.sub_(top.masked_fill(top == -torch.inf, 0.0)).exp_()
    total = weights.sum(2)
    lse = (top.squeeze(2) + total.log()).masked_fill(~seen, -torch.inf)
    return weights, total.masked_fill(total == 0, 1.0), lse


def _weighted(weights: Tensor, value: Tensor, ratio: int) -> Tensor:
    """Return sums of values (keys, num_kv_heads, size) by weights (num_heads, queries, keys)."""
    of_groups = weights.unflatten(0, (-1, ratio))
    return torch.einsum("hgqk,khd->qhgd", of_groups, value).flatten(1, 2)


def _places(heads: int, queries: int, keys: int, seq: int) -> tuple[Tensor, ...]:
    """Return b, h, q_idx and kv_idx of all scores (heads, queries, keys), so that they broadcast."""
    return (
        torch.tensor(seq, device="cpu"),
        torch.arange(heads, device="cpu")[:, None, None],
        torch.arange(queries, device="cpu")[:, None] + (keys - queries),
        torch.arange(keys, device="cpu"),
    )


def _widened(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }


def products_in_cache(spec: LayerSpec, rope: RopeSpec, query: Tensor, key: Tensor) -> Tensor:
    """Return query times key, (heads, queries, keys), rotated at their places within the cache.

    A query's cache is what its window leaves it: the kept first tokens, then the window's, moved up
    next to them (StreamingLLM, Xiao et al., 2023).
    """
    num_queries, num_keys = query.shape[0], key.shape[0]
    length, held = num_keys, None
    whole = spec.dense_context and num_queries == num_keys
    if spec.causal and spec.sliding_window is not None and not whole:
        held = spec.sink_tokens + spec.sliding_window
        length = min(num_keys, held)
    rows = []
    for index in range(num_queries):
        place, places = index + num_keys - num_queries, torch.arange(num_keys, device="cpu")
        gone = 0 if held is None else max(0, place + 1 - held)
        places = torch.where(places < spec.sink_tokens, places, places - gone)
        at = torch.tensor([place - gone], device="cpu")
        turned = rotate(query[index : index + 1], at, rope, length)
        turned = turned * query_temperature(rope, at)[:, None, None]
        keys = rotate(key, places, rope, length)
        rows.append(torch.einsum("qhd,khd->hqk", turned, keys))
    return (
        torch.cat(rows, 1).to(query.dtype) if rows else query.new_zeros(query.shape[1], 0, num_keys)
    )


def read_cache(
    cache: KVCache,
    batch: Batch,
    index: int,
    params: LayerParams,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return one sequence's keys and values, (seq_len, num_kv_heads, size), scales applied."""
    assert batch.block_table is not None
    length, size = batch.lens[index], cache.block_size
    rows = []
    form = cache.format
    formats = form.rows or (None, None)
    for stored, scale, format, width in (
        (cache.key, params.k_scale, formats[0], form.head_size),
        (cache.value, params.v_scale, formats[1], form.v_head_size),
    ):
        blocks = batch.block_table[index, : -(-length // size)].long().to(stored.device)
        tokens = stored[blocks].flatten(0, 1)[:length]
        if format is not None:
            whole = form.head_size if cache.value_in_key else width
            values = decoded(tokens.cpu(), format, whole, torch.float64)[..., :width]
            rows.append(scaled(values.to(dtype), scale))
            continue
        rows.append(exact(tokens, scale, dtype))
    return rows[0], rows[1]


def exact(tensor: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of (tokens, heads, size): 8-bit numbers times their scale, or their head's."""
    wide = tensor.detach().to("cpu", dtype)
    return wide if tensor.dtype.itemsize > 1 else scaled(wide, scale)


def scaled(wide: Tensor, scale: float | Tensor) -> Tensor:
    """Return (tokens, heads, size) times their scale, or their head's."""
    if not isinstance(scale, Tensor):
        return wide * scale
    each = scale.detach().to("cpu", wide.dtype)
    return wide * each.repeat_interleave(wide.shape[1] // len(each))[:, None]


def _transformed(
    transforms: Transforms,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    inputs: Mapping[str, Tensor],
    seq: int,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Transform a sequence's queries, and its keys and values if they aren't cached.

    Cached ones were before they were stored. Returns them, and what transforms the output.
    """
    named = {name: tensor.cpu() for name, tensor in inputs.items()}
    count = len(keys)
    every = Places(
        torch.tensor(seq, device="cpu"), torch.arange(count, device="cpu")[:, None, None]
    )
    own = Places(every.seq, torch.arange(count - len(query), count, device="cpu")[:, None, None])
    query = transforms.changed("query", query, own, named)
    if whole:
        keys = transforms.changed("key", keys, every, named)
        values = transforms.changed("value", values, every, named)
    return query, keys, values, lambda output: transforms.changed("output", output, own, named)


def forward(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None,
    batch: Batch,
    params: LayerParams | None = None,
    dtype: torch.dtype = torch.float64,
    transformed: bool = False,
    sees: Callable[[LayerSpec, int, int, int], Tensor] = visible,
) -> tuple[Tensor, Tensor]:
    """Run a layer over a batch whose new tokens are already in `cache` (or over key and value).

    Quantised inputs count as the numbers that they encode. `transformed`: the caller has applied a
    variant's transforms, `sees` the mask. Returns the output (num_tokens, num_heads, v_head_size), never
    quantised, and the LSE (num_tokens, num_heads).
    """
    params = params or LayerParams()
    query = exact(query, params.q_scale, dtype)
    transforms = None if transformed else Transforms.of(spec)
    output = torch.zeros(
        batch.num_tokens, spec.num_heads, spec.v_head_size, dtype=dtype, device="cpu"
    )
    lse = torch.full((batch.num_tokens, spec.num_heads), -torch.inf, dtype=dtype, device="cpu")
    for index in range(batch.num_seqs):
        rows = slice(batch.starts[index], batch.starts[index + 1])
        if not batch.lens[index]:
            continue  # a padding row: nothing, not even a sink
        if cache is not None:
            keys, values = read_cache(cache, batch, index, params, dtype)
        else:
            assert key is not None and value is not None
            start = batch.key_starts[index]
            own = slice(start, start + batch.lens[index])
            keys = exact(key[own], params.k_scale, dtype)
            values = exact(value[own], params.v_scale, dtype)
        inputs, seq = batch.inputs, batch.seq_ids[index]
        mine = query[rows]
        if transforms is not None:
            mine, keys, values, after = _transformed(
                transforms, mine, keys, values, {**inputs, **params.inputs}, seq, cache is None
            )
        first = batch.first_positions[index] if batch.first_positions else 0
        output[rows], lse[rows] = attend(
            spec, mine, keys, values, params, dtype, inputs, seq, first, sees
        )
        if transforms is not None:
            output[rows] = after(output[rows])
    return output, lse
