"""Which cases follow from a claim that bits don't depend on the batch, on steps or on the cache?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.case import Case
from polyattn.registry.capabilities import Capabilities
from polyattn.spec.kinds import GraphCapture, Invariance
from polyattn.spec.layer import LayerSpec

CLAIMS = {
    "batch_invariant": Invariance.BATCH,
    "step_invariant": Invariance.STEPS,
    "call_invariant": Invariance.CALLS,
}
"""The level of each feature."""
OTHERS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 21},
    "chunked": {"chunk_size": 24},
    "logit_soft_cap": {"logit_soft_cap": 1.5},
    "alibi": {"alibi": True},
    "learned_sinks": {"learned_sinks": True},
    "lse": {"needs_lse": True},
}
"""Features with which levels are tested."""
SPECIFIED: dict[str, dict[str, Any]] = {
    **{name: fields for name, fields in OTHERS.items() if name != "logit_soft_cap"},
    "sink_tokens": {"sliding_window": 21, "sink_tokens": 3, "learned_sinks": True},
    "non_causal": {"causal": False, "sliding_window": 300},
}
"""And those with which specified bits are."""
FUNCTIONS: dict[str, dict[str, Any]] = {
    "custom_mask": {"mask": "custom"},
    "block_sparse": {"mask": "block_sparse"},
    "variant": {"variant": "relative_bias"},
}
"""And with which the first one is: what a step's masks show comes with the step."""
CAPTURED = {"single_token_decode": "decode", "uniform": "three each"}
"""The steps that are captured, by what is claimed."""
CAPTURE_WORDS = ("captured", "captured_drafts", "captured_prompts")
"""What claims exclude of each kind of capture and those above it."""
_LATENTS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32", "needs_lse": True},
    {"dtype": "float16"},
    {"kv_cache_dtype": "int8"},
    {"num_heads": 5, "num_kv_heads": 5},
)
"""Other latent layers whose bits are compared."""


def level_of(caps: Capabilities) -> Invariance:
    """Return the highest level that is claimed."""
    return max((CLAIMS[name] for name in CLAIMS if name in caps.features), default=Invariance.NONE)


def derive(caps: Capabilities, base: LayerSpec, names: tuple[str, ...]) -> Iterator[Case]:
    """Yield an attention backend's cases. `base`: its plainest layer; `names`: its steps."""
    level = level_of(caps)
    if not level or not (base.cached and base.causal):
        return
    own = base.kv_cache_dtype == "auto"  # others round keys, which calls without a cache read whole
    if own and "machine_invariant" in caps.features:
        yield from _specified(caps, base.replace(dtype="float32", batch_invariant="machines"))
    most = "mixed" if "mixed" in names else next(n for n in ("chunked", "decode") if n in names)
    for label, spec in _layers(caps, base, Invariance.BATCH):
        yield Case("regrouped", label, spec, most)
    spec = base.replace(batch_invariant="batch")
    yield Case("regrouped", "", spec, "long" if "long" in names else "decode")
    capture = _captured(caps)
    if capture:
        batch = CAPTURED.get(capture.name.lower(), most)
        yield Case("planned_alike", "", spec.replace(graph_capture=capture), batch)
        if level > Invariance.BATCH:
            other = spec.replace(graph_capture=capture, batch_invariant="steps")
            yield Case("planned_alike", "steps", other, batch)
    if level < Invariance.STEPS:
        return
    for label, spec in _layers(caps, base, Invariance.STEPS):
        yield Case("chunked", label, spec, "short")
    spec = base.replace(batch_invariant="steps")
    for batch in ("short", "long"):
        yield Case("drafted", "", spec, batch)
        yield Case("hits", "", spec, batch)
    yield Case("chunked", "", spec, "long")
    if not own or level < Invariance.CALLS or False not in caps.cached:
        return
    for label, spec in _layers(caps, base, Invariance.CALLS):
        if not (spec.alibi or spec.learned_sinks):  # which each layer draws for itself
            yield Case("given_alike", label, spec, "short")
    yield Case("given_alike", "", base.replace(batch_invariant="calls"), "long")


def _specified(caps: Capabilities, spec: LayerSpec) -> Iterator[Case]:
    yield Case("specified", "", spec, "drawn")
    for name, fields in SPECIFIED.items():
        if name in caps.features:
            yield Case("specified", f"feature {name}", spec.replace(**fields), "drawn")
    for size in caps.head_sizes.examples((1, 40, 100, 256)):
        many = spec.replace(head_size=size, num_heads=15, num_kv_heads=3)
        yield Case("specified", f"head_size {size}", many, "drawn")
    for size in caps.block_sizes.examples((1, 24, 128)):
        yield Case("specified", f"block_size {size}", spec.replace(block_size=size), "drawn")
    if False in caps.cached:
        plain = spec.replace(cached=False, block_size=None, needs_lse="lse" in caps.features)
        yield Case("specified", "uncached", plain, "drawn")


def _captured(caps: Capabilities) -> GraphCapture:
    """Return the most that may be captured at a level."""
    most, asked = GraphCapture.NONE, {"batch_invariant"}
    for capture, word in zip(GraphCapture, ("", *CAPTURE_WORDS), strict=True):
        asked |= {word}
        if capture <= caps.graph_capture and not any(pair <= asked for pair, _ in caps.excludes):
            most = capture
    return most


def _layers(
    caps: Capabilities, base: LayerSpec, level: Invariance
) -> Iterator[tuple[str, LayerSpec]]:
    spec = base.replace(batch_invariant=level)
    yield "", spec
    for dtype in sorted(caps.dtypes & {"float32", "float16"} - {base.dtype}):
        yield f"dtype {dtype}", spec.replace(dtype=dtype)
    others = OTHERS | (FUNCTIONS if level == Invariance.BATCH else {})
    for name, fields in others.items():
        if name in caps.features:
            yield f"feature {name}", spec.replace(**fields)
    for ratio in caps.gqa_ratios.examples((1, 8)) if "gqa" in caps.features else ():
        yield f"gqa {ratio}", spec.replace(num_heads=2 * ratio, num_kv_heads=2)
    for stored in ("int8", "fp8_e5m2"):
        if stored in caps.kv_cache_dtypes and level < Invariance.CALLS:
            yield f"kv_cache_dtype {stored}", spec.replace(kv_cache_dtype=stored)


def of_others(caps: Capabilities, base: LayerSpec, label: str, batch: str) -> Iterator[Case]:
    """Yield the cases of a recurrence, or of an MLA layer; `batch`: a step of many kinds of rows."""
    level = level_of(caps)
    if not level:
        return
    yield Case("regrouped", label, base.replace(batch_invariant="batch"), batch)
    if base.latent is not None:
        for fields in _LATENTS:
            spec = base.replace(batch_invariant="batch", **fields)
            words = " ".join(f"{name} {value}" for name, value in fields.items())
            yield Case("regrouped", f"{label} {words}", spec, batch)
    capture = GraphCapture(min(caps.graph_capture, GraphCapture.UNIFORM))
    if base.kind.is_latent:
        capture = GraphCapture(min(capture, GraphCapture.SINGLE_TOKEN_DECODE))
    if capture:
        for each in Invariance.BATCH, level:
            spec = base.replace(batch_invariant=each, graph_capture=capture)
            yield Case(
                "planned_alike",
                f"{label} {each.name.lower()}",
                spec,
                CAPTURED[capture.name.lower()],
            )
    if level < Invariance.STEPS:
        return
    spec = base.replace(batch_invariant="steps")
    if base.kind.is_recurrent:
        yield Case("divided", label, spec, "none")
        return
    yield from (Case(name, label, spec, "short") for name in ("chunked", "drafted", "hits"))
    for fields in _LATENTS:
        words = " ".join(f"{name} {value}" for name, value in fields.items())
        yield Case("chunked", f"{label} {words}", spec.replace(**fields), "short")
