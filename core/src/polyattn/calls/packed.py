"""Packed sequences whose keys lie anywhere: whole, with gaps, or in a cache's pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.calls.bound import Lens, attend_whole, step_for
from polyattn.calls.gradients import Recomputed, gradients
from polyattn.calls.plans import CallOptions, group_for_call, run_plan
from polyattn.calls.views import pages_of
from polyattn.errors import BatchError
from polyattn.runtime.inputs import asks_gradients
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.host_copies import stored


class PackedKeys(NamedTuple):
    """Where a call's keys and values are: packed sequences, or pages.

    Attributes:
        key: (tokens, heads, size), or pages (pages, page size, heads, size).
        value: as `key`, with the values' size.
        lens: the number of keys of each sequence, on the host.
        starts: of packed sequences, where each begins; None: one after another.
        block_table: int32 (num_seqs, columns): each sequence's pages; None: keys are packed.

    Examples:
        >>> PackedKeys(torch.zeros(7, 2, 64), torch.zeros(7, 2, 64), lens=[5, 2]).starts is None
        True

    """

    key: Tensor
    value: Tensor
    lens: Sequence[int]
    starts: Sequence[int] | None = None
    block_table: Tensor | None = None


def attend_packed(
    query: Tensor,
    query_lens: Sequence[int],
    keys: PackedKeys,
    options: CallOptions,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend for packed sequences.

    If a tensor requires a gradient, torch computes it from the formula, one sequence at a time.

    Args:
        query: (tokens, heads, size), sequences one after another.
        query_lens: query tokens of each sequence.
        keys: keys and values.
        options: the options of the call.
        sinks: float32 (heads,), learned sink logits.
        alibi_slopes: float32 (heads,) or (num_seqs, heads).

    Returns:
        The output (tokens, heads, v_size), and the LSE, float32 (tokens, heads), natural logarithm, if
        the options need it, else None.

    Raises:
        BatchError: shapes, dtypes or devices don't fit, or sinks come with gradients.
        SelectionError: nothing serves such a layer, or not the named backend.

    Examples:
        >>> from polyattn.host import CallOptions, PackedKeys, attend_packed
        >>> keys = PackedKeys(*torch.randn(2, 7, 2, 64), lens=[5, 2])
        >>> out, _ = attend_packed(torch.randn(6, 4, 64), [5, 1], keys, CallOptions(causal=True))
        >>> out.shape
        torch.Size([6, 4, 64])

    """
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        return _by_sequence(query, query_lens, keys, options, sinks, alibi_slopes)
    training = asks_gradients(query, *keys[:2])
    if not training and keys.block_table is None:
        lens = _lens(query_lens, keys)
        return attend_whole(
            query, keys.key, keys.value, lens, options, sinks=sinks, alibi_slopes=alibi_slopes
        )
    more = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    if training and not options.needs_lse:  # the formula without an LSE is differentiated
        options = options._replace(needs_lse=True)
        return attend_packed(query, query_lens, keys, options, **more)[0], None
    # A cache has no form of queries that see no key at all.
    blind = options.causal and any(k < q for q, k in zip(query_lens, keys.lens, strict=True))
    if keys.block_table is not None and (training or blind):
        keys = _gathered(keys)
    heads, v_size = keys.key.shape[-2], keys.value.shape[-1]
    params = sinks is not None, alibi_slopes is not None
    if keys.block_table is not None:
        cache = pages_of(keys.key, keys.value)
        group = group_for_call(query, heads, v_size, options, *params, block_size=cache.block_size)
        group.check_format(cache.format)
        step = group.plan_for(_batch(query_lens, keys))
        return run_plan(step, query, None, None, cache, **more)
    if not training:  # fewer keys than queries, out of their pages
        return attend_packed(query, query_lens, keys, options, **more)
    step = step_for(query, keys.key, keys.value, _lens(query_lens, keys), options, *params)
    if sinks is not None:
        raise BatchError(
            "sinks with gradients: nothing serves that; detach the query, key and value"
        )
    out, lse = Recomputed.apply(  # type: ignore[no-untyped-call]
        query,
        *keys[:2],
        alibi_slopes,
        step.group.spec,
        _sequences(query_lens, keys),
        lambda *tensors: run_plan(step, *tensors, alibi_slopes=alibi_slopes),
    )
    return out, lse


@torch.no_grad()
def packed_gradients(
    d_out: Tensor,
    query: Tensor,
    query_lens: Sequence[int],
    keys: PackedKeys,
    options: CallOptions,
    *,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend_packed` over packed keys, from the formula.

    Args:
        d_out: the output's gradient, (tokens, heads, v_size).
        query: (tokens, heads, size).
        query_lens: query tokens of each sequence.
        keys: packed keys and values.
        options: the options of the call.
        alibi_slopes: float32 (heads,).

    Returns:
        The gradients of query, key and value, each of its tensor's shape.

    Raises:
        SelectionError: nothing serves such a layer.

    Examples:
        >>> from polyattn.host import CallOptions, PackedKeys, packed_gradients
        >>> query, keys = torch.randn(5, 4, 64), PackedKeys(*torch.randn(2, 5, 4, 64), lens=[5])
        >>> gradients = packed_gradients(torch.ones_like(query), query, [5], keys, CallOptions())
        >>> [tuple(gradient.shape) for gradient in gradients]
        [(5, 4, 64), (5, 4, 64), (5, 4, 64)]

    """
    group = group_for_call(
        query,
        keys.key.shape[-2],
        keys.value.shape[-1],
        options,
        False,
        alibi_slopes is not None,
        cached=False,
    )
    sequences = _sequences(query_lens, keys)
    return gradients(group.spec, query, *keys[:2], d_out, sequences, alibi_slopes)


def _lens(query_lens: Sequence[int], keys: PackedKeys) -> Lens:
    starts = None if keys.starts is None else tuple(keys.starts)
    return tuple(query_lens), tuple(keys.lens), starts


def _batch(query_lens: Sequence[int], keys: PackedKeys) -> Batch:
    """Return the step as a batch over pages, stored on its block table until that changes."""
    table, lens = keys.block_table, keys.lens
    assert table is not None

    def make() -> Batch:
        batch = Batch([0, *accumulate(query_lens)], lens, table)
        # Detached: the tensor itself, or a view of it, would be a circle that nothing collects.
        return batch if table.is_inference() else batch.with_block_table(table.detach())

    return stored(table, "_polyattn_batch", True, (tuple(query_lens), tuple(lens)), make)


def _sequences(query_lens: Sequence[int], keys: PackedKeys) -> list[tuple[int, int, int, int]]:
    firsts = accumulate(query_lens, initial=0)
    starts = accumulate(keys.lens, initial=0) if keys.starts is None else keys.starts
    return list(zip(firsts, query_lens, starts, keys.lens, strict=False))


def _gathered(keys: PackedKeys) -> PackedKeys:
    """Return keys out of their pages: what differentiates, or has fewer keys than queries, needs it."""
    assert keys.block_table is not None
    pages = keys.block_table.clamp(0, keys.key.shape[0] - 1).long()
    key, value = (t[pages].flatten(1, 2) for t in (keys.key, keys.value))
    starts = [row * key.shape[1] for row in range(key.shape[0])]
    return PackedKeys(key.flatten(0, 1), value.flatten(0, 1), keys.lens, starts)


def _by_sequence(
    query: Tensor,
    query_lens: Sequence[int],
    keys: PackedKeys,
    options: CallOptions,
    sinks: Tensor | None,
    slopes: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """ALiBi slopes of each sequence's own, (num_seqs, heads): a call for each."""
    starts, table = keys.starts, keys.block_table
    each = {
        "keys.lens": keys.lens,
        "keys.starts": starts,
        "block_table": table,
        "alibi_slopes": slopes,
    }
    for name, rows in each.items():
        if rows is not None and len(rows) != len(query_lens):
            raise BatchError(
                f"{name} has {len(rows)} rows; query_lens has {len(query_lens)} sequences"
            )
    if sum(query_lens) != len(query):
        raise BatchError(f"query has {len(query)} tokens; query_lens sum up to {sum(query_lens)}")
    if not query_lens:
        no_slopes = slopes.new_zeros(query.shape[1])
        return attend_packed(query, [], keys, options, sinks=sinks, alibi_slopes=no_slopes)
    if starts is None and table is None:
        starts = list(accumulate(keys.lens, initial=0))
    outs, lses, at = [], [], 0
    for row, count in enumerate(query_lens):
        own = PackedKeys(
            keys.key,
            keys.value,
            [keys.lens[row]],
            None if starts is None else [starts[row]],
            None if table is None else table[row : row + 1],
        )
        tokens = query[at : at + count]
        out, lse = attend_packed(
            tokens, [count], own, options, sinks=sinks, alibi_slopes=slopes[row]
        )
        outs.append(out)
        lses.append(lse)
        at += count
    return torch.cat(outs), None if lses[0] is None else torch.cat(lses)  # type: ignore[arg-type]
