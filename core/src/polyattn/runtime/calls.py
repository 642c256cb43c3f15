"""How is one backend's part of a step planned? Over the block table as the backend walks it."""

from __future__ import annotations

from typing import Any

from polyattn.runtime.decompositions import Part
from polyattn.runtime.program import Call
from polyattn.runtime.step.block_tables import expand, with_a_column
from polyattn.selection.cache_format import CacheFormat


def planned_call(
    cache: CacheFormat | None,
    phase: str,
    name: str,
    backend: Any,
    part: Part,
    earlier: Call | None = None,
) -> Call:
    """Return a backend's call for a part of a step.

    `cache`: the group's, None where the backend walks no blocks of it. `earlier`: the captured call,
    whose plan and block table hold this step then.
    """
    batch, size = with_a_column(part.batch), None
    if cache is not None and backend.cache.block_size != cache.block_size:
        size = backend.cache.block_size
        into = None if earlier is None else earlier.plan.batch.block_table
        batch = expand(batch, cache, size, into)
    plan = backend.plan(batch, None if earlier is None else earlier.plan)
    return Call(phase, name, backend, plan, part.rows, size)
