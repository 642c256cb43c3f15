"""Are layers right that published models have, and several features at once?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.case import Case, served_phases
from polyattn.conformance.cases.published import FURTHER, VALUES
from polyattn.conformance.covering import Choice, Covering
from polyattn.conformance.harness.base import Harness
from polyattn.errors import PolyattnError, SelectionError, SpecError
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.registry.capabilities import Capabilities
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.spec.layer import LayerSpec
from polyattn.workload.steps import Lengths

LEAST_LAYERS = 16
"""The least number of layers that the grid of masks checks, without a limit of time."""
LEAST_PAIRS, PATIENCE = 10, 6
"""For pairs: the least number of layers to check, and the budgets that all of them may take."""
MOST_NUMBERS = (1 << 18, 1 << 20, 1 << 22)
"""Most numbers of a step's keys, half of those of its scores and its cache: small steps come first."""
ROWS = {"decodes": (("context",), 4), "prompts": (("query", "length"), 3)}
"""Rows of a step of pairs."""
MOST_HEADS = 142
"""Query heads of a layer of pairs: Falcon's group of 71, twice."""
MOST_SCALED = 64
"""Scale times head size of a layer of pairs in float32, as T5 has. A sum of products rounds a logit in
proportion to it: at 256 an honest kernel is off by more than the tolerance."""
FEW = 3
"""So many of its rows, the shortest, are there again in larger steps."""
MODES = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}
OF_STEPS = frozenset({"layout", "lie", "mode", "sequences", "decodes", "prompts"})
GRID: dict[str, tuple[Any, ...]] = {
    "causal": (True, False),
    "sliding_window": (None, 2, 40),
    "sink_tokens": (0, 4, 64, 200),
    "chunk_size": (None, 5, 16),
    "alibi": (False, True),
}
HEADS = ((4, 2), (8, 1), (2, 2), (24, 8), (17, 1))
"""Heads and KV heads; each layer of the grid draws a pair. Tiles of queries depend on the ratio."""
GRID_LENGTHS = {
    True: [(100, 100), (21, 176), (1, 260), (1, 3), (140, 270)],
    False: [(100, 100), (130, 130), (21, 176), (6, 1), (30, 5), (3, 9), (270, 270)],
}
"""Steps over a cache, and over whole keys, where queries may outnumber keys."""


def published(case: Case, harness: Harness) -> None:
    """A layer of a published model, in steps beyond its window, its chunk and its sink tokens.

    The same with the LSE where it had none, or without it, in a few rows.
    """
    harness.step(harness.layer(case.spec), case.batch).check()
    for further, batch in _further(case, harness):
        harness.step(harness.layer(further), batch).check("another layer: ")
    other = case.spec.replace(needs_lse=not case.spec.needs_lse)
    if case.spec.cached and case.batch.startswith("reaching") and _served(harness, other):
        prefills = "prefill" in harness.info.capabilities.phases
        harness.step(harness.layer(other), [(1, 140), (3 if prefills else 1, 37)]).check(
            "few rows: "
        )


def _further(case: Case, harness: Harness) -> Iterator[tuple[LayerSpec, Lengths | str]]:
    """Yield the other layers of a plainest layer's case that the backend serves."""
    caps = harness.info.capabilities
    for fields, step in FURTHER.get(case.batch, ()):
        spec = _layer_of(case.spec, fields)
        if spec is None or not _served(harness, spec):
            continue
        if not spec.block_size or spec.block_size in caps.block_sizes or "NHD" in caps.layouts:
            yield spec, step  # blocks of another layout can't be cut into smaller ones


def masks(case: Case, harness: Harness) -> None:
    """Windows, sink tokens, chunks and slopes in a grid, drawn in any order within the budget."""
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
        if "prefill" not in harness.info.capabilities.phases:
            lengths = [(1, length) for _, length in lengths]
        harness.step(layer, lengths).check("masks: ")
        looked_at += 1
    assert looked_at, "no layer of the grid is served"


def pairs(case: Case, harness: Harness) -> None:
    """Each two values of a layer, its cache and its step meet in some step, small steps first.

    All do, or as many as some budgets leave time for.
    """
    end, looked_at = time.monotonic() + PATIENCE * harness.budget, 0
    caps = harness.info.capabilities
    values = claimed(case.spec, caps)
    covering = Covering(values, ROWS, harness.dice.integer(0, 1 << 31))
    of_layer = [name for name in covering.plain if name not in OF_STEPS]
    served: dict[tuple[Any, ...], bool | None] = {}

    def allows(choice: Choice, most: int, early: bool) -> bool:
        if not fits(choice, most):
            return False
        whole = choice.keys() >= {*covering.plain}
        if not whole and not early:
            return True
        layer = tuple(choice.get(name, OF_STEPS) for name in of_layer)
        if layer not in served:
            spec = _drawn(case.spec, choice)
            served[layer] = None if spec is None else _served(harness, spec)
        answer = served[layer]
        return bool(answer) if whole else answer is not False

    # Serve each chosen value beside the usual ones first, then all of them together.
    for most, early in product(MOST_NUMBERS, (True, False)):
        small = partial(allows, most=most, early=early)
        for choice in covering.draw(small, any_value=most == MOST_NUMBERS[0]):
            if looked_at >= LEAST_PAIRS and time.monotonic() > end:
                return
            spec = _drawn(case.spec, choice)
            assert spec is not None
            try:
                with MODES[choice["mode"]]():
                    _pair(harness, spec, choice, covering)
            except SelectionError:  # claimed apart, excluded together
                continue
            looked_at += 1
    assert looked_at, "no layer of the values is served"


def _pair(harness: Harness, spec: LayerSpec, choice: Choice, covering: Covering) -> None:
    """Run a choice: its rows in one step, and so many of them, or more, as its sequences are."""
    layer, count = harness.layer(spec, choice.get("layout")), choice["sequences"]
    rows = _rows(choice)
    known = harness.step(layer, rows, packed=choice["lie"] == "packed", first_block=0).remembered()
    order = harness.dice.order(len(rows)).tolist()
    if count < len(rows):
        _lying(known, choice).check(f"{choice}: ")
        covering.meet({name: value for name, value in choice.items() if name != "sequences"})
        order = order[:count]
    else:
        short = sorted(range(len(rows)), key=lambda row: rows[row][1])[:FEW]
        order += (short * count)[: count - len(rows)]
        order = [order[n] for n in harness.dice.order(count).tolist()]
    _lying(known.picked(order), choice).check(f"{choice}: ")
    own = {rows[row] for row in order}
    covering.meet(
        choice
        | {
            "decodes": [row for row in choice["decodes"] if (1, *row) in own],
            "prompts": [row for row in choice["prompts"] if _prompt(row) in own],
        }
    )


def _lying(step: AttentionWorkload, choice: Choice) -> AttentionWorkload:
    """Return a step whose tensors lie as a choice says."""
    if choice["lie"] != "by heads":
        return step
    tensors = {name: by_heads(tensor) for name, tensor in step.tensors().items()}
    return step.but(**tensors, expected=step.expected)


def _rows(choice: Choice) -> list[tuple[int, int]]:
    """Return (query, length) of a choice's rows, and of some that reach beyond what a layer sees."""
    far, rows = _far(choice), [(1, length) for (length,) in choice["decodes"]]
    rows += [_prompt(row) for row in choice["prompts"]]
    query, length = rows[-1] if rows else (1, 1)
    rows += [(0, 3), (1, far + 1 + length % 19), (1, far or 2)]
    return [*rows, (min(query, 9), far + 9 + length % 5)]


def _prompt(row: tuple[int, int]) -> tuple[int, int]:
    query, length = row
    return min(query, length), length


def _far(choice: Choice) -> int:
    """Return beyond which length a layer doesn't see all."""
    window, sinks, chunk = (choice.get(n) for n in ("sliding_window", "sink_tokens", "chunk_size"))
    return max((window or 0) + (sinks or 0), chunk or 0)


def fits(choice: Choice, most: int) -> bool:
    """Whether a choice, which may lack some, is a layer whose step has at most so many numbers."""
    size, block = choice.get("head_size", 16), choice.get("block_size") or 1
    kv_heads, lie, layout = choice.get("num_kv_heads", 1), choice.get("lie"), choice.get("layout")
    heads, far = kv_heads * choice.get("group", 1), _far(choice)
    if heads > MOST_HEADS:
        return False
    if choice.get("dtype") == "float32" and choice.get("scale", 0.0) * size > MOST_SCALED:
        return False
    if choice.get("sink_tokens") and choice.get("sliding_window", 1) is None:
        return False
    if choice.get("v_head_size", 0) not in (
        0,
        choice.get("head_size", choice.get("v_head_size")),
    ) and (layout == "contiguous" or lie == "packed"):
        return False
    if layout == "contiguous" and lie == "packed":
        return False
    prompts = [(row[0], row[-1]) for row in choice.get("prompts", ()) if row]
    lengths = [row[0] for row in choice.get("decodes", ()) if row]
    lengths += [length for _, length in prompts] + [far + 19, far or 2, far + 9]
    scores = sum(min(query, length) * length for query, length in prompts) + 9 * (far + 9)
    held = sum(-(-length // block) for length in lengths) + choice.get("sequences", 1)
    numbers = max(sum(lengths) * max(kv_heads, heads // 4), held * block * kv_heads // 2) * size
    return bool(max(numbers, scores * heads // 2) <= most)


def by_heads(tensor: Tensor) -> Tensor:
    """Return the tensor (tokens, heads, size) as it lies head by head."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def claimed(base: LayerSpec, caps: Capabilities) -> dict[str, tuple[Any, ...]]:
    """Return the values that a backend claims."""
    values = dict(VALUES)
    for name, sizes in (
        ("head_size", caps.head_sizes),
        ("group", caps.gqa_ratios),
        ("block_size", caps.block_sizes),
        ("v_head_size", caps.v_head_sizes),
    ):
        values[name] = tuple(each for each in VALUES[name] if not each or each in sizes)
    for name, claimed in (
        ("dtype", caps.dtypes),
        ("kv_cache_dtype", caps.kv_cache_dtypes),
        ("layout", caps.layouts),
    ):
        values[name] = tuple(each for each in VALUES[name] if each in claimed)
    if not base.cached:
        values |= {"kv_cache_dtype": ("auto",), "block_size": (None,), "lie": ("plain", "by heads")}
        del values["layout"]
    if "prefill" not in caps.phases:
        values["query"] = (1,)
    unclaimed = {
        "group": "gqa", "causal": "non_causal", "chunk_size": "chunked", "needs_lse": "lse",
        **{n: n for n in ("sliding_window", "sink_tokens", "logit_soft_cap", "alibi", "learned_sinks")},
        "v_head_size": "v_head_size",
    }  # fmt: skip
    for name, feature in unclaimed.items():
        if feature not in caps.features or (name == "v_head_size" and caps.v_head_pairs):
            values[name] = VALUES[name][:1]
    return {name: each or (getattr(base, name),) for name, each in values.items()}


def _drawn(base: LayerSpec, choice: Choice) -> LayerSpec | None:
    """Return the layer of a choice, the usual one's where it lacks a value; None for what is no layer."""
    fields = {name: value for name, value in choice.items() if name not in OF_STEPS | ROWS.keys()}
    group = fields.pop("group", base.gqa_ratio)
    kv_heads = fields.get("num_kv_heads", base.num_kv_heads)
    return _layer_of(base, fields | {"num_heads": group * kv_heads, "num_kv_heads": kv_heads})


def _layer_of(base: LayerSpec, fields: dict[str, Any]) -> LayerSpec | None:
    try:
        return base.replace(**fields)
    except SpecError:  # sink tokens without a window
        return None


def _served(harness: Harness, spec: LayerSpec) -> bool:
    caps = harness.info.capabilities
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
