"""Which attention variants exist? Core's, plugins' and those registered in this process."""

from __future__ import annotations

from polyattn.errors import PluginError, SpecError, nearest
from polyattn.registry.discovery import changed, discover
from polyattn.registry.info import load_object
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import AttentionKind, GraphCapture
from polyattn.spec.layer import LayerSpec
from polyattn.spec.variant import FUNCTIONS, AttentionVariant

_registered: dict[str, AttentionVariant] = {}


def register_variant(variant: AttentionVariant) -> AttentionVariant:
    """Make a variant known to this process. Returns it.

    Args:
        variant: its name, functions and inputs.

    Raises:
        PluginError: the name is taken.
        SpecError: a function couples requests.

    Examples:
        >>> def tripled(score, b, h, q_idx, kv_idx):
        ...     return 3 * score
        >>> variant = register_variant(AttentionVariant(name="tripled", score_mod=tripled))
        >>> LayerSpec(num_heads=8, head_size=64, variant="tripled").variant
        'tripled'
        >>> unregister_variant("tripled")

    """
    if type(variant) is not AttentionVariant:
        raise PluginError(f"register_variant takes an AttentionVariant, not {variant!r}")
    if variant.name in variants():
        raise PluginError(
            f"a variant named {variant.name!r} is registered already; choose another name, or "
            f"unregister_variant({variant.name!r}) first"
        )
    if any(callable(getattr(variant, name)) for name in FUNCTIONS):  # callers resolve paths
        load_object("polyattn.runtime.functions.coupling:check_coupling")(variant)
    _registered[variant.name] = variant
    changed()
    return variant


def unregister_variant(name: str) -> None:
    """Forget a variant that `register_variant` made known.

    Args:
        name: the variant's.

    Raises:
        PluginError: no such variant was registered.

    Examples:
        >>> unregister_variant("tripled")
        Traceback (most recent call last):
        polyattn.errors.PluginError: no variant named 'tripled' was registered...

    """
    if _registered.pop(name, None) is None:
        raise PluginError(f"no variant named {name!r} was registered{nearest(name, _registered)}")
    changed()


def variants() -> dict[str, AttentionVariant]:
    """Return every variant that is known, by name.

    Examples:
        >>> "flash_sigmoid" in variants()
        True

    """
    return discover().variants | _registered


def variant_named(name: str) -> AttentionVariant:
    """Return a variant by name. Raises `SpecError` with the existing names."""
    known = variants()
    if name not in known:
        raise SpecError(
            f"variant={name!r} is not registered{nearest(name, known)} "
            "(polyattn.register_variant adds one)"
        )
    return known[name]


def variant_of(spec: LayerSpec) -> AttentionVariant | None:
    """Return a layer's variant. Raises `SpecError` if it is unknown or the layer can't have it."""
    if spec.variant is None:
        return None
    variant = variant_named(spec.variant)
    linear = spec.kind is AttentionKind.PHI_LINEAR
    if linear != (variant.feature_mod is not None):
        raise SpecError(
            f"kind={spec.kind.value!r} and variant={variant.name!r} don't go together: a variant of "
            "kind='phi_linear' has a feature_mod, a variant of attention has none"
        )
    if not variant.softmax and (spec.learned_sinks or spec.needs_lse):
        field = "learned_sinks" if spec.learned_sinks else "needs_lse"
        raise SpecError(
            f"{field}=True and variant={variant.name!r}, which has no softmax, don't go together; leave "
            f"{field} out"
        )
    if variant.transforms:
        _check_transforms(spec, variant)
    return variant


def _check_transforms(spec: LayerSpec, variant: AttentionVariant) -> None:
    """Queries, keys and outputs are changed by torch's operators, at places that a plan computes."""
    capture = "none" if spec.graph_capture is GraphCapture.NONE else str(spec.graph_capture)
    for field, value, plain in (
        ("graph_capture", capture, "none"),
        ("qkv_dtype", spec.qkv_dtype, "auto"),
        ("out_dtype", spec.out_dtype, "auto"),
        ("length_bounds", spec.length_bounds, False),
    ):
        if value != plain:
            raise SpecError(
                f"{field}={value!r} and variant={variant.name!r}, which transforms queries, keys, values "
                f"or outputs, don't go together; leave {field} out"
            )


def kernel_spec(spec: LayerSpec) -> LayerSpec:
    """Return the spec for attention kernels, without the work before and after them.

    Queries and keys arrive normed, rotated and transformed, so a variant that only does that is
    dropped. Raises `SpecError`.
    """
    variant = variant_of(spec)
    if variant is not None and not (variant.of_scores or variant.feature_mod):
        spec = spec.replace(variant=None)
    return unrotated(spec)
