"""How is a step split? By phase: short rows to decode, wherever they are, the rest to prefill."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.program import Call, Rows
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.block_tables import expand, with_a_column
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.layer import LayerSpec


class Part(NamedTuple):
    """Some of a step's sequences as a batch, and the indices of their tokens in the step."""

    batch: Batch
    rows: Rows


class Phases(NamedTuple):
    """A step by phase; None for a phase without rows."""

    decode: Part | None
    prefill: Part | None

    def of(self, call: Call) -> Batch:
        """Return the rows that a captured call takes.

        Args:
            call: of phase `"decode"` or `"prefill"`.

        Raises:
            BatchError: it was captured for other ones.

        """
        part = self.decode if call.phase == "decode" else self.prefill
        wanted = call.plan.batch
        if part is None or part.batch.num_tokens != wanted.num_tokens:
            has = "none" if part is None else f"{part.batch}"
            raise BatchError(
                f"the step has {has} for {call.phase}, where {wanted} was captured; capture a graph for "
                "each kind of step"
            )
        return part.batch


def by_phase(batch: Batch, longest_decode: int = 1) -> Phases:
    """Split a step into decodes and prefills.

    A decode is a row of 1 to `longest_decode` query tokens; a prefill is longer.

    A row without query tokens goes with its neighbours. If `batch.num_contexts` says how many rows
    are prompts, all others are decodes.

    Args:
        batch: the step.
        longest_decode: the most query tokens of a decode.

    Returns:
        The two parts, each None if it has no rows: a batch, and which of the step's tokens are its own.

    Examples:
        >>> phases = by_phase(Batch.from_lens([5, 1], [5, 40]))
        >>> phases.prefill.batch.query_lens, phases.decode.rows
        ([5], slice(5, 6, None))

    """
    if batch.num_contexts is not None:
        return _captured(batch, batch.num_contexts)
    if batch.all_decode:
        return Phases(Part(batch, None), None)
    queries = batch.query_lens
    if not batch.num_tokens:
        return Phases(None, Part(batch, None) if batch.num_seqs else None)
    decodes = [i for i, n in enumerate(queries) if 0 < n <= longest_decode]
    if not decodes:
        return Phases(None, Part(batch, None))
    prefills = [i for i, n in enumerate(queries) if n > longest_decode]
    if not prefills:
        whole = len(decodes) == batch.num_seqs
        return Phases(Part(batch, None) if whole else part_of(batch, decodes), None)
    return Phases(part_of(batch, decodes), part_of(batch, prefills))


def whole_prompts(spec: LayerSpec, batch: Batch) -> tuple[Part | None, Part | None]:
    """Split a step of a `dense_context` layer by whole prompts that see more than their window or chunk.

    Returns these and the rest; None twice if there are no such prompts.
    """
    within = min(n for n in (spec.sliding_window, spec.chunk_size) if n)
    if batch.max_query_len <= within:
        return None, None
    lens = zip(batch.query_lens, batch.lens, strict=True)
    prompts = [i for i, (query, length) in enumerate(lens) if query == length > within]
    if not prompts:
        return None, None
    taken = set(prompts)
    rest = [i for i in range(batch.num_seqs) if i not in taken]
    none = Part(batch.part(slice(0, 0)), slice(0, 0))
    return part_of(batch, prompts), part_of(batch, rest) if rest else none


def rows_within(outer: Part, inner: Part) -> Rows:
    """Return the indices in the step of the tokens of a part of a part."""
    rows, within = outer.rows, inner.rows
    if within is None or rows is None:
        return rows if within is None else within
    if isinstance(rows, slice) and isinstance(within, slice):
        return slice(rows.start + within.start, rows.start + within.stop)
    inside: Rows = within + rows.start if isinstance(rows, slice) else rows[within]
    return inside


def _captured(batch: Batch, prompts: int) -> Phases:
    """Split a captured step's buffers where they were split when it was captured."""
    at, end = batch.starts[prompts], batch.num_tokens
    first = batch.part(slice(0, prompts)).copy()
    first.num_contexts = prompts
    decodes = None
    if prompts < batch.num_seqs:
        rest = batch.part(slice(prompts, batch.num_seqs))
        if batch.decode_start_loc is not None:
            rest.query_start_loc = batch.decode_start_loc
        decodes = Part(rest, slice(at, end))
    return Phases(decodes, Part(first, slice(0, at)) if prompts else None)


def part_of(batch: Batch, seqs: list[int]) -> Part:
    """Return some of the sequences; views of neighbours, else gathered rows."""
    first, last = seqs[0], seqs[-1] + 1
    if last - first == len(seqs):
        rows: Rows = slice(batch.starts[first], batch.starts[last])
        return Part(batch.part(slice(first, last)), rows)
    runs = [(batch.starts[i], batch.starts[i + 1]) for i in seqs]
    if all(a[1] == b[0] for a, b in pairwise(runs)):  # what lies between has no tokens
        rows = slice(runs[0][0], runs[-1][1])
    else:
        tokens = [token for start, stop in runs for token in range(start, stop)]
        rows = torch.tensor(tokens, dtype=torch.int64, device=batch.device)
    return Part(batch.part(seqs), rows)


def planned_call(
    cache: CacheFormat | None, phase: str, name: str, backend: Any, part: Part
) -> Call:
    """Return a backend's call for a part of a step.

    `cache` is the group's, or None if the backend walks no blocks of it.
    """
    size = None
    if cache is not None and backend.cache.block_size != cache.block_size:
        size = backend.cache.block_size
    batch = _walked(part.batch, cache, size)
    return Call(phase, name, backend, backend.plan(batch), part.rows, size)


def refill_call(cache: CacheFormat | None, call: Call, batch: Batch) -> None:
    """Write a later step's rows into a captured call's plan and block table; `cache` as planned."""
    batch = _walked(batch, cache, call.block_size, call.plan.batch.block_table)
    call.backend.plan(batch, call.plan)


def _walked(
    batch: Batch, cache: CacheFormat | None, size: int | None, into: Tensor | None = None
) -> Batch:
    """Return rows as a backend walks them: in blocks of `size` tokens, or the cache's where it is None.

    `into`: a captured call's block table.
    """
    if batch.shared_prefix is not None:  # a shared prefix must be requested
        batch = batch.with_shared_prefix(None)
    if batch.block_table is not None and not batch.block_table.shape[1]:
        batch = with_a_column(batch)
    if cache is None or size is None:
        return batch
    return expand(batch, cache, size, into)
