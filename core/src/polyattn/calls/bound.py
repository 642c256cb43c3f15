"""What is decided once for a way of calling? The plan, the views of tensors as tokens, and all checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.calls.memo import call_key, memo, remember
from polyattn.calls.plans import (
    PLAIN,
    CallOptions,
    group_for_call,
    parameters,
    plan_lengths,
    run_plan,
)
from polyattn.calls.views import View, packed_rows
from polyattn.families.attention.planning import AttentionStep
from polyattn.runtime.backend import PackedStrides
from polyattn.runtime.inputs import (
    check_is_real,
    in_forward_mode,
    own_precision,
    refuse_gradients,
)
from polyattn.runtime.program import Frame

Ints = tuple[int, ...]
Lens = tuple[Ints, Ints, Ints | None] | tuple[Ints, Ints, Ints | None, Ints | None]
"""Lengths of queries and of keys, where each sequence's keys start, and their `first_positions`."""


class Results(NamedTuple):
    """How a call's results lie: sizes and strides of the output and of the LSE."""

    out_shape: Ints
    out_stride: Ints
    lse_shape: Ints
    lse_stride: Ints


class BoundCall:
    """One way of calling over whole keys: everything that shapes, strides and dtypes decide.

    `views` are the query, key and value as tokens; a tensor without one is copied. Dense tensors lie as
    `heads_first` says; packed ones are tokens already.
    """

    __slots__ = (
        "addressed", "alike", "device_type", "heads_first", "lse_shape", "lse_stride", "needs_lse",
        "out_shape", "out_stride", "packed", "step", "views",
    )  # fmt: skip

    def __init__(
        self,
        step: AttentionStep,
        query: Tensor,
        views: tuple[View | None, View | None, View | None],
        results: Results,
        heads_first: bool = False,
    ):
        self.step, self.views, self.heads_first = step, views, heads_first
        self.device_type, self.needs_lse = step.device_type, step.group.spec.needs_lse
        self.out_shape, self.out_stride, self.lse_shape, self.lse_stride = results
        self.packed = query.dim() == 3
        heads, size = step.query_shape[1:]
        of_query, of_key, of_value = views
        if of_query is None:
            shape = query.transpose(1, 2).shape if heads_first else query.shape
            query = torch.empty(shape, dtype=query.dtype, device="meta")
        self.alike = query.shape == self.out_shape and query.stride() == self.out_stride
        self.addressed = None
        if len(step.calls) == 1 and of_key is not None and of_value is not None:
            (only,) = step.calls  # of all tokens, there being no cache
            rows = (heads * size, size) if of_query is None else of_query[1][:2]
            strides = PackedStrides(rows, of_key[1][:2], of_value[1][:2], of_key[0][0])
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
        gradients = query.requires_grad or key.requires_grad or value.requires_grad
        if gradients or in_forward_mode():
            refuse_gradients(query=query, key=key, value=value)
        params, lse = PLAIN, None
        if sinks is not None or alibi_slopes is not None:
            params = parameters(self.step.group.spec, query, sinks, alibi_slopes)
        if self.addressed is not None:
            if self.views[0] is None:
                query = (query.transpose(1, 2) if self.heads_first else query).contiguous()
            if self.alike:  # fewer arguments for torch to check
                out = torch.empty_like(query)
            else:
                out = query.new_empty_strided(self.out_shape, self.out_stride)
            if self.needs_lse:
                lse = query.new_empty_strided(self.lse_shape, self.lse_stride, dtype=torch.float32)
            self.addressed(query, key, value, params, out, lse)
            return out, lse
        out = query.new_empty(self.step.out_shape)
        if self.needs_lse:
            lse = query.new_empty(self.step.lse_shape, dtype=torch.float32)
        of_query, of_key, of_value = self.views
        query, key = self._tokens(query, of_query), self._tokens(key, of_key)
        value = self._tokens(value, of_value)
        frame = Frame(query, key, value, None, params, out, lse, None, fresh=True)
        with own_precision(self.device_type):
            self.step.run(frame)
        out = frame.out
        if self.packed:
            return out, lse
        out = out.as_strided(self.out_shape, self.out_stride)
        return out, None if lse is None else lse.as_strided(self.lse_shape, self.lse_stride)

    def _tokens(self, tensor: Tensor, view: View | None) -> Tensor:
        if self.packed:
            return tensor if view is not None else tensor.contiguous()
        if view is None:
            return packed_rows(tensor, self.heads_first)
        return tensor.as_strided(view[0], view[1])


def step_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Lens,
    options: CallOptions,
    sinks: bool,
    alibi: bool,
) -> AttentionStep:
    """Return the plan of the group that serves these lengths."""
    group = group_for_call(query, key.shape[1], value.shape[2], options, sinks, alibi, cached=False)
    return plan_lengths(group, *lens)


def attend_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Lens,
    options: CallOptions,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend for packed (tokens, heads, size); tensors that lie as earlier ones did aren't checked again.

    Returns the output and, where asked, the LSE (tokens, heads), float32. Raises `BatchError`, and what
    `select` raises.
    """
    with_sinks, alibi = sinks is not None, alibi_slopes is not None
    key_of_call = call_key(query, key, value, attend_whole, options, lens, with_sinks, alibi)
    call: BoundCall | None = memo.get(key_of_call)
    if call is not None:
        return call(query, key, value, sinks, alibi_slopes)
    check_is_real("query", query)
    step = step_for(query, key, value, lens, options, with_sinks, alibi)
    result = run_plan(step, query, key, value, sinks=sinks, alibi_slopes=alibi_slopes)
    views = _view(query), _view(key), _view(value)
    (_, heads, size), lse = step.out_shape, step.lse_shape
    results = Results(step.out_shape, (heads * size, size, 1), lse, (heads, 1))
    remember(key_of_call, BoundCall(step, query, views, results))  # the step has run without errors
    return result


def _view(tensor: Tensor) -> View | None:
    stride = tensor.stride()
    return (tensor.shape, stride, tensor.shape[0]) if stride[2] == 1 else None  # type: ignore[return-value]
