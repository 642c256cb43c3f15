"""Which layers have a level of `batch_invariant`?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.errors import SpecError
from polyattn.spec.kinds import AttentionKind, Invariance

SPECIFIED = {
    "kind": AttentionKind.ATTENTION,
    "dtype": "float32",
    "qkv_dtype": "auto",
    "out_dtype": "auto",
    "logit_soft_cap": None,
    "qk_norm": None,
    "rope": None,
    "variant": None,
    "mask": None,
}
"""The fields that `batch_invariant="machines"` requires. Only their bits are specified."""


def check_invariance(fields: Mapping[str, Any]) -> None:
    """Raise `SpecError` if a layer's own computation depends on something that its bits must not."""
    level = fields["batch_invariant"]
    if level < Invariance.STEPS:
        return
    name, rope, cached = level.name.lower(), fields["rope"], fields["kv_cache_dtype"]
    if fields["dense_context"]:
        raise SpecError(
            f"batch_invariant={name!r}: dense_context=True shows a prompt other keys when it comes in "
            "one step; drop one, or ask for batch_invariant='batch'"
        )
    if rope is not None and rope.by_length:
        raise SpecError(
            f"batch_invariant={name!r}: rope.scaling={rope.scaling!r} rotates a token by its "
            "sequence's length at that step; ask for batch_invariant='batch'"
        )
    if level >= Invariance.CALLS and cached != "auto":
        raise SpecError(
            f"batch_invariant={name!r}: a cache of {cached} rounds keys that a call without "
            "one reads as they are; use kv_cache_dtype='auto', or ask for batch_invariant='steps'"
        )
    for field, value in SPECIFIED.items() if level >= Invariance.MACHINES else ():
        if fields[field] != value:
            raise SpecError(
                f"batch_invariant={name!r}: bits are specified for {field}={value!r}, not for "
                f"{fields[field]!r}; ask for batch_invariant='calls'"
            )
