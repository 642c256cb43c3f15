"""Which cases follow where a decode reads shared blocks once? Forests of runs, and layers over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.case import Case, captures
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities
from polyattn.runtime.step.shared_prefix import Levels, SharedRun
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES, Role
from polyattn.spec.layer import LayerSpec

RATIOS = (1, 4, 7, 8)
FEATURES: dict[str, dict[str, Any]] = {
    "learned_sinks": {"learned_sinks": True},
    "logit_soft_cap": {"logit_soft_cap": 1.5},
    "lse": {"needs_lse": True},
}
NAMES = ("one run", "levels", "many rows", "alone")


def forest(name: str, block: int) -> tuple[Levels, list[int]]:
    """Return the runs that a batch's rows share, and their lengths, for a block size.

    Together they hold rows without a run, padding, several levels, a group that with its heads is wider
    than any tile of queries, and nothing shared at all.
    """
    if name == "one run":
        return ((SharedRun((0, 1, 3), 0, 5),),), [5 * block + 1, 6 * block, 9, 7 * block + 3]
    if name == "levels":
        levels: Levels = (
            (SharedRun((0, 1, 2, 3, 5), 0, 4),),
            (SharedRun((0, 2, 3), 4, 3), SharedRun((1, 5), 4, 1)),
            (SharedRun((2, 3), 7, 2),),
        )
        return levels, [9 * block, 6 * block + 5, 10 * block + 1, 9 * block + 2, 0, 5 * block + 7]
    if name == "many rows":
        rows = tuple(range(20))
        levels = ((SharedRun(rows, 0, 3),), (SharedRun(rows[1::2], 3, 2),))
        return levels, [5 * block + 1 + row % 5 for row in rows]
    return (), [block + 1, 0, 3 * block]


def derive(caps: Capabilities, base: LayerSpec, device: Device) -> Iterator[Case]:
    """Yield the cases of a claim of `shared_prefix`; `base`: the plainest layer."""
    if not caps.shared_prefix or base.role is not Role.DECODER or not (base.cached and base.causal):
        return
    wide = next((r for r in sorted(RATIOS, reverse=True) if r in caps.gqa_ratios), 1)
    for name in NAMES:
        spec = base
        if name == "many rows" and "gqa" in caps.features:
            spec = base.replace(num_heads=wide * base.num_kv_heads)
        yield Case("forest", "", spec, name)
    for label, spec in _variants(caps, base):
        yield Case("forest", label, spec, "levels")
    if caps.graph_capture:
        how = "forest_graph" if captures(device) else "forest_reuse"
        yield Case(how, "", base.replace(graph_capture="single_token_decode"), "levels")


def _variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    for name in sorted(FEATURES.keys() & caps.features):
        yield name, base.replace(**FEATURES[name])
    for dtype in sorted(caps.dtypes & set(DTYPES) - {base.dtype}):
        yield f"dtype {dtype}", base.replace(dtype=dtype)
    for ratio in caps.gqa_ratios.examples(RATIOS) if "gqa" in caps.features else ():
        yield f"gqa {ratio}", base.replace(num_heads=2 * ratio, num_kv_heads=2)
    for stored in (c for c in KV_CACHE_DTYPES if c in caps.kv_cache_dtypes - {"auto"}):
        eight = base.replace(
            kv_cache_dtype=stored, fp8_compute=caps.fp8_compute and stored == "fp8_e4m3"
        )
        yield stored, eight
        if "learned_sinks" in caps.features:
            yield f"{stored} learned_sinks", eight.replace(learned_sinks=True)
        for scales in ("tensor", "head"):
            if f"{scales}_scales" in caps.features:
                yield f"{stored} {scales}_scales", eight.replace(scales=scales)
