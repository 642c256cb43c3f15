"""Which cases follow from the claims of functions of scores, and of masks that a step brings?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.case import Case
from polyattn.registry.info import BackendInfo, load_object
from polyattn.registry.variants import register_variant, variant_of, variants
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.variant import AttentionVariant
from polyattn.workload.steps import PAGES

_HOME = "polyattn.conformance.transforms"
TRANSFORMS = AttentionVariant(
    name="conformance_transforms",
    query_mod=f"{_HOME}:of_query",
    key_mod=f"{_HOME}:of_key",
    value_mod=f"{_HOME}:of_value",
    output_mod=f"{_HOME}:of_output",
    inputs={"turned": "int32[num_heads]"},
    summary="the conformance kit's transforms",
)

FEATURES = AttentionVariant(
    name="conformance_features",
    feature_mod=f"{_HOME}:of_features",
    summary="the conformance kit's map of linear attention's features",
)

FUNCTIONS: dict[str, dict[str, Any]] = {
    "relative bias": {"variant": "relative_bias"},
    "vision local": {"variant": "vision_local", "causal": False},
    "sigmoid": {"variant": "flash_sigmoid"},
    "custom": {"mask": "custom"},
    "block sparse": {"mask": "block_sparse"},
    "custom, non causal": {"mask": "custom", "causal": False},
    "bias beside a mask": {"variant": "relative_bias", "mask": "custom"},
}
"""What sets functions and masks on the base spec: each of core's variants, each kind of mask, both."""
BESIDE: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 21},
    "soft cap": {"logit_soft_cap": 1.5},
    "alibi": {"alibi": True},
    "lse": {"needs_lse": True},
}
"""Features of the spec's own that come before."""


def functions() -> dict[str, dict[str, Any]]:
    """Return what sets functions and masks, by label: `FUNCTIONS`, and whatever is written by hand."""
    written = {name: {"variant": name} for name, v in variants().items() if v.sources}
    return FUNCTIONS | written


def derive(info: BackendInfo, base: LayerSpec, names: tuple[str, ...]) -> Iterator[Case]:
    """Yield the cases of what is claimed, over these batches; `base` is the plainest layer."""
    if base.role is Role.CROSS:
        return
    where = base.role.value if base.cached else f"{base.role.value} uncached"
    for label, fields in functions().items():
        spec = base.replace(**fields)
        if refused(info, spec) is None:
            for name in names:
                yield Case("functions", f"{where} {label}", spec, name)
    if "variant" in info.capabilities.features:
        spec = base.replace(variant=registered(TRANSFORMS))
        yield Case("functions", f"{where} transforms", spec, names[0])
    spec = base.replace(mask="block_sparse")
    if base.role is Role.DECODER and base.cached and refused(info, spec) is None:
        for name in names:  # which kernels may read alone
            yield Case("functions", f"{where} block sparse", spec, name, PAGES)
    if base.role is Role.DECODER and base.cached:
        spec = base.replace(variant="relative_bias", mask="block_sparse")
        for label, fields in BESIDE.items():
            if refused(info, spec) is None:
                yield Case("functions", f"{where} {label}", spec.replace(**fields), names[0])


def registered(variant: AttentionVariant) -> str:
    """Return the name of one of the kit's variants, which is registered by then."""
    if variant.name not in variants():
        register_variant(variant)
    return variant.name


def refusals(info: BackendInfo, base: LayerSpec) -> Iterator[Case]:
    """Yield a case for each variant that the backend's own check refuses."""
    for label, fields in functions().items():
        spec = base.replace(**fields)
        if base.role is not Role.CROSS and refused(info, spec) is not None:
            yield Case("refusal", label, spec, "none")


def refused(info: BackendInfo, spec: LayerSpec) -> str | None:
    """Say why a backend can't serve a layer's variant, or None."""
    variant = variant_of(spec)
    if variant is None or info.variant_check is None:
        return None
    problem: str | None = load_object(info.variant_check)(variant)
    return problem
