"""What does a function of scores compute? torch.fx traces it into a few plain operations.

A generator writes each operation in its own language. Operations outside of `OPERATIONS`, and control
flow on traced values, are refused by name.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from polyattn.errors import BatchError, PolyattnError, describe
from polyattn.runtime.cache.bits import half, single
from polyattn.runtime.cache.rows import function_of
from polyattn.runtime.functions.pointwise import INPUT_DTYPES, Function, Pointwise
from polyattn.runtime.functions.pointwise import function_of as function_of_variant
from polyattn.runtime.parameters import Weight
from polyattn.spec.row_format import RowFormat
from polyattn.spec.variant import AttentionVariant, VariantInput

PLACES = ("score", "b", "h", "q_idx", "kv_idx")
FLOAT, INT, BOOL = "float", "int", "bool"
_KINDS = {"float32": FLOAT, "int32": INT, "int64": INT, "bool": BOOL}

OPERATIONS = {
    "add": 2, "sub": 2, "mul": 2, "truediv": 2, "floordiv": 2, "mod": 2, "minimum": 2, "maximum": 2,
    "lt": 2, "le": 2, "gt": 2, "ge": 2, "eq": 2, "ne": 2, "and": 2, "or": 2, "xor": 2, "where": 3,
    "not": 1, "neg": 1, "abs": 1, "exp": 1, "exp2": 1, "log": 1, "log2": 1, "sqrt": 1, "rsqrt": 1,
    "sin": 1, "cos": 1, "tanh": 1, "sigmoid": 1, "floor": 1, "ceil": 1, "to_float": 1, "to_int": 1,
    "to_bool": 1,
}  # fmt: skip
"""What a generator must know, with the numbers of operands; beside these: places, constants, `load`
(an input at indices), `size` (of an input's dimension) and `written` (a call of a source by hand)."""
OF_BYTES = {"shl": 2, "shr": 2, "half": 1, "single": 1}
"""Operations of a format of rows alone: shifts, and 16 or 32 bits read as a float."""
_TO_BOOL = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "to_bool"})
_LOGIC = frozenset({"and", "or", "xor", "not"})
_TO_FLOAT = frozenset(
    {"truediv", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid",
     "to_float", "half", "single"}
)  # fmt: skip


OF_PLACES: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide,
    "floordiv": np.floor_divide, "mod": np.mod, "minimum": np.minimum, "maximum": np.maximum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "where": np.where, "neg": np.negative,
    "not": np.invert, "abs": np.abs, "to_int": lambda x: np.asarray(x).astype(np.int64),
    "to_float": lambda x: np.asarray(x).astype(np.float64), "to_bool": lambda x: np.asarray(x) != 0,
}  # fmt: skip
"""Operations on elements' places, which are computed before a kernel runs."""


def _kind_of(place: str) -> str:
    return FLOAT if place == "score" else INT


class UntraceableError(PolyattnError):
    """A function can't be generated; the message names the operation.

    Examples:
        >>> trace(Function(lambda score, b, h, q, k: score.cumsum(0), ()), (), {})
        Traceback (most recent call last):
        polyattn.runtime.functions.tracing.UntraceableError: ...

    """


@dataclass(frozen=True)
class Node:
    """One operation: its name, its operands' numbers in the trace, and its result's kind.

    `what`: a constant's value, a place's or an input's name, a size's (name, dimension), a call's
    (function, names of inputs).
    """

    op: str
    args: tuple[int, ...] = ()
    kind: str = FLOAT
    what: Any = None


@dataclass
class Trace:
    """Functions as operations, each after its operands.

    Attributes:
        nodes: the operations.
        inputs: what is loaded, by name.
        constants: the tensors that a function has captured, by name.
        score: the number of the new score's operation; None: scores stay.
        mask: the number of the mask's operation; None: there is no mask.
        written: the hand-written source that calls are of, or None.
        length: of a traced `encode`, the bytes of its row.

    Examples:
        >>> doubled = Function(lambda score, b, h, q_idx, kv_idx: score * 2, ())
        >>> found = trace(doubled, (), {})
        >>> found.nodes[found.score].op, found.mask
        ('to_float', None)

    """

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, VariantInput] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    score: int | None = None
    mask: int | None = None
    written: str | None = None
    length: int = 0
    _known: dict[Any, int] = field(default_factory=dict)

    def add(self, op: str, args: tuple[int, ...] = (), what: Any = None, kind: str = "") -> int:
        """Return the number of an operation's result; equal operations share one.

        Args:
            op: the operation's name.
            args: the numbers of its operands.
            what: a constant, a name or a dtype that it needs.
            kind: of the result: `"float"`, `"int"` or `"bool"`; `""`: it follows from the operands.

        """
        kind = kind or self._kind(op, args)
        key = (op, args, type(what), what, kind)
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(Node(op, args, kind, what))
        return self._known[key]

    def width(self, size: int) -> int:
        """Return how many entries the longest vector of a traced `encode` has.

        Args:
            size: elements of a row.

        """
        return max([size, *(len(n.what) for n in self.nodes if n.op in ("gather", "vector"))])

    def _kind(self, op: str, args: tuple[int, ...]) -> str:
        if op in _TO_BOOL:
            return BOOL
        if op in _TO_FLOAT:
            return FLOAT
        kinds = {self.nodes[a].kind for a in (args[1:] if op == "where" else args)}
        kind_of_all = next(kind for kind in (FLOAT, INT, BOOL) if kind in kinds)
        if op in _LOGIC:
            if kind_of_all == FLOAT:
                raise UntraceableError(f"operation {op!r} of floats")
            return kind_of_all
        if op in ("floor", "ceil", "to_int"):
            return INT if op == "to_int" or kind_of_all != FLOAT else FLOAT
        counts = kind_of_all == BOOL and op not in ("where", "minimum", "maximum")
        return INT if counts else kind_of_all

    def addresses(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return each input's address, then the size and stride of each of its dimensions.

        Args:
            tensors: the inputs by name.

        Raises:
            BatchError: an input is empty.

        """
        rows = []
        for name, declared in self.inputs.items():
            tensor = tensors[name]
            if not tensor.numel():
                raise BatchError(
                    f"input {name!r} ({declared}) is empty; it must have an element at least"
                )
            rows.append(tensor.data_ptr())
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                rows += [size, stride]
        return rows

    def by_place(self, places: Any) -> list[Any]:
        """Return each operation's result for these places, or None if it needs more inputs.

        Args:
            places: integers, a numpy array.

        """
        values: list[Any] = []
        for node in self.nodes:
            args = [values[i] for i in node.args]
            if node.op == "place":
                values.append(places)
            elif node.op == "constant":
                values.append(np.full(len(places), node.what))
            elif node.op in OF_PLACES and all(a is not None for a in args):
                values.append(OF_PLACES[node.op](*args))
            else:
                values.append(None)
        return values

    def captured(self, device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Return a function of nothing, which returns the tensors that the functions close over.

        They are in their declared dtypes, and at the same addresses at each call, as they are then.

        Args:
            device: where they go.

        """
        weights = {
            name: Weight(name, tensor, device, INPUT_DTYPES[self.inputs[name].dtype])
            for name, tensor in self.constants.items()
        }
        return lambda: {name: weight.current() for name, weight in weights.items()}

    def function(self, function: Function, inputs: dict[str, VariantInput], places: int) -> int:
        """Return the number of a function's result, whose operations are added.

        Args:
            function: the function.
            inputs: the variant's inputs by name.
            places: how many of `PLACES`, from the last, are its arguments.

        """
        wanted = PLACES[len(PLACES) - places :]
        if function.source is None:
            return _Reader(self, inputs).read(function, wanted)
        self.written = function.source
        self.inputs |= {name: inputs[name] for name in function.names}
        args = tuple(self.add("place", what=name, kind=_kind_of(name)) for name in wanted)
        kind = FLOAT if function.which == "score_mod" else BOOL
        return self.add("written", args, (function.which, function.names), kind)


def trace(
    score_mod: Function | None, mask_mods: tuple[Function, ...], inputs: dict[str, VariantInput]
) -> Trace:
    """Return the operations of a layer's functions, traced together by torch.fx.

    Args:
        score_mod: the function of scores, or None.
        mask_mods: the functions of masks, all of which must hold.
        inputs: what the functions read, by name.

    Returns:
        The operations; `score` and `mask` say which are the results.

    Raises:
        UntraceableError: a function does what no operation is for, or decides by a traced value.

    Examples:
        >>> def causal(b, h, q_idx, kv_idx):
        ...     return q_idx >= kv_idx
        >>> found = trace(None, (Function(causal, ()),), {})
        >>> [node.op for node in found.nodes][-2:], found.mask == len(found.nodes) - 1
        (['ge', 'to_bool'], True)

    """
    operations = Trace()
    if score_mod is not None:
        result = operations.function(score_mod, inputs, 5)
        operations.score = operations.add("to_float", (result,))
    for function in mask_mods:
        mask = operations.add("to_bool", (operations.function(function, inputs, 4),))
        operations.mask = (
            mask if operations.mask is None else operations.add("and", (operations.mask, mask))
        )
    return operations


def trace_features(feature_mod: Callable[[Tensor], Tensor]) -> Trace:
    """Return the operations of a variant's `feature_mod` on one element.

    Args:
        feature_mod: the function, as `polyattn.kernel.feature_mod` returns it.

    Returns:
        The operations; `score` says which is the result, and the place `"score"` is the element.

    Raises:
        UntraceableError: the function does what no operation is for, or reads a tensor.

    Examples:
        >>> [node.op for node in trace_features(lambda x: x * x).nodes]
        ['place', 'mul', 'to_float']

    """
    operations = Trace()
    result = _Reader(operations, {}).read(Function(feature_mod, ()), PLACES[:1])
    operations.score = operations.add("to_float", (result,))
    if operations.inputs or operations.constants:
        raise UntraceableError("feature_mod reads a tensor beside its argument")
    return operations


def trace_rows(format: RowFormat, size: int) -> Trace:
    """Return the operations of a format's `decode`, traced by torch.fx.

    Args:
        format: the format.
        size: elements of a row.

    Returns:
        The operations: `score` is the element, the place `"d"` which one, and a `load` of `"row"` a
        byte, an integer.

    Raises:
        UntraceableError: `decode` does what no operation is for, or decides by a traced value.

    Examples:
        >>> from polyattn import row_formats
        >>> found = trace_rows(row_formats()["int4"], 32)
        >>> sorted({node.what for node in found.nodes if node.op == "load"})
        ['row']

    """
    decode = function_of(format, "decode")
    function = Function(lambda d, *, row: decode(row, d, size), ("row",))
    operations = Trace()
    reader = _Reader(operations, {"row": VariantInput("int32", ("*",))}, OPERATIONS | OF_BYTES)
    result = reader.read(function, ("d",))
    operations.score = operations.add("to_float", (result,))
    return operations


class _Reader:
    """Reads one function's torch.fx graph into a trace."""

    def __init__(
        self,
        trace: Trace,
        inputs: dict[str, VariantInput],
        operations: Mapping[str, int] = OPERATIONS,
    ):
        self.trace, self.declared, self.operations = trace, inputs, operations
        self.values: dict[fx.Node, Any] = {}

    def read(self, function: Function, places: tuple[str, ...]) -> int:
        tracer = fx.Tracer()
        tracer.root, tracer.tensor_attrs = nn.Module(), {}
        tracer.graph = fx.Graph(tracer_cls=fx.Tracer)

        def proxy(name: str) -> fx.Proxy:
            return tracer.create_proxy("placeholder", name, (), {})

        try:
            proxies = [proxy(name) for name in places]
            result = function.call(*proxies, **{name: proxy(name) for name in function.names})
            tracer.graph.output(tracer.create_arg(result))
        except PolyattnError:
            raise
        except Exception as error:
            name = getattr(function.call, "__name__", "the function")
            raise UntraceableError(
                f"{name} can't be traced by torch.fx: {describe(error)}"
            ) from error
        for node in tracer.graph.nodes:
            if node.op == "output":
                return self.number(node.args[0])
            self.values[node] = self._value(node, tracer.root)
        raise AssertionError("a graph ends with its output")

    def _value(self, node: fx.Node, root: nn.Module) -> Any:
        if node.op == "placeholder":
            name = str(node.target)
            if name in (*PLACES, "d") and name not in self.declared:
                return self.trace.add("place", what=name, kind=_kind_of(name))
            return _Input(name, self.declared[name])
        if node.op == "get_attr":
            return self._captured(getattr(root, str(node.target)))
        target = node.target
        if node.op == "call_method":
            target = _METHODS.get(str(target), target)
        known = _TARGETS.get(target)
        name = getattr(target, "__name__", str(target))
        if known is None or (known in OF_BYTES and known not in self.operations):
            raise UntraceableError(f"operation {name!r}")
        args = tuple(self._operand(a) for a in node.args)
        kwargs = {k: self._operand(v) for k, v in node.kwargs.items()}
        count = self.operations.get(known)
        if count is not None and (kwargs or len(args) != count):
            raise UntraceableError(f"operation {name!r} with {len(args)} operands and {kwargs}")
        if count is not None:
            return self.trace.add(known, tuple(map(self.number, args)))
        return getattr(self, f"_{known}")(*args, **kwargs)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (tuple, list)):
            return tuple(map(self._operand, value))
        return _Number(value) if isinstance(value, (bool, int, float)) else value

    def number(self, value: Any) -> int:
        """Return the number of an operand's node."""
        if isinstance(value, fx.Node):
            value = self.values[value]
        if isinstance(value, int):
            return value
        if isinstance(value, (_Number, bool, float)):
            plain = value.value if isinstance(value, _Number) else value
            kind = {bool: BOOL, int: INT, float: FLOAT}[type(plain)]
            return self.trace.add("constant", what=plain, kind=kind)
        if isinstance(value, _Input):
            return int(self._getitem(value, ()))
        raise UntraceableError(f"a value of type {type(value).__name__}")

    def _captured(self, tensor: Tensor) -> Any:
        """A tensor of the function's surroundings is an input whose value is known."""
        for name, known in self.trace.constants.items():
            if known is tensor:
                return _Input(name, self.trace.inputs[name])
        kind = "float32" if tensor.is_floating_point() else "bool"
        if not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            kind = "int64"
        declared = VariantInput(kind, tuple(tensor.shape))
        name = f"captured_{len(self.trace.constants)}"
        self.trace.constants[name], self.trace.inputs[name] = tensor, declared
        return _Input(name, declared)

    def _getitem(self, source: Any, index: Any) -> Any:
        if isinstance(source, tuple):  # a shape
            return source[index.value]
        if not isinstance(source, _Input):
            raise UntraceableError("operation 'getitem' of what is no input")
        indices = index if isinstance(index, tuple) else (index,)
        dims = source.declared.dims
        if len(indices) != len(dims):
            raise UntraceableError(
                f"input {source.name!r} ({source.declared}) with {len(indices)} indices, not one a "
                "dimension"
            )
        args = tuple(map(self.number, indices))
        for at in args:
            if self.trace.nodes[at].kind != INT:
                raise UntraceableError(
                    f"input {source.name!r} indexed by a {self.trace.nodes[at].kind}"
                )
        self.trace.inputs[source.name] = source.declared
        return self.trace.add("load", args, source.name, _KINDS[source.declared.dtype])

    def _getattr(self, source: Any, name: str) -> Any:
        if not isinstance(source, _Input) or name != "shape":
            raise UntraceableError(f"attribute {name!r}")
        self.trace.inputs[source.name] = source.declared
        return tuple(
            self.trace.add("size", what=(source.name, d), kind=INT)
            for d in range(len(source.declared.dims))
        )

    def _size(self, source: Any, dim: _Number | None = None) -> Any:
        shape = self._getattr(source, "shape")
        return shape if dim is None else shape[dim.value]

    def _clamp(self, value: Any, min: Any = None, max: Any = None) -> int:
        node = self.number(value)
        for op, bound in (("maximum", min), ("minimum", max)):
            if bound is not None:
                node = self.trace.add(op, (node, self.number(bound)))
        return node

    def _relu(self, value: Any) -> int:
        return self._clamp(value, min=_Number(0))

    def _square(self, value: Any) -> int:
        return self.trace.add("mul", (self.number(value),) * 2)

    def _pow(self, value: Any, exponent: Any) -> int:
        power = exponent.value if isinstance(exponent, _Number) else None
        base = self.number(value)
        if power == 0.5:
            return self.trace.add("sqrt", (base,))
        if type(power) is not int or not 1 <= power <= 8:
            raise UntraceableError("operation 'pow' whose exponent is no number of 1 to 8, nor 0.5")
        node = base
        for _ in range(power - 1):
            node = self.trace.add("mul", (node, base))
        return node

    def _reciprocal(self, value: Any) -> int:
        return self.trace.add("truediv", (self.number(_Number(1.0)), self.number(value)))

    def _div(self, a: Any, b: Any, rounding_mode: str | None = None) -> int:
        op = {None: "truediv", "floor": "floordiv"}.get(rounding_mode)
        if op is None:
            raise UntraceableError(f"operation 'div' with rounding_mode={rounding_mode!r}")
        return self.trace.add(op, (self.number(a), self.number(b)))

    def _to(self, value: Any, dtype: Any) -> int:
        if not isinstance(dtype, torch.dtype):
            raise UntraceableError(f"operation 'to' of {type(dtype).__name__}")
        op = "to_float" if dtype.is_floating_point else "to_int"
        return self.trace.add("to_bool" if dtype is torch.bool else op, (self.number(value),))

    def _same(self, value: Any, **_: Any) -> int:
        return self.number(value)

    def _full_like(self, value: Any, filled: Any, **_: Any) -> int:
        return self.number(filled)


@dataclass(frozen=True)
class _Number:
    """A number of Python's, apart from the number of a node."""

    value: bool | int | float


@dataclass(frozen=True)
class _Input:
    name: str
    declared: VariantInput


def _targets() -> dict[Any, str]:
    names: dict[Any, str] = {}
    pairs: dict[str, tuple[Any, ...]] = {
        "add": (operator.add, torch.add), "sub": (operator.sub, torch.sub),
        "mul": (operator.mul, torch.mul), "truediv": (operator.truediv, torch.true_divide),
        "div": (torch.div,), "floordiv": (operator.floordiv, torch.floor_divide),
        "mod": (operator.mod, torch.remainder), "minimum": (torch.minimum,),
        "maximum": (torch.maximum,), "lt": (operator.lt, torch.lt), "le": (operator.le, torch.le),
        "gt": (operator.gt, torch.gt), "ge": (operator.ge, torch.ge), "eq": (operator.eq, torch.eq),
        "ne": (operator.ne, torch.ne), "where": (torch.where,), "neg": (operator.neg, torch.neg),
        "and": (operator.and_, torch.logical_and, torch.bitwise_and),
        "or": (operator.or_, torch.logical_or, torch.bitwise_or),
        "xor": (operator.xor, torch.logical_xor, torch.bitwise_xor),
        "not": (operator.invert, torch.logical_not, torch.bitwise_not),
        "abs": (operator.abs, torch.abs, abs), "pow": (operator.pow, torch.pow),
        "getitem": (operator.getitem,), "getattr": (getattr,), "clamp": (torch.clamp,),
        "relu": (torch.relu, nn.functional.relu), "square": (torch.square,),
        "sigmoid": (torch.sigmoid, nn.functional.sigmoid), "tanh": (torch.tanh,),
        "reciprocal": (torch.reciprocal,), "full_like": (torch.full_like,),
        "to_bool": (), "same": (), "shl": (operator.lshift, torch.bitwise_left_shift),
        "shr": (operator.rshift, torch.bitwise_right_shift), "half": (half,), "single": (single,),
    }  # fmt: skip
    plain = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil")
    for name in plain:
        pairs[name] = (getattr(torch, name),)
    for name, targets in pairs.items():
        names.update(dict.fromkeys(targets, name))
    return names


_TARGETS: dict[Any, str] = _targets()
_NAMED = (
    "add", "sub", "mul", "true_divide", "div", "remainder", "lt", "le", "gt", "ge", "eq", "ne",
    "neg", "abs", "pow", "clamp", "relu", "square", "sigmoid", "tanh", "exp", "exp2", "log", "log2",
    "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "logical_and", "logical_or", "logical_not",
    "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "minimum", "maximum", "reciprocal",
    "floor_divide",
)  # fmt: skip
_METHODS: dict[str, Any] = {name: getattr(torch, name) for name in _NAMED} | {
    "__getitem__": operator.getitem, "size": "size", "to": "to", "float": "to_float",
    "int": "to_int", "long": "to_int", "bool": "to_bool", "contiguous": "same",
}  # fmt: skip
_TARGETS |= {name: name for name in ("size", "to", "to_float", "to_int", "to_bool", "same")}


def untraceable(variant: AttentionVariant, target: str, language: str = "") -> str | None:
    """Return why a variant's functions can't be generated for a target, in words for people, or None.

    Args:
        variant: the variant.
        target: what they would be generated for, as the message names it ("Triton").
        language: a language of sources written by hand, which need no tracing; default: none.

    Raises:
        SpecError: a function of the variant can't be loaded.

    Examples:
        >>> variant = AttentionVariant(name="odd", score_mod=lambda score, b, h, q, k: score.cumsum(0))
        >>> untraceable(variant, "Triton")
        "...cumsum..., which isn't generated for Triton"

    """
    if (problem := written_problem(variant, language)) is not None:
        return problem
    pointwise = Pointwise.of_variant(variant, language)
    try:
        trace(pointwise.score_mod, pointwise.mask_mods, pointwise.inputs)
        if (features := function_of_variant(variant, "feature_mod")) is not None:
            trace_features(features.call)
    except UntraceableError as error:
        return f"{error}, which isn't generated for {target}"
    return None


def written_problem(variant: AttentionVariant, language: str) -> str | None:
    """Return what a variant lacks for a source in a language, in words for people, or None.

    Raises `SpecError` if its file can't be read.
    """
    text = variant.source(language)
    if text is None:
        return None
    label = f"sources[{language!r}]"
    if language == "cuda":
        defined = set(re.findall(r"\b(\w+)\s*\([^;{}]*\)\s*\{", text))
    else:
        try:
            body = ast.parse(text).body
        except SyntaxError as error:
            return f"{label}, line {error.lineno}: {error.msg}"
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    wanted = [name for name in ("score_mod", "mask_mod") if getattr(variant, name) is not None]
    missing = [name for name in wanted if name not in defined]
    return f"{label} defines no {' and no '.join(missing)}" if missing else None


def reciprocal(trace: Trace, number: int) -> float | None:
    """Return the factor by which a generator multiplies instead of dividing a score by a constant.

    A quotient of positions stays a division: 49 times 1 / 49 is less than 1, and would round to 0.

    Args:
        trace: the functions' operations.
        number: the operation's number in the trace.

    Returns:
        1 / divisor, or None where the operation isn't such a division.

    Examples:
        >>> def halved(score, b, h, q_idx, kv_idx):
        ...     return score / 2.0
        >>> found = trace(Function(halved, ()), (), {})
        >>> [reciprocal(found, n) for n, node in enumerate(found.nodes) if node.op == "truediv"]
        [0.5]

    """
    node = trace.nodes[number]
    if node.op != "truediv" or trace.nodes[node.args[1]].op != "constant":
        return None
    divisor = float(trace.nodes[node.args[1]].what)
    return 1 / divisor if 1e-30 < abs(divisor) < 1e30 and _of_score(trace, number) else None


def _of_score(trace: Trace, number: int) -> bool:
    """Whether a value depends on the score."""
    known, waiting = {number}, [number]
    while waiting:
        node = trace.nodes[waiting.pop()]
        if (node.op, node.what) == ("place", "score"):
            return True
        waiting += set(node.args) - known
        known |= set(node.args)
    return False
