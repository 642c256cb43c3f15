"""Are layers right that published models have, and several features at once?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.case import Case, served_phases
from polyattn.conformance.cases.published import FURTHER, VALUES
from polyattn.conformance.harness.base import Harness
from polyattn.errors import PolyattnError, SelectionError, SpecError
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.discovery import discover
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.spec.layer import LayerSpec

LEAST_LAYERS = 16
"""Layers of the grid of masks that are looked at, however long they take."""
LEAST_PAIRS, MOST_LAYERS, CANDIDATES, MOST_NUMBERS = 10, 1000, 24, 1 << 21
"""Of pairs: layers that are looked at at least, and drawn at most; candidates of which each is the one
with most new pairs; keys times query heads times the head size of a step, half of its scores, and half of
its cache, which the reference computes in some hundredths of a second."""
MODES = {
    "gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip
OF_STEPS = frozenset({"layout", "lie", "mode", "query", "length", "rows", "others"})
DECODES = 4
"""So many more decodes, and as many prompts, has a step that has so many rows, and that fit."""
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
    """A layer as a published model has it, beyond its window, its chunk and its kept tokens.

    The same with the LSE where it had none, or without it, in a few rows.
    """
    harness.step(harness.layer(case.spec), case.batch).check()
    for further, batch in _further(case, harness):
        harness.step(harness.layer(further), batch).check("another layer: ")
    other = case.spec.replace(needs_lse=not case.spec.needs_lse)
    if case.spec.cached and case.batch.startswith("reaching") and _served(harness, other):
        prefills = "prefill" in discover().backend(harness.backend).capabilities.phases
        harness.step(harness.layer(other), [(1, 140), (3 if prefills else 1, 37)]).check(
            "few rows: "
        )


def _further(
    case: Case, harness: Harness
) -> Iterator[tuple[LayerSpec, str | list[tuple[int, int]]]]:
    """Yield the other layers of a case of the plainest layer's, as far as they are served."""
    several, name = FURTHER.get(case.batch, ((), ""))
    for fields in several:
        spec = _layer_of(case.spec, fields)
        if spec is None or not _served(harness, spec):
            continue
        caps = discover().backend(harness.backend).capabilities
        if (
            spec.block_size
            and spec.block_size not in caps.block_sizes
            and "NHD" not in caps.layouts
        ):
            continue  # blocks of another layout can't be cut into smaller ones
        batch: str | list[tuple[int, int]] = name
        if not spec.cached and name == "decode":
            batch = [(1, 9), (3, 70)]
        if name == "all full" and spec.block_size:
            size = spec.block_size
            batch = [(1, 2 * size), (1, 4352 + 2 * size), (3, 2 * size), (1, size - 1)]
        yield spec, batch


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


def pairs(case: Case, harness: Harness) -> None:
    """Each two values of a layer, its cache and its step: those not met yet first, for the budget."""
    end, looked_at = time.monotonic() + harness.budget, 0
    met: set[tuple[Any, Any]] = set()
    values = _claimed(case.spec, discover().backend(harness.backend).capabilities)
    for _ in range(MOST_LAYERS):
        if looked_at >= LEAST_PAIRS and time.monotonic() > end:
            return
        some = [_any(harness, values) for _ in range(CANDIDATES)]
        some.sort(key=lambda chosen: len(_pairs_of(chosen) - met), reverse=True)
        known = ((chosen, _drawn(case.spec, chosen)) for chosen in some)
        found = ((c, spec) for c, spec in known if spec is not None and _served(harness, spec))
        chosen, spec = next(found, (None, None))
        if chosen is None or spec is None:
            continue
        try:
            with MODES[chosen["mode"]]():
                _pair(harness, spec, chosen)
        except SelectionError:  # claimed apart, excluded together
            continue
        looked_at += 1
        met |= _pairs_of(chosen)
    assert looked_at, "no layer of the values is served"


def _any(harness: Harness, values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a value of each, by names in order, and of queries and lengths several more."""
    chosen = {name: harness.dice.choice(values[name]) for name in sorted(values)}
    queries, lengths = values["query"], values["length"]
    chosen["others"] = tuple(
        (1 if row < DECODES else harness.dice.choice(queries), harness.dice.choice(lengths))
        for row in range(2 * DECODES)
    )
    return chosen


def _pairs_of(chosen: dict[str, Any]) -> set[tuple[Any, Any]]:
    return {*combinations([(n, value) for n, value in chosen.items() if n != "others"], 2)}


def _pair(harness: Harness, spec: LayerSpec, chosen: dict[str, Any]) -> None:
    layer = harness.layer(spec, chosen.get("layout"))
    packed = chosen["lie"] == "packed"
    step = harness.step(layer, _rows(chosen, spec), packed=packed, first_block=0)
    if chosen["lie"] == "by heads":
        step = step.but(**{n: by_heads(tensor) for n, tensor in step.tensors().items()})
    step.check(f"{chosen}: ")


def by_heads(tensor: Tensor) -> Tensor:
    """Return the tensor (tokens, heads, size) as it lies head by head."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _claimed(base: LayerSpec, caps: Capabilities) -> dict[str, tuple[Any, ...]]:
    """Return the values of which a backend may serve a layer."""
    found = dict(VALUES)
    for name, sizes in (
        ("head_size", caps.head_sizes), ("group", caps.gqa_ratios), ("block_size", caps.block_sizes),
        ("v_head_size", caps.v_head_sizes),
    ):  # fmt: skip
        found[name] = tuple(each for each in VALUES[name] if not each or each in sizes)
    for name, claimed in (
        ("dtype", caps.dtypes), ("kv_cache_dtype", caps.kv_cache_dtypes), ("layout", caps.layouts),
    ):  # fmt: skip
        found[name] = tuple(each for each in VALUES[name] if each in claimed)
    if not base.cached:
        found |= {"kv_cache_dtype": ("auto",), "block_size": (None,), "lie": ("plain", "by heads")}
        del found["layout"]
    unclaimed = {
        "group": "gqa", "causal": "non_causal", "chunk_size": "chunked", "needs_lse": "lse",
        **{n: n for n in ("sliding_window", "sink_tokens", "logit_soft_cap", "alibi", "learned_sinks")},
        "v_head_size": "v_head_size",
    }  # fmt: skip
    for name, feature in unclaimed.items():
        if feature not in caps.features or (name == "v_head_size" and caps.v_head_pairs):
            found[name] = VALUES[name][:1]
    return {name: each or (getattr(base, name),) for name, each in found.items()}


def _drawn(base: LayerSpec, chosen: dict[str, Any]) -> LayerSpec | None:
    """Return the layer of chosen values; None for what is no layer, or takes the reference too long."""
    fields = {n: v for n, v in chosen.items() if n not in OF_STEPS}
    if not fields["sliding_window"]:
        fields["sink_tokens"] = 0
    heads = fields.pop("group") * fields["num_kv_heads"]
    spec = _layer_of(base, fields | {"num_heads": heads})
    if spec is None:
        return None
    if chosen["lie"] == "packed" and (
        spec.v_head_size != spec.head_size or chosen.get("layout") == "contiguous"
    ):
        return None
    rows, block, size = _rows(chosen, spec), spec.block_size or 1, spec.head_size
    keys = sum(length for _, length in rows)
    held = sum(-(-length // block) * block for _, length in rows) * spec.num_kv_heads * size
    scores = sum(query * length for query, length in rows) * heads
    return spec if max(keys * heads * size, held // 2, scores // 2) <= MOST_NUMBERS else None


def _rows(chosen: dict[str, Any], spec: LayerSpec) -> list[tuple[int, int]]:
    """Return a step of a size, a query and a length, which reaches beyond what the layer sees."""
    far = max((spec.sliding_window or 0) + spec.sink_tokens, spec.chunk_size or 0)
    query, length = chosen["query"], chosen["length"]
    rows = [(min(query, length), length), (1, length), (0, 3), (1, far + 1 + length % 19), (2, 7)]
    if length == far:  # what ends just there is looked at, too
        rows[2] = (1, far)
    rows += [(1, 1 + 5 * row % 23) for row in range(chosen["rows"])]
    rows = rows[: chosen["rows"]]
    if len(rows) > DECODES:
        left = MOST_NUMBERS // (spec.num_heads * spec.head_size) - sum(length for _, length in rows)
        for query, length in chosen["others"]:
            query = min(query, length)
            if length <= left // 2 and query * length * spec.num_heads <= MOST_NUMBERS // 4:
                rows.append((query, length))
                left -= length
    first = length % len(rows)
    return rows[first:] + rows[:first]


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
    step = harness.step(layer, [(1, 2 * block + 5), (1, 9), (1, 2 * block + 5)])
    for tensor in step.tensors().values():
        tensor[1:] = tensor[0]
    step.check("rows alike in all but their context: ")
