"""Packed sequences with all their keys: one look-up for a way of calling, as in `dense`."""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.families.attention.planning import AttentionStep
from polyattn.families.attention.stateless.dense import (
    CallOptions,
    group_for_call,
    parameters,
    plan_lengths,
    run_plan,
)
from polyattn.registry.discovery import generation
from polyattn.runtime.backend import Addressed, PackedStrides
from polyattn.runtime.inputs import refuse_gradients
from polyattn.runtime.stateless import place_of
from polyattn.settings import current

Ints = tuple[int, ...]
Lens = tuple[Ints, Ints, Ints | None] | tuple[Ints, Ints, Ints | None, Ints | None]
"""Lengths of queries and of keys, where each sequence's keys start, and their `first_positions`."""


class Known(NamedTuple):
    """What serves a way of calling, and how it is run by addresses, if it is.

    `alike`: the output is as the query in its shape and strides.
    """

    step: AttentionStep
    addressed: Addressed | None
    alike: bool


def step_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Lens,
    asked: CallOptions,
    sinks: bool,
    alibi: bool,
) -> AttentionStep:
    """Return the plan of the group that serves these lengths."""
    group = group_for_call(query, key.shape[1], value.shape[2], asked, sinks, alibi, cached=False)
    return plan_lengths(group, *lens)


def given(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Lens,
    asked: CallOptions,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend for packed (tokens, heads, size); tensors that lie as earlier ones did aren't checked again.

    Returns the output and, where asked, the LSE (tokens, heads), float32. Raises `BatchError`, and what
    `select` raises.
    """
    place = place_of(query.device) if query.is_cuda else get_ident()
    kind = (
        current(), generation(), place, asked, lens, sinks is None, alibi_slopes is None,
        query.shape, query.stride(), query.dtype, query.device, key.shape, key.stride(), key.dtype,
        key.device, value.shape, value.stride(), value.dtype, value.device,
    )  # fmt: skip
    known = _known.get(kind)
    if known is None or known.addressed is None:
        step = known and known.step
        if step is None:
            of_params = sinks is not None, alibi_slopes is not None
            step = step_for(query, key, value, lens, asked, *of_params)
        found = run_plan(step, query, key, value, sinks=sinks, alibi_slopes=alibi_slopes)
        if known is None:  # what was run is right
            if len(_known) >= KNOWN:
                _known.clear()
            alike = query.shape == step.out_shape and query.is_contiguous()
            _known[kind] = Known(step, _addressed(step, query, key, value), alike)
        return found
    if query.requires_grad or key.requires_grad or value.requires_grad:
        refuse_gradients(query=query, key=key, value=value)
    step = known.step
    params = parameters(step.group.spec, query, sinks, alibi_slopes)
    # Of packed queries in order `empty_like` is as good, and says less to torch.
    out = torch.empty_like(query) if known.alike else query.new_empty(step.out_shape)
    lse = query.new_empty(step.lse_shape, dtype=torch.float32) if asked.needs_lse else None
    known.addressed(query, key, value, params, out, lse)
    return out, lse


def _addressed(step: AttentionStep, *tensors: Tensor) -> Addressed | None:
    if len(step.calls) != 1 or any(t.stride(2) != 1 for t in tensors):
        return None
    of_query, of_key, of_value = ((t.stride(0), t.stride(1)) for t in tensors)
    strides = PackedStrides(of_query, of_key, of_value, tensors[1].shape[0])
    call = step.calls[0]
    return call.backend.addressed(call.plan, strides)  # type: ignore[no-any-return]


_known: dict[Any, Known] = {}
KNOWN = 1024
"""Ways of calling that are remembered; all are forgotten when there are more."""
