"""What generated functions call: torch's meaning of operations where jax.numpy's own is another.

All work on numbers; what calls them maps them over a step's queries and keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


class Given(NamedTuple):
    """An input: its elements, with padding behind in any dimension, and i32 [dimensions] its sizes."""

    values: Array
    sizes: Array


def load(source: Given, *indices: Array) -> Array:
    """An element: from the end if an index is negative, as torch counts; never outside."""
    at = []
    for dim, index in enumerate(indices):
        size = source.sizes[dim]
        index = jnp.where(index < 0, index + size, index)
        at.append(jnp.clip(index, 0, size - 1))
    return source.values[tuple(at)]


def floor_div(a: Array, b: Array) -> Array:
    """Quotient of integers, rounded down."""
    quotient, rest = lax.div(a, b), lax.rem(a, b)
    return jnp.where((rest != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


def floor_mod(a: Array, b: Array) -> Array:
    """Remainder of integers, with the divisor's sign."""
    rest = lax.rem(a, b)
    return jnp.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def log2(x: Array) -> Array:
    return jnp.log(x) * 1.4426950408889634


def sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(x)
