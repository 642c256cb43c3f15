"""Splits a function: operations on a score, or on query and key together, run in the kernel.

A TPU's kernel can't look an input up at an index for each score. So XLA computes before the kernel what
depends only on a query or only on a key, and every lookup for pairs of them. The kernel takes these
values and does the rest. The split works on JAX's trace of a function of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from polyattn.kernel import UntraceableError

Array = Any
PLACES = ("score", "b", "h", "q_idx", "kv_idx")
ROW, KEY, PAIR = "row", "key", "pair"
"""What a value of the kernel's inputs belongs to: a query's head, a sequence's key, or both."""
CALLED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


@dataclass(frozen=True)
class Op:
    """An operation of JAX's: its operands' and results' numbers."""

    primitive: Any
    params: dict[str, Any]
    args: tuple[int, ...]
    outs: tuple[int, ...]


class Split:
    """A function `(score, b, h, q_idx, kv_idx, inputs) -> results`, taken apart.

    `results`: values by number, None where the function returned None; `taken`: what the kernel takes,
    by number, with ROW, KEY or PAIR. Raises `UntraceableError`.
    """

    def __init__(self, function: Callable[..., Any], inputs: Any):
        number, whole = (jax.ShapeDtypeStruct((), kind) for kind in (jnp.float32, jnp.int32))
        tree: Any
        leaves, tree = jax.tree.flatten(inputs)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        made: list[Any] = []

        def flat(*args: Any) -> Any:
            made[:] = function(*args[:5], tree.unflatten(args[5:]))
            return [r for r in made if r is not None]

        closed = jax.make_jaxpr(flat)(number, *(whole,) * 4, *shapes)
        self.ops: list[Op] = []
        self.shapes: list[tuple[int, ...]] = []
        self.depends: list[frozenset[str]] = []
        self.known: dict[int, Any] = {}
        numbers = [self._new(var.aval.shape) for var in closed.jaxpr.invars]
        for at, place in enumerate(PLACES):
            self.depends[numbers[at]] = frozenset({place})
        self.numbers = numbers
        outs = iter(self._read(closed.jaxpr, closed.consts, numbers))
        self.results = [None if r is None else next(outs) for r in made]
        self.maker = {out: op for op in self.ops for out in op.outs}
        self.taken = self._taken()

    def _new(self, shape: tuple[int, ...], depends: frozenset[str] = frozenset()) -> int:
        self.shapes.append(shape)
        self.depends.append(depends)
        return len(self.shapes) - 1

    def _constant(self, value: Any, dtype: Any) -> int:
        number = self._new(np.shape(value))
        self.known[number] = np.asarray(value, dtype)
        return number

    def _read(self, jaxpr: Any, consts: Any, inputs: list[int]) -> list[int]:
        """Add a JAX function's operations, with those of the functions it calls; return its results."""
        numbers: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = self._constant(value, var.aval.dtype)

        def of(var: Any) -> int:
            known = isinstance(var, Literal)
            return self._constant(var.val, var.aval.dtype) if known else numbers[var]

        for eqn in jaxpr.eqns:
            args = tuple(map(of, eqn.invars))
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if eqn.primitive.name in CALLED and inner is not None:
                outs = tuple(self._read(inner.jaxpr, inner.consts, list(args)))
            else:
                depends = frozenset[str]().union(*(self.depends[a] for a in args))
                outs = tuple(self._new(v.aval.shape, depends) for v in eqn.outvars)
                self.ops.append(Op(eqn.primitive, eqn.params, args, outs))
            numbers |= zip(eqn.outvars, outs, strict=True)
        return [of(var) for var in jaxpr.outvars]

    def _kind(self, number: int) -> str | None:
        """Return ROW, KEY or PAIR of a value that XLA computes, or None for the kernel's own."""
        depends = self.depends[number]
        if depends <= {"b", "h", "q_idx"}:
            return ROW
        if depends <= {"b", "kv_idx"}:
            return KEY
        op = self.maker.get(number)
        if op is None or not any(self.shapes[n] for n in (*op.args, *op.outs)):
            return None
        if "score" in depends:
            raise UntraceableError("an input at an index that depends on the score")
        return PAIR

    def _taken(self) -> dict[int, str]:
        axes: dict[int, str] = {}
        seen = set[int]()
        stack = [r for r in self.results if r is not None]
        while stack:
            number = stack.pop()
            if number in seen or number in self.known or number in self._native:
                continue
            seen.add(number)
            kind = self._kind(number)
            if kind is not None:
                axes[number] = kind
            else:
                stack += self.maker[number].args
        return axes

    @property
    def _native(self) -> tuple[int, ...]:
        """The kernel's own values: a score, and the positions of its query and its key."""
        return self.numbers[0], self.numbers[3], self.numbers[4]

    def of(self, kind: str) -> list[int]:
        """Return the values of a kind that the kernel takes."""
        return sorted(number for number, mine in self.taken.items() if mine == kind)

    def outside(self, kind: str, inputs: Any) -> Callable[..., list[Array]]:
        """Return a function of numbers (b, h, q_idx, kv_idx) that computes a kind's values."""
        leaves = jax.tree.leaves(inputs)

        def values(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> list[Array]:
            there = dict(zip(self.numbers, (None, b, h, q_idx, kv_idx, *leaves), strict=True))
            return self._run(self.of(kind), there | self.known)

        return values

    def inside(
        self, score: Array, q_idx: Array, kv_idx: Array, taken: dict[int, Array]
    ) -> list[Array | None]:
        """Return the results for a tile of scores; all arrays are of its shape."""
        there = dict(zip(self._native, (score, q_idx, kv_idx), strict=True)) | taken
        for number, value in self.known.items():
            if number not in there and not self.shapes[number]:
                there[number] = jnp.full(score.shape, value.item(), value.dtype)
        values = iter(self._run([r for r in self.results if r is not None], there))
        return [None if r is None else next(values) for r in self.results]

    def _run(self, wanted: list[int], there: dict[int, Array]) -> list[Array]:
        """Evaluate what these values need that isn't there."""
        needed, stack = set[int](), list(wanted)
        while stack:
            number = stack.pop()
            if number not in there and number not in needed:
                needed.add(number)
                stack += self.maker[number].args
        for op in self.ops:
            if needed.intersection(op.outs):
                operands = [there[a] for a in op.args]
                made = op.primitive.bind(*operands, **op.params)
                made = made if op.primitive.multiple_results else [made]
                there |= zip(op.outs, made, strict=True)
        return [there[number] for number in wanted]
