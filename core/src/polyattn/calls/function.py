"""Attention as a function without a layer: dense rows or packed sequences, with all their keys.

Inside `torch.compile` it is one operator, `polyattn::attention`, which plans when it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from polyattn.calls.bound import Lens, attend_whole
from polyattn.calls.dense import attend_dense
from polyattn.calls.intervals import UnreadableMask
from polyattn.calls.masked import masked
from polyattn.calls.plans import CallOptions
from polyattn.errors import BatchError, DeviceError, SpecError, flag, shown
from polyattn.runtime.graphs.torch_compile import library
from polyattn.runtime.inputs import check_is_real, check_is_tensor, compiling, refuse_gradients
from polyattn.runtime.step.integers import integers
from polyattn.spec.kinds import Invariance

FAILURES = AttributeError, TypeError, SpecError, DeviceError, RuntimeError, UnreadableMask
"""What a call with bad arguments may end with, deep within."""


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None,
    scale: float | None = None, sliding_window: int | None = None, window_right: int | None = None,
    chunk_size: int | None = None, sink_tokens: int = 0, logit_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    query_lens: Sequence[int] | None = None, key_lens: Sequence[int] | None = None,
    first_positions: Sequence[int] | None = None, return_lse: Literal[False] = False,
    backend: str | None = None, batch_invariant: bool | str = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(  # type: ignore[misc]  # the LSE's signatures take the first one's options
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None,
    scale: float | None = None, sliding_window: int | None = None, window_right: int | None = None,
    chunk_size: int | None = None, sink_tokens: int = 0, logit_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    query_lens: Sequence[int] | None = None, key_lens: Sequence[int] | None = None,
    first_positions: Sequence[int] | None = None, return_lse: bool = False,
    backend: str | None = None, batch_invariant: bool | str = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to keys and values that are passed whole. Forward only: gradients are refused.

    Rows are dense, or packed one sequence after another; then `query_lens` has their lengths.
    `torch.compile` traces it as one operator.

    Args:
        query: dense (batch, queries, num_heads, head_size), or packed (tokens, num_heads, head_size).
        key: dense (batch, keys, num_kv_heads, head_size), or packed (keys, num_kv_heads, head_size).
        value: as `key`; its size may differ.
        causal: hide the keys after a query; the last query sees the last key.
        mask: (batch or 1, 1, queries or 1, keys), for dense rows instead of `causal` and windows: bool,
            True to attend, or float, 0 to attend and the dtype's least value not to. Each query's keys
            must be one interval. Keys that one finite number hides from a query that sees no other
            weigh the same for it, as in torch; -inf, bool or `sinks` give 0.
        scale: of the logits; None: `1/sqrt(head_size)`.
        sliding_window: a query sees itself and the `sliding_window - 1` keys before it.
        window_right: and the `window_right` keys after it; not with `causal`.
        chunk_size: a query sees only its own chunk, of `chunk_size` positions.
        sink_tokens: the first `sink_tokens` keys stay visible beyond the window.
        logit_soft_cap: logits become `cap * tanh(logit / cap)`; None for none.
        alibi_slopes: (num_heads,), added as `-slope * distance`.
        sinks: (num_heads,), learned sink logits.
        query_lens: tokens of each packed sequence.
        key_lens: of dense rows, how many keys of each count, from its first; of packed ones, their
            lengths (default: `query_lens`).
        first_positions: the position in its text of each sequence's first key; default: 0.
        return_lse: return the LSE too.
        backend: a name; that backend is used or refused.
        batch_invariant: what must not change a bit of a sequence's result, as in `LayerSpec`: True or
            `"batch"`, `"steps"`, `"calls"`, `"machines"`. Not beside `mask`.

    Returns:
        The output in the query's shape with the value's size, 0 for a query that sees nothing. With
        `return_lse` also the LSE, float32, natural logarithm, (batch, queries, num_heads) or (tokens,
        num_heads).

    Raises:
        BatchError: shapes, dtypes or lengths don't fit one another.
        SpecError, SelectionError, SettingsError: as `select`.

    Examples:
        >>> query, key = torch.zeros(1, 3, 4, 64), torch.zeros(1, 5, 2, 64)
        >>> attention(query, key, key, causal=True).shape
        torch.Size([1, 3, 4, 64])

    """
    options = CallOptions(
        causal, scale, sliding_window, window_right, logit_soft_cap, chunk_size, return_lse, backend,
        sink_tokens, batch_invariant,
    )  # fmt: skip
    if compiling():
        tensors = {"mask": mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
        numbers = query_lens, key_lens, first_positions
        return _traced(query, key, value, options, tensors, numbers)
    try:
        firsts = None if first_positions is None else tuple(first_positions)
        if query.dim() == 3:
            lens = _packed_lens(query, key, value, query_lens, key_lens, firsts, mask)
            out, lse = attend_whole(
                query, key, value, lens, options, sinks=sinks, alibi_slopes=alibi_slopes
            )
        elif query_lens is not None:
            raise BatchError(f"query {tuple(query.shape)} is dense: query_lens is left out")
        elif mask is not None:
            _check_alone(options, key_lens, first_positions)
            out, lse = masked(
                query, key, value, mask, options, sinks=sinks, alibi_slopes=alibi_slopes
            )
        else:
            out, lse = attend_dense(
                query, key, value, options, key_lens=None if key_lens is None else tuple(key_lens),
                first_positions=firsts, sinks=sinks, alibi_slopes=alibi_slopes,
            )  # fmt: skip
    except FAILURES as error:  # validate only after a failure, so that valid calls pay nothing
        lists = {"query_lens": query_lens, "key_lens": key_lens, "first_positions": first_positions}
        try:
            _refuse(error, (query, key, value), (mask, sinks, alibi_slopes), lists, options)
        except BatchError as named:
            raise named from None
        raise
    return out if lse is None else (out, lse)


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: CallOptions,
    tensors: Mapping[str, Tensor | None],
    lists: Sequence[Sequence[int] | None],
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the operator for a call in a trace. Raises `BatchError`."""
    refuse_gradients(query=query, key=key, value=value, **tensors)
    level = options.batch_invariant
    if not isinstance(level, str):  # one type for all
        level = Invariance(level).name.lower()
    numbers = (None if values is None else list(values) for values in lists)
    out, *lse = torch.ops.polyattn.attention(
        query, key, value, *tensors.values(), *numbers, *options[:-1], level
    )
    return (out, *lse) if lse else out


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    query_lens: list[int] | None,
    key_lens: list[int] | None,
    first_positions: list[int] | None,
    *options: Any,
) -> list[Tensor]:
    fields = CallOptions._make(options)._asdict()
    lse = fields.pop("needs_lse")
    fields |= {"query_lens": query_lens, "key_lens": key_lens, "first_positions": first_positions}
    fields |= {"mask": mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
    result = attention(query, key, value, return_lse=lse, **fields)
    return [result] if isinstance(result, Tensor) else list(result)


def _fake(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> list[Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return [out, lse] if more[-4] else [out]


# Lengths and masks are read on the host when it runs: Inductor leaves it out of the graphs that it
# captures.
library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, "
    "Tensor? alibi_slopes, SymInt[]? query_lens, SymInt[]? key_lens, SymInt[]? first_positions, "
    "bool causal, float? scale, SymInt? sliding_window, SymInt? window_right, float? logit_soft_cap, "
    "SymInt? chunk_size, bool needs_lse, str? backend, SymInt sink_tokens, str batch_invariant) "
    "-> Tensor[]",
    tags=[torch.Tag.cudagraph_unsafe],
)
library.impl("attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("polyattn::attention", _fake, lib=library)


def _check_alone(options: CallOptions, *beside: Sequence[int] | None) -> None:
    limits = options.sliding_window, options.window_right, options.chunk_size, *beside
    if options.causal or options.sink_tokens or any(limit is not None for limit in limits):
        raise BatchError(
            "mask says all; causal, key_lens, first_positions, windows, chunk_size and sink_tokens are "
            "left out beside it"
        )
    if options.batch_invariant not in (False, "none"):
        raise BatchError(
            f"batch_invariant={shown(options.batch_invariant)} beside a mask: rows are attended to by "
            "what the masks of a call have in common; leave one of them out"
        )


def _packed_lens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int] | None,
    key_lens: Sequence[int] | None,
    firsts: tuple[int, ...] | None,
    mask: Tensor | None,
) -> Lens:
    """Check packed tensors and return their lengths. Raises `BatchError`."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)}; all three are (batch, seqlen, heads, size) or "
                "packed (tokens, heads, size)"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise BatchError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in more than their size"
        )
    if query_lens is None or mask is not None:
        raise BatchError(
            f"query {tuple(query.shape)} is packed: it needs query_lens, and takes no mask; dense "
            "tensors are (batch, seqlen, heads, size)"
        )
    return tuple(query_lens), tuple(query_lens if key_lens is None else key_lens), None, firsts


def _refuse(
    error: Exception,
    needed: tuple[Any, ...],
    optional: tuple[Any, ...],
    lists: Mapping[str, Any],
    options: CallOptions,
) -> None:
    """Name the argument that made a call fail. Raises `BatchError`; nothing where all are well."""
    for name, tensor in zip(("query", "key", "value"), needed, strict=True):
        check_is_tensor(name, tensor)
        check_is_real(name, tensor)
    for name, tensor in zip(("mask", "sinks", "alibi_slopes"), optional, strict=True):
        if tensor is not None:
            check_is_tensor(name, tensor)
            check_is_real(name, tensor)
    for name, values in lists.items():
        if values is not None:
            integers(name, values)
    for name, value in options._asdict().items():
        if not isinstance(value, Hashable):
            raise BatchError(f"{name}={shown(value)} must be one value, a number or a name")
    flag("return_lse", options.needs_lse, BatchError)
    if isinstance(error, UnreadableMask):
        raise UnreadableMask(
            f"mask: {error}{error.where}; it must be (batch or 1, 1, queries or 1, keys), of bool or of "
            "0 and the dtype's least value, and show each query one interval of keys. Other masks are a "
            "layer's: CustomMask, BlockSparseMask or AttentionVariant"
        )
