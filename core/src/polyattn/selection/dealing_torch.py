"""How long do the dense kernels that torch calls take? cuDNN's, and its own FlashAttention.

- `runs`: as CUDNN_ATTENTION calls cuDNN's: once for neighbouring rows of equal lengths, and once more
  for their context, whose state is merged. A call waits for the one before.
- `packed`: as TORCH_SDPA does: equal prompts in one call of the former, others in one of the latter.

Both hold 128 query rows of a query head a tile, uncut, and skip what a causal mask hides.
"""

from __future__ import annotations

import numpy as np

from polyattn.selection.pieces import UNSHARED, Counts, at, ended, largest, total
from polyattn.selection.step import Step

HIGH, BLOCK = 128, 64
"""Query rows of a tile, and the keys that it takes at a time."""
BEGIN = 1
"""Blocks that a tile costs beside its own."""
LATE = 0.7
"""Of a call's longest tile, what its last processor has beyond its share: tiles aren't sorted."""
MERGED = 3
"""Calls that a context costs: its own, and those that merge its state."""
ON_ONE = 2
"""Programs of torch's FlashAttention that a processor holds."""


def runs(step: Step, processors: int) -> Counts:
    """Count calls as items, and their tiles one call after another."""
    queries, lens, heads = step.queries, step.lens, step.spec.num_heads
    begins = np.ones(len(lens), bool)
    begins[1:] = (queries[1:] != queries[:-1]) | (lens[1:] != lens[:-1])
    first = np.flatnonzero(begins)
    alike = np.diff(first, append=len(lens)) * heads
    queries, lens = np.minimum(queries[first], lens[first]), lens[first]
    own = queries if step.spec.causal else np.zeros_like(queries)
    context, tiles = lens - own, (queries + (HIGH - 1)) // HIGH
    programs = tiles * alike
    longest = (own + (BLOCK - 1)) // BLOCK + BEGIN
    blocks = tiles * (tiles - 1) * (HIGH // BLOCK // 2) * (own > 0) + longest
    blocks += BEGIN * (tiles - 1)
    shared = np.maximum(longest, blocks * alike / processors + LATE * longest)
    ends = float(np.where(programs > processors, shared, longest)[own > 0].sum())
    rounds = (programs + (processors - 1)) // processors
    ends += total((rounds * ((context + (BLOCK - 1)) // BLOCK + BEGIN))[context > 0])
    calls = int(np.count_nonzero(own)) + MERGED * int(np.count_nonzero(context))
    area = processors * HIGH * BLOCK
    return at(ends).counts(area, heads, calls / step.spec.num_kv_heads, step.tokens, 0)


def packed(step: Step, processors: int) -> Counts:
    """Count equal prompts as a run, other rows' tiles head by head."""
    if step.spec.sliding_window is None and step.fresh and (step.lens == step.lens[0]).all():
        return runs(step, processors)._replace(kind="prefill")
    costs = step.tiles(1, HIGH, BLOCK, True)[2] + BEGIN
    if len(costs) * step.spec.num_heads <= processors:
        ends = at(UNSHARED * largest(costs))
    else:
        ends = ended(costs, ON_ONE * processors, step.spec.num_heads)
    kind = "ragged" if step.fresh else "chunked"
    area = processors * ON_ONE * HIGH * BLOCK
    return ends.counts(area, step.spec.num_heads, 0, step.tokens, 0, kind)
