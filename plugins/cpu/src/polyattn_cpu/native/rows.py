"""Translates a row format's traced `decode` into the native kernels' steps.

Four bits and eight with their scales are read in registers, told by the format's name.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from polyattn.kernel import (
    RowFormat,
    Trace,
    UntraceableError,
    decoded,
    sizes_of,
    trace_encode,
    trace_rows,
)

OPS = (
    "byte", "look_up", "to_float", "to_int", "half", "where", "and", "or", "xor", "shl", "shr",
    "add_int", "sub_int", "mul_int", "div_int", "mod_int", "min_int", "max_int", "lt_int", "le_int",
    "eq_int", "add", "sub", "mul", "div", "min", "max", "lt", "le", "eq", "exp", "exp2", "log",
    "log2", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "element", "gather",
)  # fmt: skip
"""`pa_row_op`, in its order."""
TRACED, INT8, E4M3, CODES = range(4)
HALVES, STEPS, E4M3S, POWERS, NORM = range(5)
BY_HAND = {
    "int8_rows": (INT8, 0, 0),
    "e4m3_rows": (E4M3, 0, 0),
    "int4": (CODES, HALVES, 32),
    "kivi4": (CODES, STEPS, 32),
    "nvfp4": (CODES, E4M3S, 16),
    "mxfp4": (CODES, POWERS, 32),
    "turboquant4": (CODES, NORM, 0),
}
"""`pa_row_format`'s form, scale and group of core's formats, version 1."""
COLUMNS = 16
"""A register's elements are padded to a multiple of these."""

_PAIRS = {
    "add": "add", "sub": "sub", "mul": "mul", "minimum": "min", "maximum": "max", "lt": "lt", "le": "le",
    "eq": "eq", "gt": "lt", "ge": "le", "ne": "eq",
}  # fmt: skip
_INTS = {
    "and": "and", "or": "or", "xor": "xor", "shl": "shl", "shr": "shr", "floordiv": "div_int",
    "mod": "mod_int",
}  # fmt: skip
_ALONE = frozenset({"exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "tanh", "floor", "ceil"})
_FORMAT = struct.Struct("@9if3P")


@dataclass(frozen=True)
class Program:
    """`pa_row_format`, and the memory that it points to."""

    address: int
    held: tuple[Any, ...]


def rows_problem(format: RowFormat) -> str | None:
    """Return why the native kernels can't read a format's rows, or None."""
    if _by_hand(format):
        return None
    try:
        _Steps(trace_rows(format, size := sizes_of(format)[-1]), size, format.row_bytes(size))
    except UntraceableError as error:
        return f"{error}, which the native kernels have no step for"
    return None


def latent_problem(format: RowFormat) -> str | None:
    """Return why rows can't be latents, whose first elements are values, or None."""
    if format.turn is not None:
        return "a row that is turned can't be cut to the value in it"
    return rows_problem(format)


def _by_hand(format: RowFormat) -> tuple[int, int, int] | None:
    return BY_HAND.get(format.name) if format.version == 1 else None


@cache
def program(format: RowFormat, size: int) -> Program:
    """Return a format's rows of `size` elements as the library takes them.

    Raises `UntraceableError`.
    """
    steps, registers, constants, result, table = [], 0, np.zeros((0, 0), np.int32), 0, None
    form, scale, group = _by_hand(format) or (TRACED, 0, 0)
    if form == TRACED:
        program = _Steps(trace_rows(format, size), size, format.row_bytes(size))
        steps, registers, result = program.steps, program.registers, program.result
        constants, table = program.constants, program.table
    elif form == CODES:
        table = _levels(format).view(np.int32)
    packed = np.array(steps, np.int32).reshape(-1, 6)
    table = np.zeros(1, np.int32) if table is None else table
    text = _FORMAT.pack(
        form, scale, group or size, format.row_bytes(size), size, len(packed), registers, len(constants),
        result, size**-0.5, packed.ctypes.data, constants.ctypes.data, table.ctypes.data,
    )  # fmt: skip
    return _held(text, packed, constants, table)


def _held(text: bytes, *arrays: Any) -> Program:
    buffer = ctypes.create_string_buffer(text, len(text))
    return Program(ctypes.addressof(buffer), (buffer, *arrays))


@cache
def writer(format: RowFormat, size: int) -> Program:
    """Return how rows of `size` elements are written, as the library takes it.

    Raises `UntraceableError`.
    """
    form, scale, group = _by_hand(format) or (TRACED, 0, 0)
    if form in (INT8, E4M3) or (scale in (HALVES, STEPS) and form == CODES):
        text = _FORMAT.pack(
            form, scale, group or size, format.row_bytes(size), size, 0, 0, 0, 0, 1.0, 0, 0, 0
        )
        return _held(text)
    trace = trace_encode(format, size)
    program = _Steps(trace, width := trace.width(size), format.row_bytes(size), trace.length)
    packed, table = np.array(program.steps, np.int32).reshape(-1, 6), np.zeros(1, np.int32)
    text = _FORMAT.pack(
        TRACED, 0, size, format.row_bytes(size), width, len(packed), program.registers,
        len(program.constants), program.result, 1.0, packed.ctypes.data, program.constants.ctypes.data,
        table.ctypes.data,
    )  # fmt: skip
    return _held(text, packed, program.constants, table)


def store_problem(format: RowFormat) -> str | None:
    """Return why NATIVE_STORE can't write a format's rows, or None."""
    try:
        writer(
            format, next((n for n in (128, 576, 512) if format.row_bytes(n)), sizes_of(format)[-1])
        )
    except UntraceableError as error:
        return f"{error}, which the native kernels have no step for"
    return None


def _levels(format: RowFormat) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what codes 0 to 15 stand for, by rows whose scales are 1."""
    size = 32
    codes = torch.arange(16, dtype=torch.uint8, device="cpu")
    row = codes[:, None].repeat(1, format.row_bytes(size))
    row[:, : size // 2] *= 17
    one = {"int4": [0, 0x3C], "kivi4": [0, 0x3C, 0, 0], "nvfp4": [0x38], "mxfp4": [127]}
    scale = one.get(format.name, [0, 0x3C])
    behind = format.row_bytes(size) - size // 2
    scales = scale * (behind // len(scale))
    row[:, size // 2 :] = torch.tensor(scales, dtype=torch.uint8, device="cpu")
    levels = decoded(row, format, size, turn=False)[:, 0]
    return (levels * (size**0.5 if format.name == "turboquant4" else 1.0)).numpy().copy()


class _Steps:
    """Writes a trace as the library's steps."""

    def __init__(self, trace: Trace, size: int, row_bytes: int, length: int = 0):
        self.trace, self.nodes, self.size, self.row_bytes = trace, trace.nodes, size, row_bytes
        self.counts: list[int] = []
        self.values = trace.by_place(np.arange(size))
        self.fixed: dict[Any, int] = {}
        self.columns: list[np.ndarray[Any, Any]] = []
        self.tables: dict[str, tuple[int, int]] = {}
        self.table = np.zeros(0, np.int32)
        self.known: dict[tuple[int, str], int] = {}
        self.steps: list[tuple[int, ...]] = []
        assert trace.score is not None
        result = self._operand(trace.score, "int" if length else "float")
        self._number_registers(result)

    def _number_registers(self, result: int) -> None:
        """Give steps' results, numbered from -1 down, registers, each again once nothing reads it."""
        last = {a: at for at, step in enumerate(self.steps) for a in step[2:]} | {
            result: len(self.steps)
        }
        first, places, free, count = len(self.columns), dict[int, int](), list[int](), 0
        for at, (op, to, *args) in enumerate(self.steps):
            here = [places.get(a, a) for a in args]
            ended = {
                places[a]
                for a in args
                if a in places and last[a] == at and self._reads(op, args, a)
            }
            apart = op == OPS.index("gather")  # it reads entries after it has written others
            free += [] if apart else ended
            if not free:
                free, count = [first + count], count + 1
            places[to] = free.pop()
            free += ended if apart else []
            self.steps[at] = (op, places[to], *here, -(-self.counts[at] // COLUMNS) * COLUMNS)
        self.registers, self.result = first + count, places.get(result, result)
        shape = len(self.columns), -(-self.size // COLUMNS) * COLUMNS
        self.constants = np.zeros(shape, np.int32)
        for row, column in zip(self.constants, self.columns, strict=True):
            row[: self.size] = column

    @staticmethod
    def _reads(op: int, args: list[int], a: int) -> bool:
        return op != OPS.index("look_up") or a == args[0]

    def _put(self, op: str, *args: int, count: int = 0) -> int:
        own = args[:1] if op == "look_up" else args
        read = [self.counts[-1 - a] for a in own if a < 0]
        self.counts.append(count or min(read, default=self.size))
        args = (*args, *[args[0]] * (3 - len(args)))
        self.steps.append((OPS.index(op), -1 - len(self.steps), *args))
        return -len(self.steps)

    def _constant(self, value: Any, kind: str) -> int:
        dtype = np.float32 if kind == "float" else np.int32
        with np.errstate(all="ignore"):
            column = np.ascontiguousarray(np.broadcast_to(value, self.size), dtype=dtype).view(
                np.int32
            )
        key = column.tobytes()
        if key not in self.fixed:
            self.fixed[key] = len(self.columns)
            self.columns.append(column)
        return self.fixed[key]

    def _operand(self, number: int, kind: str) -> int:
        """Return the register of a node as a `"float"`, an `"int"` or a `"bool"`, of 0 and 1."""
        if (number, kind) not in self.known:
            self.known[number, kind] = self._written(number, kind)
        return self.known[number, kind]

    def _written(self, number: int, kind: str) -> int:
        node = self.nodes[number]
        if (value := self.values[number]) is not None:
            return self._constant(value != 0 if kind == "bool" else value, kind)
        if kind == node.kind:
            return self._computed(node)
        own = self._operand(number, node.kind)
        if kind == "float":
            return self._put("to_float", own)
        if kind == "int":
            return own if node.kind == "bool" else self._put("to_int", own)
        same = self._put(
            "eq" if node.kind == "float" else "eq_int", own, self._constant(0, node.kind)
        )
        return self._put("xor", same, self._constant(1, "int"))

    def _computed(self, node: Any) -> int:
        op, kind = node.op, node.kind
        if op == "load":
            return self._loaded(node)
        if op in ("to_float", "to_int", "to_bool"):
            return self._operand(node.args[0], kind)
        if op in ("element", "vector", "gather"):
            return self._vector(node)
        if op == "bits":
            return self._operand(node.args[0], "float")
        if op == "single":
            return self._operand(node.args[0], "int")
        if op == "half":
            return self._put("half", self._operand(node.args[0], "int"))
        if op == "where":
            cond, *rest = node.args
            return self._put(
                "where", self._operand(cond, "bool"), *(self._operand(a, kind) for a in rest)
            )
        if op in ("lt", "le", "gt", "ge", "eq", "ne"):
            kinds = {self.nodes[a].kind for a in node.args}
            kind = "float" if "float" in kinds else "int"
        a, *b = (self._operand(i, kind) for i in node.args)
        end = "" if kind == "float" else "_int"
        if op in _PAIRS:
            pair = (b[0], a) if op in ("gt", "ge") else (a, b[0])
            equal = self._put(f"{_PAIRS[op]}{end}", *pair)
            return self._put("xor", equal, self._constant(1, "int")) if op == "ne" else equal
        if op == "truediv":
            return self._put("div", a, b[0])
        if op == "rsqrt":
            return self._put("div", self._constant(1.0, kind), self._put("sqrt", a))
        if op == "sigmoid":
            one = self._constant(1.0, kind)
            less = self._put("exp", self._put("mul", a, self._constant(-1.0, kind)))
            return self._put("div", one, self._put("add", one, less))
        if op in _ALONE and kind == "float":
            return self._put(op, a)
        if op in _INTS and kind != "float":
            return self._put(_INTS[op], a, b[0])
        if op == "not":
            return self._put("xor", a, self._constant(1 if kind == "bool" else -1, "int"))
        if op == "neg":
            return self._put(f"mul{end}", a, self._constant(-1, kind))
        if op == "abs":
            if kind == "float":
                return self._put("and", a, self._constant(0x7FFFFFFF, "int"))
            return self._put("max_int", a, self._put("mul_int", a, self._constant(-1, kind)))
        if op in ("floor", "ceil"):
            return a
        raise UntraceableError(f"operation {op!r} of {kind}s")

    def _vector(self, node: Any) -> int:
        """Write the parts that only stored rows have."""
        if node.op == "element":
            return self._put("element", self._constant(0, "int"))
        padded = np.zeros(self.size)
        padded[: len(node.what)] = node.what
        if node.op == "vector":
            return self._constant(padded, node.kind)
        source = self._operand(node.args[0], self.nodes[node.args[0]].kind)
        return self._put("gather", source, self._constant(padded, "int"), count=len(node.what))

    def _loaded(self, node: Any) -> int:
        at = self.values[node.args[0]] if len(node.args) == 1 else None
        if node.what == "row":
            if at is None:
                raise UntraceableError("a byte at a place that another byte says")
            if at.min() < 0 or at.max() >= self.row_bytes:
                raise UntraceableError(f"byte {int(at.max())} of a row of {self.row_bytes}")
            return self._put("byte", self._constant(at, "int"))
        if len(node.args) != 1:
            raise UntraceableError(f"a tensor of {len(node.args)} dimensions")
        if node.what not in self.tables:
            tensor = self.trace.constants[node.what]
            dtype = np.float32 if node.kind == "float" else np.int32
            entries = tensor.detach().cpu().numpy().astype(dtype).view(np.int32)
            self.tables[node.what] = len(self.table), len(entries)
            self.table = np.concatenate([self.table, entries])
        return self._put("look_up", self._operand(node.args[0], "int"), *self.tables[node.what])
