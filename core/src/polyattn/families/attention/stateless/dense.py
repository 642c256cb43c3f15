"""Attention for callers that keep nothing between calls: dense `(batch, seqlen, heads, size)`.

Work that such a caller would repeat at each call is done once for each way of calling: the group, the
plan for these lengths, the views of these strides as tokens, and every check of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.attention.alibi import alibi_slopes as default_slopes
from polyattn.families.attention.planning import AttentionStep
from polyattn.families.attention.short_steps import server_of
from polyattn.families.attention.stateless.views import View, packed_rows, token_view
from polyattn.registry.discovery import generation
from polyattn.runtime.backend import PackedStrides
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import bad_input, check_is_real, refuse_gradients
from polyattn.runtime.program import Frame, LayerParams
from polyattn.runtime.stateless import group_for, place_of
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.integers import integers
from polyattn.settings import Settings, current
from polyattn.spec.fields import LONGEST
from polyattn.spec.kinds import DTYPES
from polyattn.spec.layer import LayerSpec

Count = Callable[[LayerGroup], None]
"""What is told of each group that served a call."""


class CallOptions(NamedTuple):
    """What a call asks for beside its tensors: fields of `LayerSpec`, and a backend by name.

    Attributes:
        causal: whether a query sees no later key; aligned to the bottom right.
        scale: of the scores; None: 1 / sqrt(head size).
        sliding_window: keys up to and including the query's own, in tokens; None: no window.
        window_right: keys after the query's own, in tokens, without a causal mask.
        logit_soft_cap: scores become cap * tanh(score / cap).
        chunk_size: tokens of the chunks within which queries see keys.
        needs_lse: whether the call returns the LSE.
        backend: the backend that must serve, by name; None: the selection decides.
        sink_tokens: first tokens that a window never hides.
        batch_invariant: what must not change a bit of a row's result.

    Examples:
        >>> CallOptions(causal=True, sliding_window=128).window_right is None
        True

    """

    causal: bool = False
    scale: float | None = None
    sliding_window: int | None = None
    window_right: int | None = None
    logit_soft_cap: float | None = None
    chunk_size: int | None = None
    needs_lse: bool = False
    backend: str | None = None
    sink_tokens: int = 0
    batch_invariant: bool | str = False


def flash_window(causal: bool, left: int, right: int) -> tuple[bool, int | None, int | None]:
    """Return the options of a flash-attn window.

    Args:
        causal: flash-attn's `causal`.
        left: keys left of the query; -1 means no bound.
        right: keys right of the query; -1 means no bound.

    Returns:
        `causal`, `sliding_window` and `window_right`, as `CallOptions` has them.

    Raises:
        Nothing: any negative number is no bound.

    Examples:
        >>> flash_window(True, 127, 0), flash_window(False, -1, -1)
        ((True, 128, None), (False, None, None))

    """
    causal, after = causal or right == 0, None
    if not causal and (left >= 0 or right >= 0):
        after = int(right) if right >= 0 else LONGEST
    return causal, int(left) + 1 if left >= 0 else None, after


def group_for_call(
    query: Tensor,
    kv_heads: int,
    v_size: int,
    asked: CallOptions,
    sinks: bool,
    alibi: bool,
    **more: Any,
) -> LayerGroup:
    """Return the group that serves a call, the same one for equal calls.

    Args:
        query: (..., num_heads, head_size); its device and dtype count.
        kv_heads: heads of the keys.
        v_size: elements of a value.
        asked: the options of the call.
        sinks: whether learned sinks come with it.
        alibi: whether ALiBi slopes come with it.
        more: further fields of `LayerSpec`, as in `group_for`.

    Returns:
        The group.

    Raises:
        SpecError, SelectionError: as `select`.

    Examples:
        >>> from polyattn.host import CallOptions, group_for_call
        >>> query = torch.randn(5, 4, 64)
        >>> group = group_for_call(query, 2, 64, CallOptions(causal=True), False, False, cached=False)
        >>> group.spec.num_heads, group.spec.num_kv_heads
        (4, 2)

    """
    *_, heads, size = query.shape
    device = query.device
    return _group_of(
        current(), generation(), place_of(device), device, query.dtype, heads, size, kv_heads,
        v_size, asked, sinks, alibi, **more,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _group_of(
    settings: Settings, plugins: int, place: Any, device: torch.device, dtype: torch.dtype,
    heads: int, size: int, kv_heads: int, v_size: int, asked: CallOptions, sinks: bool, alibi: bool,
    **more: Any,
) -> LayerGroup:  # fmt: skip
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise BatchError(
            f"query is {dtype}; a call without a layer takes {', '.join(DTYPES)}: convert it, or "
            f"pass 8-bit queries with their scales to an Attention whose spec has qkv_dtype"
        )
    if asked.scale == 0:  # a spec's 0 is the default, which a call's None is
        raise BatchError("scale=0: every key weighs the same; leave it out for 1 / sqrt(head_size)")
    return group_for(
        device, asked.backend, num_heads=heads, num_kv_heads=kv_heads, head_size=size,
        v_head_size=v_size, dtype=dtype, causal=asked.causal, scale=asked.scale or 0.0,
        sliding_window=asked.sliding_window, window_right=asked.window_right,
        logit_soft_cap=asked.logit_soft_cap, chunk_size=asked.chunk_size,
        sink_tokens=asked.sink_tokens, needs_lse=asked.needs_lse, learned_sinks=sinks, alibi=alibi,
        batch_invariant=asked.batch_invariant, **more,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def plan_lengths(
    group: LayerGroup,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    apart: int | tuple[int, ...] | None = None,
    first_positions: tuple[int, ...] | None = None,
) -> AttentionStep:
    """Return the plan for sequences of these lengths. A plan is a value, so equal calls share one.

    Args:
        group: of the layer. A short step's plan may belong to another group that serves the same layer.
        query_lens: query tokens of each sequence.
        key_lens: keys of each sequence.
        apart: tokens between sequences' first keys, or where each one's first key is; default: keys lie
            one sequence after another.
        first_positions: as in `Batch`.

    Returns:
        The plan.

    Raises:
        BatchError: lengths don't fit one another.

    Examples:
        >>> group = group_for(
        ...     torch.device("cpu"), num_heads=2, head_size=64, dtype=torch.float32, cached=False
        ... )
        >>> plan_lengths(group, (5, 1), (5, 40)) is plan_lengths(group, (5, 1), (5, 40))
        True

    """
    starts: Sequence[int] | None = None
    if isinstance(apart, int):
        starts = range(0, apart * len(key_lens), apart) if apart else [0] * len(key_lens)
    elif apart is not None:
        starts = apart
    batch = Batch.from_lens(
        query_lens, key_lens, key_starts=starts, first_positions=first_positions,
        device=group.torch_device,
    )  # fmt: skip
    step = server_of(group, query_lens, key_lens).plan(batch)
    assert isinstance(step, AttentionStep)
    return step


def run_plan(
    step: StepPlan,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a step whose parameters come with the call.

    Args:
        step: the plan.
        query: (tokens, heads, size).
        key: the new tokens' (tokens, KV heads, size), or all keys of a layer without a cache; None: the
            cache has them.
        value: alike.
        cache: the layer's cache, if it has one.
        sinks: float32 (heads,), learned sink logits.
        alibi_slopes: float32 (heads,).

    Returns:
        The output (tokens, heads, v_size), and the LSE, float32 (tokens, heads), if the spec needs it,
        else None.

    Raises:
        BatchError: a tensor doesn't fit the plan.

    Examples:
        >>> group = group_for(
        ...     torch.device("cpu"), num_heads=2, head_size=64, dtype=torch.float32, cached=False
        ... )
        >>> query, key, value = torch.randn(3, 3, 2, 64)
        >>> run_plan(plan_lengths(group, (3,), (3,)), query, key, value)[0].shape
        torch.Size([3, 2, 64])

    """
    assert isinstance(step, AttentionStep)
    params = parameters(step.group.spec, query, sinks, alibi_slopes)
    lse = None
    if step.group.spec.needs_lse:
        lse = query.new_empty(step.lse_shape, dtype=torch.float32)
    return step.call(query, key, value, cache, params, None, lse), lse


_PLAIN = LayerParams()


def parameters(
    spec: LayerSpec, query: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None
) -> LayerParams:
    """Return the parameters of a call beside its tensors. Raises `BatchError`."""
    if not spec.learned_sinks and not spec.alibi and sinks is None and alibi_slopes is None:
        return _PLAIN
    if spec.alibi and alibi_slopes is None:
        alibi_slopes = default_slopes(spec.num_heads)
    return LayerParams(
        _per_head("sinks", sinks, spec.learned_sinks, query, spec),
        _per_head("alibi_slopes", alibi_slopes, spec.alibi, query, spec),
    )


def _per_head(
    name: str, given: Tensor | None, wanted: bool, like: Tensor, spec: LayerSpec
) -> Tensor | None:
    if (given is not None) != wanted or (given is not None and given.shape != (spec.num_heads,)):
        shape = None if given is None else tuple(given.shape)
        raise BatchError(f"{name} has shape {shape}; {spec} takes one number a query head")
    return None if given is None else given.detach().to(like.device, torch.float32).contiguous()


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: CallOptions,
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
        key: alike, with the KV heads.
        value: alike, with the values' size.
        asked: the options of the call.
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
    place = place_of(query.device) if query.is_cuda else get_ident()
    key_of_call = (
        current(), generation(), place, asked, heads_first, heads_out, key_lens, first_positions,
        sinks is None, alibi_slopes is None, query.device, key.device, value.device, query.dtype,
        key.dtype, value.dtype, query.shape, query.stride(), key.shape, key.stride(), value.shape,
        value.stride(), query.__class__,
    )  # fmt: skip
    call = _calls.get(key_of_call)
    if call is None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_is_real(name, tensor)
        order, lens = (heads_first, heads_out), (key_lens, first_positions)
        call = DenseCall(query, key, value, asked, order, lens, sinks, alibi_slopes)
        if len(_calls) >= KNOWN:
            _calls.clear()
        _calls[key_of_call] = call
    if count is not None:
        count(call.step.group)
    return call(query, key, value, sinks, alibi_slopes)


class DenseCall:
    """One way of calling `attend_dense`: everything that these shapes, strides and dtypes decide."""

    __slots__ = (
        "addressed", "alike", "device_type", "heads_first", "lse_shape", "lse_stride", "needs_lse",
        "out_shape", "out_stride", "run", "step", "tokens_shape", "views",
    )  # fmt: skip

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        asked: CallOptions,
        order: tuple[bool, bool],
        lens: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ):
        heads_first, heads_out = order
        seqlen, heads = (2, 1) if heads_first else (1, 2)
        _check(query, key, value, seqlen, heads)
        rows, count, keys = query.shape[0], query.shape[seqlen], key.shape[seqlen]
        views = [_view(t, heads_first) for t in (query, key, value)]
        if views[0] is not None and views[0][2] != count:
            views[0] = None
        if views[1] is None or views[2] is None or views[1][2] != views[2][2]:
            views[1] = views[2] = None
        self.views, self.heads_first = tuple(views), heads_first
        tokens = query.transpose(1, 2) if heads_first else query
        group = group_for_call(
            tokens, key.shape[heads], value.shape[3], asked, sinks is not None,
            alibi_slopes is not None, cached=False,
        )  # fmt: skip
        apart = keys if views[1] is None else views[1][2]
        key_lens, first_positions = lens
        key_lens = _row_lens(rows, keys, key_lens)
        self.step = plan_lengths(group, (count,) * rows, key_lens, apart, first_positions)
        self.device_type, self.needs_lse = group.device_type, asked.needs_lse
        self.tokens_shape = self.step.out_shape
        of_heads, size = self.tokens_shape[1:]
        token = of_heads * size  # results lie by tokens, whatever the order of their sizes
        self.out_shape = _by_heads((rows, count, of_heads, size), heads_out)
        self.out_stride = _by_heads((count * token, token, size, 1), heads_out)
        given = (
            query if views[0] is not None else torch.empty_like(tokens, device="meta").contiguous()
        )
        self.alike = given.shape == self.out_shape and given.stride() == self.out_stride
        self.lse_shape = _by_heads((rows, count, of_heads), heads_out)
        self.lse_stride = _by_heads((count * of_heads, of_heads, 1), heads_out)
        self.run = self.step.run
        self.addressed = None
        if len(self.step.calls) == 1:  # of all tokens, there being no cache
            only = self.step.calls[0]
            self.run = partial(only.backend.run, only.plan)
            of_query, of_key, of_value = views
            if of_key is not None and of_value is not None:
                size = query.shape[3]
                packed = (query.shape[heads] * size, size)  # as `packed_rows` leaves it
                strides = PackedStrides(
                    packed if of_query is None else of_query[1][:2], of_key[1][:2], of_value[1][:2],
                    of_key[0][0],
                )  # fmt: skip
                self.addressed = only.backend.addressed(only.plan, strides)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: tensors of exactly the shapes, strides and dtypes that this was made for."""
        if query.requires_grad or key.requires_grad or value.requires_grad:
            refuse_gradients(query=query, key=key, value=value)
        params = _PLAIN
        if sinks is not None or alibi_slopes is not None:
            params = parameters(self.step.group.spec, query, sinks, alibi_slopes)
        if self.addressed is not None:
            lse = None
            if self.views[0] is None:
                query = (query.transpose(1, 2) if self.heads_first else query).contiguous()
            if self.alike:  # which says less to torch
                out = torch.empty_like(query)
            else:
                out = query.new_empty_strided(self.out_shape, self.out_stride)
            if self.needs_lse:
                lse = query.new_empty_strided(self.lse_shape, self.lse_stride, dtype=torch.float32)
            self.addressed(query, key, value, params, out, lse)
            return out, lse
        out, lse = query.new_empty(self.tokens_shape), None
        if self.needs_lse:
            lse = query.new_empty(self.step.lse_shape, dtype=torch.float32)
        of_query, of_key, of_value = self.views
        first = self.heads_first
        query = (
            query.as_strided(of_query[0], of_query[1]) if of_query else packed_rows(query, first)
        )
        key = key.as_strided(of_key[0], of_key[1]) if of_key else packed_rows(key, first)
        value = (
            value.as_strided(of_value[0], of_value[1]) if of_value else packed_rows(value, first)
        )
        frame = Frame(query, key, value, None, params, out, lse)
        if torch.is_autocast_enabled(self.device_type):
            with torch.autocast(self.device_type, enabled=False):
                self.run(frame)
        else:
            self.run(frame)
        out = out.as_strided(self.out_shape, self.out_stride)
        return out, None if lse is None else lse.as_strided(self.lse_shape, self.lse_stride)


_calls: dict[Any, DenseCall] = {}
KNOWN = 1024
"""Ways of calling that are remembered; all are forgotten when there are more."""


def _by_heads(sizes: tuple[int, ...], heads_second: bool) -> tuple[int, ...]:
    """Return sizes or strides that are by rows, tokens and heads, the heads second where asked."""
    return (sizes[0], sizes[2], sizes[1], *sizes[3:]) if heads_second else sizes


def _view(tensor: Tensor, heads_first: bool) -> View | None:
    return token_view(tensor.shape, tensor.stride(), heads_first)


def _check(query: Tensor, key: Tensor, value: Tensor, seqlen: int, heads: int) -> None:
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
