"""Features that count from a text's beginning: chunks, and sink tokens.

A sequence whose first given key stands later in its text comes down to sequences of layers without
them: each chunk's queries are one, over that chunk's keys, and of S kept tokens those are left that were
given. So every backend serves it that serves keys given whole; none of them learns of positions.
"""

from __future__ import annotations

from itertools import accumulate

from polyattn.errors import BatchError
from polyattn.runtime.decompositions import Part, part_of
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec


def by_position(spec: LayerSpec, batch: Batch) -> list[tuple[LayerSpec, Part]]:
    """Return the equivalent layers of a step with `first_positions`; none if they change nothing.

    Raises `BatchError` for what reads positions by functions of its own.
    """
    firsts, chunk = batch.first_positions, spec.chunk_size
    if not firsts or not any(firsts):
        return []
    for name in ("variant", "mask"):
        if getattr(spec, name) is not None:
            raise BatchError(
                f"first_positions beside {name}={getattr(spec, name)!r}, which counts the call's "
                "keys; pass the positions to its functions as inputs, and leave first_positions out"
            )
    if chunk is not None and any(first % chunk for first in firsts):
        spec, batch = spec.replace(chunk_size=None), _by_chunk(batch, firsts, chunk)
    elif not spec.sink_tokens:
        return []
    assert batch.first_positions is not None
    sinks = [max(0, spec.sink_tokens - first) for first in batch.first_positions]
    plain = batch.copy()
    plain.key_starts, plain.first_positions = batch.key_starts, None
    parts = []
    for count in dict.fromkeys(sinks):
        rows = [i for i, n in enumerate(sinks) if n == count]
        part = Part(plain, None) if len(rows) == len(sinks) else part_of(plain, rows)
        parts.append((spec.replace(sink_tokens=count), part))
    return [(spec, part) for spec, part in parts if part.batch.num_tokens]


def _by_chunk(batch: Batch, firsts: list[int], chunk: int) -> Batch:
    """Return a sequence for each chunk that a sequence's queries stand in, over the chunk's keys."""
    query_lens, lens, starts, positions = [], [], [], []
    each = zip(batch.query_lens, batch.key_starts, batch.text_lens, firsts, strict=True)
    for count, start, end, first in each:
        at = end - count  # where the next query stands: before the text, if keys are fewer
        while at < end:
            below = at // chunk * chunk
            stop, begin = min(below + chunk, end), max(below, first)
            query_lens.append(stop - at)
            lens.append(max(0, stop - begin))
            starts.append(start + begin - first)
            positions.append(begin)
            at = stop
    return Batch(
        [0, *accumulate(query_lens)],
        lens,
        key_starts=starts,
        first_positions=positions,
        device=batch.device,
    )
