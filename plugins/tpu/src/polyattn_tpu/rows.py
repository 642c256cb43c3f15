"""Reads and writes a format's rows of bytes in JAX: its traced functions, on arrays.

A kernel captures no array: an iota gives places, and a chain of selects gives a table's entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from polyattn.kernel import RowFormat, Trace, UntraceableError, sizes_of, trace_encode, trace_rows

from polyattn_tpu.pointwise_ops import floor_div, floor_mod, log2, sigmoid

KINDS = {"float": jnp.float32, "int": jnp.int32, "bool": jnp.bool_}
TABLE = 256
"""Entries of a table that a byte may be looked up in."""
OPERATIONS: dict[str, Any] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "truediv": jnp.divide,
    "floordiv": floor_div, "mod": floor_mod, "minimum": jnp.minimum, "maximum": jnp.maximum,
    "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal, "eq": jnp.equal,
    "ne": jnp.not_equal, "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor,
    "shl": lax.shift_left, "shr": lax.shift_right_arithmetic, "where": jnp.where, "not": jnp.invert,
    "neg": jnp.negative, "abs": jnp.abs, "exp": jnp.exp, "exp2": jnp.exp2, "log": jnp.log, "log2": log2,
    "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "sin": jnp.sin, "cos": jnp.cos, "tanh": jnp.tanh,
    "sigmoid": sigmoid, "floor": jnp.floor, "ceil": jnp.ceil,
    "half": lambda x: lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.float16).astype(jnp.float32),
    "single": lambda x: lax.bitcast_convert_type(x, jnp.float32),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.int32),
}  # fmt: skip


def rows_problem(format: RowFormat) -> str | None:
    """Say why a format's rows can't be read, or None."""
    try:
        Rows(format, sizes_of(format)[-1]).trace()
    except UntraceableError as error:
        return f"{error}, which isn't generated for PALLAS_ATTN"
    return None


def latent_problem(format: RowFormat) -> str | None:
    """Say why rows can't be latents, whose first elements are values, or None."""
    if format.turn is not None:
        return "a row that is turned can't be cut to the value in it"
    return rows_problem(format)


@dataclass(frozen=True)
class Rows:
    """A format's rows of heads of `size` elements."""

    format: RowFormat
    size: int

    def trace(self) -> Trace:
        """Return what `decode` computes. Raises `UntraceableError`."""
        trace = trace_rows(self.format, self.size)
        if any(t.dim() != 1 or len(t) > TABLE for t in trace.constants.values()):
            raise UntraceableError(f"a table of more than {TABLE} entries")
        return trace

    def read(self, rows: Any, width: int) -> Any:
        """Return rows (keys, bytes), uint8, as float32 (keys, width): zeros behind the elements."""
        trace, wide = self.trace(), rows.astype(jnp.int32)
        shape = (rows.shape[0], width)
        place = jnp.minimum(lax.broadcasted_iota(jnp.int32, shape, 1), self.size - 1)

        def loaded(node: Any, at: Any) -> Any:
            if node.what == "row":
                index = jnp.broadcast_to(at, shape)
                return jnp.take_along_axis(wide, index, 1, mode="promise_in_bounds")
            vector: Any = jnp.zeros(shape, KINDS[node.kind])
            for entry, value in enumerate(trace.constants[node.what].tolist()):
                vector = jnp.where(at == entry, value, vector)
            return vector

        values = _run(trace, {"place": lambda node: place, "load": loaded})
        assert trace.score is not None
        elements = jnp.broadcast_to(values[trace.score], shape)
        inside = lax.broadcasted_iota(jnp.int32, shape, 1) < self.size
        return jnp.where(inside, elements, 0.0)

    def written(self, values: Any) -> Any:
        """Return values (tokens, heads, size), over their scale, as bytes (tokens, heads, bytes)."""
        trace = trace_encode(self.format, self.size)
        width = trace.width(self.size)

        def padded(array: Any) -> Any:
            missing = width - array.shape[-1]
            return jnp.pad(array, (*((0, 0),) * (array.ndim - 1), (0, missing)))

        values = _run(
            trace,
            {
                "element": lambda node: padded(values.astype(jnp.float32)),
                "vector": lambda node: padded(jnp.asarray(node.what, KINDS[node.kind])),
                "gather": lambda node, x: padded(
                    jnp.broadcast_to(x, (*x.shape[:-1], width))[..., jnp.asarray(node.what)]
                ),
            },
            lax.optimization_barrier,
        )
        return values[trace.score][..., : trace.length].astype(jnp.uint8)


def _run(trace: Trace, own: dict[str, Any], apart: Any = lambda args: args) -> list[Any]:
    """Compute a trace's operations; `own`: the operations that aren't elementwise, by node.

    `apart` hides an operation's inputs from XLA. XLA would turn `x + c - c`, which rounds, into `x`, and
    division by a constant into a product.
    """
    values: list[Any] = []
    for node in trace.nodes:
        args = [values[i] for i in node.args]
        if node.op in own:
            vector = own[node.op](node, *args)
        elif node.op == "constant":
            vector = jnp.asarray(node.what, KINDS[node.kind]).reshape(1)
        elif node.op.startswith("to_"):
            vector = args[0]
        else:
            kinds = {trace.nodes[i].kind for i in node.args}
            most = next(kind for kind in ("float", "int", "bool") if kind in kinds)
            if node.op == "where":
                args = [args[0].astype(jnp.bool_), *(a.astype(KINDS[node.kind]) for a in args[1:])]
            elif node.op not in ("half", "single", "bits"):
                args = [a.astype(KINDS["float" if node.op == "truediv" else most]) for a in args]
            vector = OPERATIONS[node.op](*apart(jnp.broadcast_arrays(*args)))
        values.append(vector.astype(KINDS[node.kind]))
    return values
