"""What does a row format's `encode` compute? Torch records it on one row, as operations on vectors.

Shapes and places in a row are known, so what only moves elements (groups, pairs, a concatenation)
becomes one operation: `gather`, of entries at constant places. The others are `tracing`'s.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from polyattn.errors import describe
from polyattn.runtime.cache.bits import half, single
from polyattn.runtime.cache.rows import EXTREMES, function_of
from polyattn.runtime.functions.tracing import BOOL, FLOAT, INT, Trace, UntraceableError
from polyattn.spec.row_format import RowFormat

Places = NDArray[np.int64]
ROUNDS = 12582912.0
"""1.5 * 2^23: float32's last place is 1 there, so a sum is rounded to integers, halves to even."""
SMALL_FLOATS = {
    torch.float16: (10, 15, 0x7C00, 0x7E00),
    torch.bfloat16: (7, 127, 0x7F80, 0x7FC0),
    torch.float8_e4m3fn: (3, 7, 0x7F, 0x7F),
}
"""Bits of the mantissa, the exponent's bias, the code of overflow, and that of NaN."""
_ALONE = {
    "abs": "abs", "neg": "neg", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "floor": "floor", "ceil": "ceil", "bitwise_not": "not",
    "logical_not": "not",
}  # fmt: skip
_PAIRS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "minimum": "minimum",
    "maximum": "maximum", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "logical_and": "and",
    "logical_or": "or", "__and__": "and", "__or__": "or", "__xor__": "xor", "__lshift__": "shl",
    "__rshift__": "shr", "floor_divide": "floordiv", "remainder": "mod",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr",
}  # fmt: skip
_MOVES = frozenset(
    {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "slice", "expand", "permute",
     "transpose", "unbind", "split", "flip", "alias"}
)  # fmt: skip
_COPIES = frozenset({"clone", "detach", "lift_fresh_copy", "contiguous"})


def trace_encode(format: RowFormat, size: int) -> Trace:
    """Return the operations of a format's `encode`, after its `turn`, on rows of `size` elements.

    Args:
        format: the format.
        size: elements of a row.

    Returns:
        The operations, each on whole vectors: `"element"` is the row, float32; `"vector"` a constant one,
        whose entries are its `what`; `"gather"` has its operand's entries at the places of its `what`;
        `"bits"` reads a float32 as an integer. `score` is the row's bytes, integers.

    Raises:
        UntraceableError: `encode` does what no operation is for, or decides by a traced value.

    Examples:
        >>> from polyattn import row_formats
        >>> trace = trace_encode(row_formats()["int4"], 32)
        >>> "gather" in {node.op for node in trace.nodes}
        True

    """
    encode = function_of(format, "encode")
    turn = None if format.turn is None else function_of(format, "turn")

    def function(row: Tensor) -> Tensor:
        codes: Tensor = encode(row if turn is None else turn(row, False))
        return codes

    try:
        graph = make_fx(function)(torch.ones(size, dtype=torch.float32, device="cpu")).graph
    except Exception as error:
        raise UntraceableError(f"encode can't be traced by torch: {describe(error)}") from error
    trace = _Reader().read(graph, size)
    extremes = torch.tensor(EXTREMES, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(4, size, generator=generator, dtype=torch.float32, device="cpu")
    for row in torch.cat([extremes[:, None].expand(-1, size), sample]):
        if not torch.equal(replayed(trace, row), function(row)):
            raise UntraceableError("encode, whose traced operations write other bytes")
    return trace


def replayed(trace: Trace, row: Tensor) -> Tensor:
    """Return the bytes that a traced `encode` makes of a row.

    Args:
        trace: `trace_encode`'s.
        row: float32 (size,).

    """
    width, values = trace.width(len(row)), list[Tensor]()
    for node in trace.nodes:
        args = [values[i] for i in node.args]
        dtype = {FLOAT: torch.float32, INT: torch.int32, BOOL: torch.bool}[node.kind]
        if node.op == "element":
            vector = torch.nn.functional.pad(row, (0, width - len(row)))
        elif node.op == "constant":
            vector = torch.full((width,), node.what, dtype=dtype, device="cpu")
        elif node.op == "vector":
            vector = torch.nn.functional.pad(
                torch.tensor(node.what, dtype=dtype, device="cpu"), (0, width - len(node.what))
            )
        elif node.op == "gather":
            vector = torch.nn.functional.pad(args[0][list(node.what)], (0, width - len(node.what)))
        elif node.op.startswith("to_"):
            vector = args[0]
        else:
            vector = _TORCH[node.op](*args)
        values.append(vector.to(dtype))
    assert trace.score is not None
    return values[trace.score][: trace.length].to(torch.uint8)


_TORCH: dict[str, Any] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div,
    "floordiv": torch.floor_divide, "mod": torch.remainder, "minimum": torch.minimum,
    "maximum": torch.maximum, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "eq": torch.eq, "ne": torch.ne, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "where": torch.where, "not": torch.bitwise_not, "half": half, "single": single,
    "bits": lambda x: x.view(torch.int32), **{
        name: getattr(torch, name)
        for name in ("neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "floor", "ceil")
    },
}  # fmt: skip


@dataclass(frozen=True)
class _Array:
    """A tensor: entries `at` of a node's vector, in its shape."""

    node: int
    at: Places
    dtype: torch.dtype


class _Reader:
    """Reads a graph of torch's operators into a trace."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.values: dict[Any, Any] = {}

    def read(self, graph: torch.fx.Graph, size: int) -> Trace:
        for node in graph.nodes:
            if node.op == "placeholder":
                at = np.arange(size)
                self.values[node] = _Array(self.trace.add("element", kind=FLOAT), at, torch.float32)
            elif node.op == "get_attr":
                self.values[node] = getattr(graph.owning_module, node.target)
            elif node.op == "output":
                array = self._of(node.args[0])
                self.trace.score = self._vector(array, array.at.shape, INT)
                self.trace.length = array.at.size
            else:
                self.values[node] = array = self._value(node)
                if _changes(node):
                    self.values[node.args[0]] = array
        return self.trace

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._of, value))
        return value

    def _value(self, node: torch.fx.Node) -> Any:
        args, kwargs = self._of(node.args), {k: self._of(v) for k, v in node.kwargs.items()}
        if node.target is operator.getitem:
            return args[0][args[1]]
        target: Any = node.target
        arrays = [a for a in args if isinstance(a, _Array)]
        arrays += [
            a
            for each in args
            if isinstance(each, (list, tuple))
            for a in each
            if isinstance(a, _Array)
        ]
        if not arrays:
            return target(*args, **kwargs)  # what no element has a part in
        name = _name(target)
        dtype = getattr(node.meta.get("val"), "dtype", arrays[0].dtype)
        if name in _MOVES and not (name == "view" and isinstance(args[1], torch.dtype)):
            return self._moved(target, args, kwargs)
        if name in _COPIES:
            return args[0]
        if name == "copy":
            return self._converted(args[1], args[0].dtype)
        if name in ("_to_copy", "to"):
            return self._converted(args[0], kwargs.get("dtype") or args[0].dtype)
        if name in ("ones_like", "zeros_like", "full_like"):
            fill = {"ones_like": 1, "zeros_like": 0}.get(name)
            fill = args[1] if fill is None else fill
            return torch.full(args[0].at.shape, fill, dtype=dtype, device="cpu")
        method = getattr(self, f"_{name.strip('_')}", None)
        if name in _ALONE or name in _PAIRS or method is not None:
            wide = dtype.is_floating_point and dtype != torch.float32
            if wide and name != "view" and (name, dtype) != ("sqrt", torch.float64):
                raise UntraceableError(f"operation {name!r} in {dtype}")
        if method is not None:
            return method(*args, **kwargs)
        op = _ALONE.get(name) or _PAIRS.get(name)
        if op is None or kwargs:
            raise UntraceableError(
                f"operation {name!r} with {kwargs}" if op else f"operation {name!r}"
            )
        return self._each(op, args, dtype)

    def _moved(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Apply an operator's effect on elements to the places."""
        source = args[0]
        places = target(torch.from_numpy(source.at), *args[1:], **kwargs)
        if isinstance(places, Tensor):
            return _Array(source.node, places.numpy(), source.dtype)
        return tuple(_Array(source.node, p.numpy(), source.dtype) for p in places)

    def _constant(self, value: Any, shape: tuple[int, ...], kind: str) -> int:
        entries = np.broadcast_to(np.asarray(value), shape).reshape(-1)
        python_type = {FLOAT: float, INT: int, BOOL: bool}[kind]
        # In float32, as torch treats a number beside a float32 tensor.
        entries = entries.astype(np.float32) if kind == FLOAT else entries
        if len(entries) and ((entries == entries[0]).all() or (entries != entries).all()):
            return self.trace.add("constant", what=python_type(entries[0]), kind=kind)
        return self.trace.add("vector", what=tuple(map(python_type, entries)), kind=kind)

    def _vector(self, value: Any, shape: tuple[int, ...], kind: str) -> int:
        """Return the number of a vector of a tensor's elements, or a number's, in order."""
        if not isinstance(value, _Array):
            value = value.numpy() if isinstance(value, Tensor) else value
            return self._constant(value, shape, kind)
        at = np.broadcast_to(value.at, shape).reshape(-1)
        source = value.node
        if not (at == np.arange(len(at))).all():
            source = self.trace.add(
                "gather", (source,), tuple(at.tolist()), self.trace.nodes[source].kind
            )
        return self._as(source, kind)

    def _as(self, node: int, kind: str) -> int:
        if self.trace.nodes[node].kind == kind:
            return node
        return self.trace.add(f"to_{kind}", (node,), kind=kind)

    def _made(self, node: int, shape: tuple[int, ...], dtype: torch.dtype) -> _Array:
        count = int(np.prod(shape, dtype=np.int64))
        return _Array(node, np.arange(count).reshape(shape), dtype)

    def _each(self, op: str, args: Sequence[Any], dtype: torch.dtype) -> _Array:
        """Write an operation on each element."""
        shape = np.broadcast_shapes(*(_shape(a) for a in args))
        kinds = [_kind(a) for a in args]
        most = next(kind for kind in (FLOAT, INT, BOOL) if kind in kinds)
        if op == "truediv":
            most = FLOAT
        parts = [self._vector(a, shape, most) for a in args]
        return self._wrapped(self._made(self.trace.add(op, tuple(parts)), shape, dtype))

    def _wrapped(self, array: _Array) -> _Array:
        """Mask integers of eight bits to their low eight bits."""
        node = self._as(array.node, _kind_of(array.dtype))
        if array.dtype in (torch.uint8, torch.int8):
            node = self._op("and", node, 255)
        if array.dtype == torch.int8:
            node = self._op("sub", self._op("xor", node, 128), 128)
        return _Array(node, array.at, array.dtype)

    def _op(self, op: str, *args: int | float, kind: str = INT) -> int:
        """Write an operation of nodes; after the first, numbers that aren't `_node`s are constants."""
        first, *rest = args
        nodes = [int(first)]
        for each in rest:
            if not isinstance(each, _Node):
                number = float(each) if kind == FLOAT else int(each)
                each = self.trace.add("constant", what=number, kind=kind)
            nodes.append(int(each))
        return _Node(self.trace.add(op, tuple(nodes)))

    def _converted(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, _Array):
            if isinstance(value, Tensor):
                return value.to(dtype)
            return torch.tensor(value, dtype=dtype, device="cpu")
        if dtype == value.dtype:
            return value
        if {dtype, value.dtype} == {torch.float32, torch.float64}:
            # A trace's root is rounded once, as this one's is.
            return _Array(value.node, value.at, dtype)
        if torch.float64 in (dtype, value.dtype):
            raise UntraceableError(f"a conversion of {value.dtype} to {dtype}")
        if dtype in SMALL_FLOATS:
            node = self._as(value.node, FLOAT)
            return _Array(self._float_of(self._code(node, dtype), dtype), value.at, dtype)
        if dtype.is_floating_point and dtype != torch.float32:
            raise UntraceableError(f"a conversion to {dtype}")
        return self._wrapped(_Array(value.node, value.at, dtype))

    def _code(self, node: int, dtype: torch.dtype) -> int:
        """Write the bits of the nearest number of a smaller float's; halves to even."""
        mantissa, bias, top, nan = SMALL_FLOATS[dtype]
        drop = 23 - mantissa
        bits = _Node(self.trace.add("bits", (node,), kind=INT))
        size = self._op("and", bits, 0x7FFFFFFF)
        odd = self._op("and", self._op("shr", size, drop), 1)
        more = self._op("add", self._op("add", size, (1 << (drop - 1)) - 1), _Node(odd))
        code = self._op("sub", self._op("shr", more, drop), (127 - bias) << mantissa)
        if bias < 127:  # below the smallest normal number the step is the same
            a = _Node(self.trace.add("abs", (node,)))
            normal = 2.0 ** (1 - bias)
            raised = self._op("add", a, normal * 2.0**drop, kind=FLOAT)
            low = self._op(
                "and", self.trace.add("bits", (raised,), kind=INT), (1 << (mantissa + 1)) - 1
            )
            code = self._choose(self._op("lt", a, normal, kind=FLOAT), low, code)
        none = self.trace.add("constant", what=nan, kind=INT)
        code = self._choose(
            self.trace.add("ne", (node, node)), none, self._op("minimum", code, top)
        )
        width = 8 * dtype.itemsize
        sign = self._op("and", self._op("shr", bits, 32 - width), 1 << (width - 1))
        return self._op("or", code, _Node(sign))

    def _choose(self, test: int, yes: int, no: int) -> int:
        return _Node(self.trace.add("where", (test, yes, no)))

    def _float_of(self, code: int, dtype: torch.dtype) -> int:
        """Write the number that such bits stand for."""
        if dtype == torch.float16:
            return self.trace.add("half", (code,))
        if dtype == torch.bfloat16:
            return self.trace.add("single", (self._op("shl", code, 16),))
        low = self._op("shl", self._op("and", code, 127), 7)
        bits = self._op("or", low, _Node(self._op("shl", self._op("and", code, 128), 8)))
        value = self._op("mul", self.trace.add("half", (bits,)), 256.0, kind=FLOAT)
        none = self._op("eq", self._op("and", code, 127), 127)
        nan = self.trace.add("constant", what=float("nan"), kind=FLOAT)
        return self._choose(none, nan, value)

    def _view(self, value: _Array, dtype: torch.dtype) -> _Array:
        """Write elements' bits, read as another dtype."""
        vector = self._vector(value, value.at.shape, _kind(value))
        size, each = value.dtype, dtype.itemsize
        if dtype == torch.float32 and size in (torch.int32, torch.uint32):
            return self._made(self.trace.add("single", (vector,)), value.at.shape, dtype)
        if size == torch.float32:
            vector = self.trace.add("bits", (vector,), kind=INT)
        elif size in SMALL_FLOATS:
            vector = self._code(vector, size)
        elif size.is_floating_point:
            raise UntraceableError(f"a view of {size}")
        if each == size.itemsize:
            return self._wrapped(self._made(vector, value.at.shape, dtype))
        if dtype != torch.uint8:
            raise UntraceableError(f"a view of {size} as {dtype}")
        shape, count = value.at.shape, size.itemsize
        wide = _Array(vector, np.repeat(np.arange(value.at.size), count), torch.int32)
        by = 8 * np.tile(np.arange(count), value.at.size)
        shifts = self._each("shr", (wide, torch.from_numpy(by)), dtype)
        return _Array(shifts.node, shifts.at.reshape(*shape[:-1], -1), dtype)

    def _amax(self, value: _Array, dims: Sequence[int] = (), keepdim: bool = False) -> _Array:
        return self._reduced("maximum", value, dims, keepdim)

    def _amin(self, value: _Array, dims: Sequence[int] = (), keepdim: bool = False) -> _Array:
        return self._reduced("minimum", value, dims, keepdim)

    def _sum(self, value: _Array, dims: Sequence[int], keepdim: bool = False, **_: Any) -> _Array:
        if value.dtype.is_floating_point:
            raise UntraceableError("operation 'sum' of floats, whose order is torch's own")
        return self._reduced("add", value, dims, keepdim)

    def _reduced(self, op: str, value: _Array, dims: Sequence[int], keepdim: bool) -> _Array:
        """Write a reduction: combine one half with the other, until one element is left."""
        axes = [d % value.at.ndim for d in (dims or range(value.at.ndim))]
        rest = [d for d in range(value.at.ndim) if d not in axes]
        at = value.at.transpose(*rest, *axes).reshape(*(value.at.shape[d] for d in rest), -1)
        left = _Array(value.node, at, value.dtype)
        while (count := left.at.shape[-1]) > 1:
            half = -(-count // 2)
            first, second = left.at[..., :half], left.at[..., half:]
            other: Any
            if count % 2 and op == "add":
                zero = _Array(
                    self.trace.add("constant", what=0, kind=INT), first[..., :1] * 0, value.dtype
                )
                other = self._cat([_Array(left.node, second, value.dtype), zero], -1)
            else:  # one of them twice, where they are odd
                other = _Array(left.node, left.at[..., count - half :], value.dtype)
            left = self._each(op, (_Array(left.node, first, value.dtype), other), value.dtype)
        shape = [1 if d in axes else n for d, n in enumerate(value.at.shape)]
        places = left.at.reshape(shape if keepdim else [value.at.shape[d] for d in rest])
        return _Array(left.node, places, value.dtype)

    def _cat(self, parts: Sequence[Any], dim: int = 0) -> Any:
        if all(isinstance(p, _Array) and p.node == parts[0].node for p in parts):
            return _Array(parts[0].node, np.concatenate([p.at for p in parts], dim), parts[0].dtype)
        kind = _kind(next(p for p in parts if isinstance(p, _Array)))
        dtype = next(p.dtype for p in parts if isinstance(p, _Array))
        own = np.concatenate([np.full(_shape(p), i) for i, p in enumerate(parts)], dim)
        whole = None
        for i, part in enumerate(parts):
            spread: list[Any]
            if isinstance(part, _Array):
                spread = [
                    part.at if i == j else np.zeros(_shape(p), np.int64)
                    for j, p in enumerate(parts)
                ]
                one = self._vector(
                    _Array(part.node, np.concatenate(spread, dim), dtype), own.shape, kind
                )
            else:
                spread = [
                    part.numpy() if i == j else np.zeros(_shape(p)) for j, p in enumerate(parts)
                ]
                one = self._constant(np.concatenate(spread, dim), own.shape, kind)
            if whole is None:
                whole = one
                continue
            whole = self._choose(self._constant(own == i, own.shape, BOOL), one, whole)
        assert whole is not None
        return self._made(whole, own.shape, dtype)

    def _stack(self, parts: Sequence[Any], dim: int = 0) -> Any:
        dim %= len(_shape(parts[0])) + 1
        wide = []
        for part in parts:
            if isinstance(part, _Array):
                wide.append(_Array(part.node, np.expand_dims(part.at, dim), part.dtype))
            else:
                wide.append(part.unsqueeze(dim))
        return self._cat(wide, dim)

    def _clamp(self, value: _Array, low: Any = None, high: Any = None) -> _Array:
        for op, bound in (("maximum", low), ("minimum", high)):
            if bound is not None:
                value = self._each(op, (value, bound), value.dtype)
        return value

    _clamp_min = _clamp

    def _clamp_max(self, value: _Array, high: Any) -> _Array:
        return self._clamp(value, None, high)

    def _round(self, value: _Array, **_: Any) -> _Array:
        x = _Node(self._as(value.node, FLOAT))
        near = self._op("sub", self._op("add", x, ROUNDS, kind=FLOAT), ROUNDS, kind=FLOAT)
        small = self._op("lt", self.trace.add("abs", (x,)), 2.0**22, kind=FLOAT)
        return _Array(self._choose(small, near, x), value.at, value.dtype)

    def _where(self, test: Any, yes: Any, no: Any) -> _Array:
        shape = np.broadcast_shapes(*(_shape(a) for a in (test, yes, no)))
        kind = next(k for k in (FLOAT, INT, BOOL) if k in (_kind(yes), _kind(no)))
        dtype = torch.result_type(_like(yes), _like(no))
        parts = (
            self._vector(test, shape, BOOL),
            self._vector(yes, shape, kind),
            self._vector(no, shape, kind),
        )
        return self._made(self._choose(*parts), shape, dtype)

    def _signbit(self, value: _Array) -> _Array:
        bits = self.trace.add("bits", (value.node,), kind=INT)
        return _Array(self._op("lt", bits, 0), value.at, torch.bool)

    def _isnan(self, value: _Array) -> _Array:
        return _Array(self.trace.add("ne", (value.node, value.node)), value.at, torch.bool)

    def _pow(self, value: _Array, power: Any) -> _Array:
        if power != 2:
            raise UntraceableError("operation 'pow' whose exponent isn't 2")
        return self._each("mul", (value, value), value.dtype)

    def _nan_to_num(
        self, value: _Array, nan: Any = None, high: Any = None, low: Any = None
    ) -> _Array:
        most = torch.finfo(torch.float32).max
        is_nan = self._isnan(value)
        number = self._clamp(value, -most if low is None else low, most if high is None else high)
        return self._where(is_nan, float(nan or 0.0), number)

    def _bucketize(self, value: _Array, bounds: Tensor, *, right: bool = False, **_: Any) -> _Array:
        """Write how many bounds don't lie above; for NaN that is all of them, as in torch."""
        op = "lt" if right else "le"
        tests = [self._each(op, (value, float(b)), torch.bool) for b in bounds]
        ones = [_Array(self._as(t.node, INT), t.at, torch.int64) for t in tests]
        above = reduce(lambda a, b: self._each("add", (a, b), torch.int64), ones)
        return self._each("sub", (len(bounds), above), torch.int64)


def _changes(node: torch.fx.Node) -> bool:
    """Whether an operation writes into its first operand, which then must not be shared."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    source: Any = node.args[0]
    if _name(source.target) in _MOVES or any(_name(user.target) in _MOVES for user in source.users):
        raise UntraceableError(f"operation {_name(node.target)!r} into part of a tensor")
    return True


def _name(target: Any) -> str:
    """Return an operator's name, the same where it writes into its operand."""
    packet = getattr(target, "overloadpacket", None)
    name = str(getattr(packet or target, "__name__", target))
    if name in ("__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"):
        return name.replace("__i", "__")
    return name if name.endswith("__") else name.removesuffix("_")


class _Node(int):
    """A node's number, apart from a number that an operation takes."""


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, _Array):
        return value.at.shape
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _like(value: Any) -> Any:
    if not isinstance(value, _Array):
        return value
    return torch.empty((1,) * len(_shape(value)), dtype=value.dtype, device="cpu")


def _kind_of(dtype: torch.dtype) -> str:
    return BOOL if dtype is torch.bool else FLOAT if dtype.is_floating_point else INT


def _kind(value: Any) -> str:
    if isinstance(value, (_Array, Tensor)):
        return _kind_of(value.dtype)
    return {bool: BOOL, int: INT, float: FLOAT}[type(value)]
