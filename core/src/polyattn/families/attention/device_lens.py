"""What if only the device knows the lengths? Decode is planned by bounds, and nothing copied back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.errors import BatchError, SelectionError
from polyattn.families.attention.dense import Asked, group_of, run
from polyattn.families.attention.views import pages_of
from polyattn.registry.discovery import generation
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.inputs import capturing
from polyattn.runtime.plan import StepPlan
from polyattn.runtime.stateless import place_of
from polyattn.settings import current


class Way(NamedTuple):
    """One way of calling: who serves it, and where each row's token starts, on the device."""

    group: LayerGroup
    starts: Tensor


def way_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Asked,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Way | None:
    """Return who serves `decode` of such tensors, None where no backend goes by the device's lengths.

    What a graph captures needs a call of its kind before, outside of the capture. Raises `BatchError`.
    """
    kind = (
        current(), generation(), place_of(query.device), query.device, query.dtype, query.shape,
        asked, key.shape[1:], value.shape[3], key.dtype, sinks is None, alibi_slopes is None,
    )  # fmt: skip
    if kind not in _ways:
        if capturing(query):
            raise BatchError(
                "the first decode of its kind inside a captured graph; run the step once before"
            )
        if len(_ways) >= KNOWN:
            _ways.clear()
        _ways[kind] = _way(query, key, value, asked, sinks, alibi_slopes)
    return _ways[kind]


def decode(
    way: Way,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    lens: Tensor,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend for one token of each sequence over pages, by lengths that stay on the device.

    `query` (num_seqs, heads, size); `key`, `value` (pages, page size, KV heads, size); `block_table`
    int32 (num_seqs, pages of a row); `lens` int32 (num_seqs,), none longer than its row, which nobody
    looks at. Returns the output and, where asked, the LSE (num_seqs, heads), float32. Raises
    `BatchError`.
    """
    count = query.shape[0]
    if lens.dtype != torch.int32 or lens.shape != (count,):
        raise BatchError(
            f"lens is {lens.dtype} of shape {tuple(lens.shape)}; it must be torch.int32 of ({count},)"
        )
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or len(block_table) != count:
        raise BatchError(
            f"block_table is {block_table.dtype} of shape {tuple(block_table.shape)}; it must be "
            f"torch.int32 of ({count}, pages)"
        )
    plan = _plan(way, block_table, lens, key.shape[1])
    pages = pages_of(key, value)
    way.group.check_format(pages.format)
    return run(plan, query, None, None, pages, sinks=sinks, alibi_slopes=alibi_slopes)


_ways: dict[Any, Way | None] = {}
KNOWN = 1024
"""Ways of calling that are remembered; all are forgotten when there are more."""


def _way(
    query: Tensor, key: Tensor, value: Tensor, asked: Asked, sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Way | None:  # fmt: skip
    try:
        group = group_of(
            query, key.shape[2], value.shape[3], asked, sinks is not None, alibi_slopes is not None,
            block_size=key.shape[1], length_bounds=True,
        )  # fmt: skip
    except SelectionError:
        return None
    return Way(group, _starts(query.shape[0], query.device))


@lru_cache(maxsize=1024)
def _starts(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count + 1, dtype=torch.int32, device=device)


def _plan(way: Way, block_table: Tensor, lens: Tensor, page: int) -> StepPlan:
    """Return the plan over these tensors, kept on `lens`: their values change nothing in it."""
    where = (way.group, block_table.data_ptr(), block_table.shape, block_table.stride())
    plans: dict[Any, StepPlan] = lens.__dict__.setdefault("_polyattn_plans", {})
    plan = plans.get(where)
    if plan is None:
        count = len(lens)
        bound = block_table.shape[1] * page
        # Detached: the tensors themselves, or views of them, were a circle that nothing collects.
        batch = Batch.on_buffers(
            list(range(count + 1)), [bound] * count, way.starts, lens.detach(),
            block_table.detach(), None,
        )  # fmt: skip
        if len(plans) >= 16:
            plans.clear()
        plan = plans[where] = way.group.plan(batch)
    return plan
