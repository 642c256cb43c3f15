"""Checks whether PALLAS_ATTN serves a variant's functions, for profiles too, where JAX may be absent."""

from __future__ import annotations

from polyattn.kernel import AttentionVariant, Pointwise, UntraceableError, untraceable
from polyattn.plugin import find_spec

TARGET = "Pallas' kernel"


def variant_problem(variant: AttentionVariant) -> str | None:
    """Say why a variant's functions can't be generated, or None.

    Only JAX's own trace tells which values the kernel needs for each score, so that without JAX this
    isn't checked.
    """
    problem = untraceable(variant, TARGET, "jax")
    if problem is not None or not variant.of_scores or find_spec("jax") is None:
        return problem
    from polyattn_tpu.pointwise import Functions

    try:
        _ = Functions.of_pointwise(Pointwise.of_variant(variant, "jax")).split
    except UntraceableError as error:
        return f"{error}, which isn't generated for {TARGET}"
    return None
