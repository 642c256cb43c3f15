"""Are layers right that published models have, and several features at once?"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

from polyattn.conformance.case import Case, served_phases
from polyattn.conformance.harness.base import Harness
from polyattn.errors import PolyattnError, SpecError
from polyattn.registry.discovery import discover
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.spec.layer import LayerSpec

LEAST_LAYERS = 16
"""Layers of the grid of masks that are looked at, however long they take."""
GRID: dict[str, tuple[Any, ...]] = {
    "causal": (True, False),
    "sliding_window": (None, 2, 40),
    "sink_tokens": (0, 4, 64, 200),
    "chunk_size": (None, 5, 16),
    "alibi": (False, True),
}
HEADS = ((4, 2), (8, 1), (2, 2), (24, 8), (17, 1))
"""Heads and KV heads, of which each layer of the grid draws: tiles of queries differ by their ratio."""
GRID_LENGTHS = {
    True: [(100, 100), (21, 176), (1, 260), (1, 3), (140, 270)],
    False: [(100, 100), (130, 130), (21, 176), (6, 1), (30, 5), (3, 9), (270, 270)],
}
"""Steps over a cache, and over keys that are given: there queries may outnumber keys."""


def published(case: Case, harness: Harness) -> None:
    """A layer as a published model has it, beyond its window, its chunk and its kept tokens."""
    harness.step(harness.layer(case.spec), case.batch).check()


def combined(case: Case, harness: Harness) -> None:
    """Several features at once."""
    harness.step(harness.layer(case.spec), case.batch).check()


def masks(case: Case, harness: Harness) -> None:
    """Windows, kept tokens, chunks and slopes in a grid, drawn in any order until the budget is spent."""
    end, looked_at = time.monotonic() + harness.budget, 0
    every = list(product(*GRID.values()))
    heads = [dict(zip(("num_heads", "num_kv_heads"), pair, strict=True)) for pair in HEADS]
    heads = [fields for fields in heads if _served(harness, case.spec.replace(**fields))] or [{}]
    for index in harness.dice.order(len(every)).tolist():
        if looked_at >= LEAST_LAYERS and time.monotonic() > end:
            return
        fields = dict(zip(GRID, every[index], strict=True))
        spec = _layer_of(case.spec, fields | harness.dice.choice(heads))
        if spec is None or not _served(harness, spec):
            continue
        try:
            layer = harness.layer(spec)
        except PolyattnError:  # claimed apart, excluded together
            continue
        lengths = GRID_LENGTHS[bool(spec.cached)]
        if "prefill" not in discover().backend(harness.backend).capabilities.phases:
            lengths = [(1, length) for _, length in lengths]
        harness.step(layer, lengths).check("masks: ")
        looked_at += 1
    assert looked_at, "no layer of the grid is served"


def _layer_of(base: LayerSpec, fields: dict[str, Any]) -> LayerSpec | None:
    try:
        return base.replace(**fields)
    except SpecError:  # kept tokens without a window
        return None


def _served(harness: Harness, spec: LayerSpec) -> bool:
    caps = discover().backend(harness.backend).capabilities
    served = served_phases(caps, spec, harness.device)
    return len(served) == len(caps.phases & {"prefill", "decode"})


def twins(case: Case, harness: Harness) -> None:
    """Rows that are alike in all give the same, each its own; others beside them stay as they are."""
    layer = harness.layer(case.spec)
    block = layer.group.cache_format.block_size
    lengths = [(1, 3 * block + 1), (1, 7), (1, 3 * block + 1), (1, 2 * block + 3)]
    step = harness.step(layer, lengths, shared=((SharedRun((0, 2), 0, 3),),))
    for tensor in step.tensors().values():
        tensor[2] = tensor[0]
    step.check("two rows alike in all: ")
