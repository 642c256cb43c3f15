"""Dense attention under a mask: a call for each kind of run that the mask's intervals come down to."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.calls.dense import Count
from polyattn.calls.intervals import Part, UnreadableMask, read
from polyattn.calls.plans import CallOptions, group_for_call, plan_lengths, run_plan
from polyattn.calls.views import as_tokens, keys_as_tokens, packed_rows
from polyattn.errors import BatchError
from polyattn.families.attention.planning import AttentionStep
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.inputs import check_is_real


def masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    options: CallOptions,
    *,
    heads_first: bool = False,
    heads_out: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    count: Count | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `attend_dense` does, to the keys that `mask` (batch or 1, 1, queries or 1, keys) shows.

    What `options` says of causality and windows is not read: the mask says it. Raises
    `UnreadableMask` where a query's keys are no interval, `BatchError`, and what `select` raises.
    """
    seqlen = 2 if heads_first else 1
    rows, queries, keys = query.shape[0], query.shape[seqlen], key.shape[seqlen]
    _check(mask, rows, queries, keys, alibi_slopes)
    if mask.shape[1] > 1 and mask.stride(1) == 0:  # expanded over heads
        mask = mask[:, :1]
    flat_keys, flat_values, apart = keys_as_tokens(key, value, heads_first)
    flat, between = as_tokens(query, heads_first)
    if between != queries:
        flat = packed_rows(query, heads_first)
    heads, v_size = flat.shape[1], value.shape[3]
    out = flat.new_zeros(rows * queries, heads, v_size)
    lse = None
    if options.needs_lse:
        lse = flat.new_full((rows * queries, heads), -torch.inf, dtype=torch.float32)
    reading = read(mask, rows, queries, sinks=sinks is not None)
    least = None if reading.least is None else reading.least.to(flat.device)[:, None]
    if least is not None and reading.even:
        flat = flat * (least == 0)[..., None]  # a product, so that NaN stays
    for part in reading.parts:
        causal, window, right = part.kind
        wanted = options._replace(causal=causal, sliding_window=window, window_right=right)
        group = group_for_call(
            flat, flat_keys.shape[1], v_size, wanted, sinks is not None, False, cached=False
        )
        step = _plan(group, part, apart)
        if count is not None:
            count(step.group)
        if part.rows is None:
            out, lse = run_plan(step, flat, flat_keys, flat_values, sinks=sinks)
            break
        at = part.rows.to(flat.device)
        out[at], part_lse = run_plan(step, flat[at], flat_keys, flat_values, sinks=sinks)
        if lse is not None and part_lse is not None:
            lse[at] = part_lse
    if lse is not None and least is not None:
        lse = lse + least
    out = out.view(rows, queries, heads, v_size)
    lse = None if lse is None else lse.view(rows, queries, heads)
    if heads_out:
        return out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    return out, lse


def _check(mask: Tensor, rows: int, queries: int, keys: int, alibi_slopes: Tensor | None) -> None:
    check_is_real("mask", mask)
    if mask.dim() != 4 or mask.shape[3] != keys or mask.shape[2] not in (1, queries):
        padding = "; of a padding mask (batch, keys) pass mask[:, None, None]"
        what = f"a mask of {tuple(mask.shape)} over {queries} queries and {keys} keys"
        raise UnreadableMask(what, padding if mask.shape == (rows, keys) else "")
    if mask.shape[0] not in (1, rows):
        raise UnreadableMask(f"a mask of {mask.shape[0]} rows over {rows}")
    if alibi_slopes is not None:
        raise BatchError(
            "alibi_slopes beside a mask: positions are not known; leave one of them out"
        )


def _plan(group: LayerGroup, part: Part, apart: int) -> AttentionStep:
    step: AttentionStep | None = part.plans.get((group, apart))
    if step is None:
        starts = tuple(row * apart + first for row, first in part.firsts)
        step = plan_lengths(group, tuple(part.query_lens), tuple(part.key_lens), starts)
        part.plans[group, apart] = step
    return step
