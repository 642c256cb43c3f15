"""Which cases follow where a decode reads shared blocks once? Forests of runs, and layers over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.case import Case, caches, captures, stored_as
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities
from polyattn.spec.kinds import DTYPES, Role
from polyattn.spec.layer import LayerSpec
from polyattn.workload.steps import FORESTS

RATIOS = (1, 4, 7, 8)
FEATURES: dict[str, dict[str, Any]] = {
    "learned_sinks": {"learned_sinks": True},
    "logit_soft_cap": {"logit_soft_cap": 1.5},
    "lse": {"needs_lse": True},
}
SHARED: dict[str, dict[str, Any]] = {
    "alibi": {"alibi": True},
    "sliding_window": {"sliding_window": 70},
}
"""What a launch may serve beside plain decodes; a window that ends among the shared blocks."""


def derive(caps: Capabilities, base: LayerSpec, device: Device) -> Iterator[Case]:
    """Yield the cases of a claim of `shared_prefix`; `base`: the plainest layer."""
    if not caps.shared_prefix or base.role is not Role.DECODER or not (base.cached and base.causal):
        return
    wide = next((r for r in sorted(RATIOS, reverse=True) if r in caps.gqa_ratios), 1)
    for name in FORESTS:
        spec = base
        if name == "many rows" and "gqa" in caps.features:
            spec = base.replace(num_heads=wide * base.num_kv_heads)
        yield Case("forest", "", spec, name)
    for label, spec in _variants(caps, base):
        yield Case("forest", label, spec, "levels")
    for label in sorted(SHARED.keys() & caps.shared_features):
        spec = base.replace(**SHARED[label])
        yield Case("forest", label, spec, "levels")
        yield Case("forest", label, spec, "many rows")
    if "appends" in caps.shared_features:
        for name in FORESTS:
            yield Case("forest", "appends", base, f"{name}, appends")
        both = SHARED.keys() & caps.shared_features
        for label, spec in (
            *_variants(caps, base),
            *((n, base.replace(**SHARED[n])) for n in sorted(both)),
        ):
            yield Case("forest", f"appends, {label}", spec, "levels, appends")
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
    for stored in caches(caps, base, every=False):
        eight = base.replace(**stored_as(caps, stored))
        yield stored, eight
        if "learned_sinks" in caps.features:
            yield f"{stored} learned_sinks", eight.replace(learned_sinks=True)
        for scales in ("tensor", "head"):
            if f"{scales}_scales" in caps.features:
                yield f"{stored} {scales}_scales", eight.replace(scales=scales)
