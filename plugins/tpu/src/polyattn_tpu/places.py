"""The positions of a step's queries and keys, as arrays in a pytree, for functions of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax

Array = Any
T = TypeVar("T")


def pytree(*static: str) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as a pytree. The fields named here are static."""

    def decorate(cls: type[T]) -> type[T]:
        arrays = [field.name for field in fields(cls) if field.name not in static]  # type: ignore[arg-type]
        return jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=list(static))

    return decorate


@pytree("longest")
@dataclass(frozen=True, eq=False)
class Places:
    """The positions of queries and keys, for a layer with functions of scores (`polyattn_tpu.pointwise`).

    `b`, `q` i32 (tokens,): a token's sequence in the batch, and its place in it; `step_b`, `step_low` i32
    (steps,): likewise for each step of keys that the kernel takes, and the place of its first key;
    `first_step` i32 (seqs,): a sequence's first step; `longest`: steps of the longest sequence, or more.
    """

    b: Array
    q: Array
    step_b: Array
    step_low: Array
    first_step: Array
    longest: int
