"""Small layers that differ in what their masks show: every backend runs the same grid.

`GRID` combines all masks over given keys. `BEYOND` lists what sizes, groups of heads and caches add:
windows beyond every length, kept tokens to the right of a window, groups of 71 heads. A table says what
a layer computes; `judged` runs one entry on a backend, against the float64 reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from polyattn import Device, LayerSpec
from polyattn.conformance.harness.base import Harness
from polyattn.errors import SelectionError
from polyattn.workload.base import workload

Lengths = list[tuple[int, int]]
ENDLESS = 2**31 - 1
"""What engines write for "no window"."""


class Case(NamedTuple):
    """A layer and one step of it: each sequence's (queries, keys)."""

    spec: LayerSpec
    lengths: Lengths


SHAPES: dict[str, Lengths] = {
    "100": [(100, 100)],
    "130": [(130, 130)],
    "21 of 176": [(21, 176)],
    "6 of 1": [(6, 1)],
    "ragged": [(30, 5), (3, 9)],
}
BASE = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", cached=False, needs_lse=True
)
GRID = {
    f"causal={causal} window={window} kept={kept} chunk={chunk} alibi={alibi} {shape}": Case(
        BASE.replace(
            causal=causal, sliding_window=window, sink_tokens=kept, chunk_size=chunk, alibi=alibi
        ),
        lengths,
    )
    for causal, window, kept, chunk, alibi, (shape, lengths) in product(
        (True, False), (None, 2, 40), (0, 4, 64), (None, 5, 16), (False, True), SHAPES.items()
    )
    if window or not kept  # kept tokens are those that stay beyond a window
}
assert len(GRID) == 420

_BOTH: tuple[dict[str, Any], ...] = (
    {"sliding_window": 8, "sink_tokens": 200},
    {"sliding_window": 1, "sink_tokens": 3},
    {"sliding_window": 300, "sink_tokens": 9},
    {"chunk_size": 128},
    {"sliding_window": 100, "sink_tokens": 70, "chunk_size": 90},
    {"sliding_window": ENDLESS},
    {"sliding_window": ENDLESS, "sink_tokens": 4},
    {"sliding_window": 8, "sink_tokens": ENDLESS},
    {"chunk_size": ENDLESS},
    {"sliding_window": ENDLESS, "sink_tokens": ENDLESS, "chunk_size": ENDLESS},
)
_MASKS = (
    *({"causal": True, **mask} for mask in _BOTH),
    *({"causal": False, **mask} for mask in _BOTH),
    *(
        {"causal": False, **mask}
        for mask in (
            {"window_right": 0},
            {"window_right": 70},
            {"window_right": ENDLESS, "sliding_window": 3},
            {"window_right": 3, "sliding_window": ENDLESS, "sink_tokens": 90},
            {"window_right": 2, "sliding_window": 8, "sink_tokens": 200},
            {"window_right": 100, "sliding_window": 1, "chunk_size": 64},
        )
    ),
)
_BEYOND: dict[str, tuple[dict[str, Any], Lengths]] = {
    "given, 300": ({}, [(300, 300)]),
    "given, 300 of 700": ({}, [(300, 700)]),
    "given, more queries": ({}, [(129, 50), (129, 84), (129, 17), (300, 0), (40, 300)]),
    "given, 32 of 8 heads": ({"num_heads": 32, "num_kv_heads": 8}, [(300, 300), (129, 50)]),
    "given, groups of 71": ({"num_heads": 71, "num_kv_heads": 1}, [(9, 200), (40, 7)]),
    "given, groups of 17": ({"num_heads": 34}, [(90, 90), (20, 3)]),
    "cached, decodes": ({"cached": True, "block_size": 16}, [(1, 700), (1, 1), (1, 90)]),
    "cached, equal decodes": ({"cached": True, "block_size": 16}, [(1, 513), (1, 511)]),
    "cached, drafts": ({"cached": True, "block_size": 16}, [(5, 530), (3, 3), (1, 40), (6, 9)]),
    "cached, mixed": ({"cached": True, "block_size": 16}, [(150, 530), (1, 64), (130, 130)]),
    "cached, groups of 71": (
        {"cached": True, "block_size": 16, "num_heads": 71, "num_kv_heads": 1},
        [(1, 300), (4, 90)],
    ),
}
BEYOND = {
    f"{' '.join(f'{name}={value}' for name, value in mask.items())} {shape}": Case(
        BASE.replace(**fields, **mask), lengths
    )
    for mask, (shape, (fields, lengths)) in product(_MASKS, _BEYOND.items())
}


class Judged(NamedTuple):
    """A backend's results by the names of cases: wrong ones with what is wrong, refused with why."""

    right: list[str]
    wrong: dict[str, str]
    refused: dict[str, str]


def judged(
    backend: str, device: Device, cases: Iterable[tuple[str, Case]], **fields: Any
) -> Judged:
    """Run cases on a backend, with other `fields` of the spec; what isn't near the reference is wrong.

    Example:
        >>> judged("TORCH_SDPA", Device("cpu", "x86_64", torch_device="cpu"), GRID.items()).wrong
        {}

    """
    found = Judged([], {}, {})
    for name, (spec, lengths) in cases:
        try:
            group = Harness(backend, device, 5).group(spec.replace(**fields))
        except SelectionError as error:
            found.refused[name] = str(error)
            continue
        try:
            workload(group, lengths, 5).check()
        except Exception as error:
            found.wrong[name] = f"{type(error).__name__}: {error}"
        else:
            found.right.append(name)
    return found
