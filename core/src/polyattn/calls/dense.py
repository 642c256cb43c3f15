"""Attention for callers that keep nothing between calls: dense `(batch, seqlen, heads, size)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from polyattn.calls.bound import BoundCall, Ints, Results
from polyattn.calls.memo import call_key, memo, remember
from polyattn.calls.plans import CallOptions, group_for_call, plan_lengths
from polyattn.calls.views import View, token_view
from polyattn.errors import BatchError
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.inputs import bad_input, check_is_real
from polyattn.runtime.step.integers import integers

Count = Callable[[LayerGroup], None]
"""A call's hook: it gets the group that served the call."""


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: CallOptions,
    *,
    heads_first: bool = False,
    heads_out: bool = False,
    key_lens: tuple[int, ...] | None = None,
    first_positions: tuple[int, ...] | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    count: Count | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend for dense rows.

    Args:
        query: (batch, seqlen, heads, size); with `heads_first` (batch, heads, seqlen, size).
        key: as `query`, with the KV heads.
        value: as `key`, with the values' size.
        options: the options of the call.
        heads_first: the order of heads and tokens in the inputs.
        heads_out: return views with the heads second.
        key_lens: keys of each row that count, from its first on; default: all.
        first_positions: as in `Batch`.
        sinks: float32 (heads,), learned sink logits.
        alibi_slopes: float32 (heads,).
        count: is called with the group that serves.

    Returns:
        The output (batch, queries, heads, v_size), and the LSE, float32 (batch, queries, heads),
        natural logarithm, if the options need it, else None.

    Raises:
        BatchError: shapes, dtypes or devices don't fit.
        SelectionError: nothing serves such a layer, or not the named backend.

    Examples:
        >>> from polyattn.host import CallOptions, attend_dense
        >>> query, (key, value) = torch.randn(2, 5, 4, 64), torch.randn(2, 2, 5, 2, 64)
        >>> out, lse = attend_dense(query, key, value, CallOptions(causal=True, needs_lse=True))
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 4, 64]), torch.Size([2, 5, 4]))

    """
    key_of_call = call_key(
        query, key, value, attend_dense, options, heads_first, heads_out, key_lens, first_positions,
        sinks is None, alibi_slopes is None,
    )  # fmt: skip
    call: BoundCall | None = memo.get(key_of_call)
    if call is None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_is_real(name, tensor)
        order, lens = (heads_first, heads_out), (key_lens, first_positions)
        params = sinks is not None, alibi_slopes is not None
        call = remember(key_of_call, _bind(query, key, value, options, order, lens, params))
    if count is not None:
        count(call.step.group)
    return call(query, key, value, sinks, alibi_slopes)


def _bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: CallOptions,
    order: tuple[bool, bool],
    lens: tuple[Ints | None, Ints | None],
    params: tuple[bool, bool],
) -> BoundCall:
    """Check a way of calling and plan it. `order`: heads first, heads out; `params`: sinks, ALiBi."""
    heads_first, heads_out = order
    seqlen, heads = (2, 1) if heads_first else (1, 2)
    _check(query, key, value)
    rows, count, keys = query.shape[0], query.shape[seqlen], key.shape[seqlen]
    of_query, of_key, of_value = (_view(t, heads_first) for t in (query, key, value))
    if of_query is not None and of_query[2] != count:
        of_query = None
    if of_key is None or of_value is None or of_key[2] != of_value[2]:
        of_key = of_value = None
    tokens = query.transpose(1, 2) if heads_first else query
    group = group_for_call(tokens, key.shape[heads], value.shape[3], options, *params, cached=False)
    apart = keys if of_key is None else of_key[2]
    key_lens, first_positions = lens
    key_lens = _row_lens(rows, keys, key_lens)
    step = plan_lengths(group, (count,) * rows, key_lens, apart, first_positions)
    of_heads, size = step.out_shape[1:]
    token = of_heads * size  # results lie by tokens, in any order of their sizes
    results = Results(
        _by_heads((rows, count, of_heads, size), heads_out),
        _by_heads((count * token, token, size, 1), heads_out),
        _by_heads((rows, count, of_heads), heads_out),
        _by_heads((count * of_heads, of_heads, 1), heads_out),
    )
    return BoundCall(step, query, (of_query, of_key, of_value), results, heads_first)


def _by_heads(sizes: tuple[int, ...], heads_second: bool) -> tuple[int, ...]:
    """Return sizes or strides by rows, tokens and heads; `heads_second` puts the heads second."""
    return (sizes[0], sizes[2], sizes[1], *sizes[3:]) if heads_second else sizes


def _view(tensor: Tensor, heads_first: bool) -> View | None:
    return token_view(tensor.shape, tensor.stride(), heads_first)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)}; dense tensors have four sizes"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise bad_input(name, tensor, tuple(tensor.shape), query.dtype, query.device)
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise BatchError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} differ in their rows or head sizes"
        )
    if key.shape[:3] != value.shape[:3]:
        raise BatchError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in more than their size"
        )


def _row_lens(rows: int, keys: int, lens: Sequence[int] | None) -> tuple[int, ...]:
    if lens is None:
        return (keys,) * rows
    lens = integers("key_lens", lens)
    if len(lens) != rows or any(not 0 <= n <= keys for n in lens):
        raise BatchError(f"key_lens={list(lens[:4])}… must be {rows} lengths of 0 to {keys}")
    return tuple(lens)
