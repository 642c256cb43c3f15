"""Runs kernels of Gluon on the host, over NumPy: each access is checked, copies and barriers too.

Gluon has no interpreter. Here the functions of its kernels run as they are, with a language of this
file in place of Triton's. These are errors: an integer that doesn't fit its type, an access outside of
a tensor's storage, a misaligned one, a product that is used before a wait for it, and roles of a
program that wait for one another for ever. A group of warps is one thread here: how the elements of a
tile are dealt out to threads isn't looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from polyattn_triton import launch
from ptx_on_host import run_ptx
from triton.experimental.gluon import language

MODULES = [
    import_module(f"polyattn_triton.{name}")
    for name in (
        *(
            "hopper.copies",
            "hopper.few_heads",
            "hopper.index",
            "hopper.items",
            "hopper.latent_bytes",
        ),
        *("hopper.latent_copies", "hopper.latents", "hopper.mla", "hopper.packed"),
        *("hopper.packed_rows", "hopper.prefill", "hopper.rows"),
        *("kernels.choice", "kernels.parts", "kernels.softmax", "kernels.tiles"),
    )
]
INTS = {"int1": 1, "uint8": 8, "int16": 16, "int32": 32, "int64": 64}
FLOATS = {"float8e4nv": 8, "float16": 16, "bfloat16": 16, "float32": 32}
BYTES = {name: max(1, bits // 8) for name, bits in (INTS | FLOATS).items()}
RAW = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
OF_TORCH = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.uint8: "uint8",
    torch.float8_e4m3fn: "float8e4nv",
}  # fmt: skip


def decoded(bits: Any, kind: str) -> Any:
    """Return raw elements as numbers: float32, int64 or bool."""
    if kind == "float32":
        return bits.view(np.float32)
    if kind == "float16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "bfloat16":
        return (bits.astype(np.int32) << 16).view(np.float32)
    if kind == "float8e4nv":
        return torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).float().numpy()
    return bits.astype(bool) if kind == "int1" else bits.astype(np.int64)


def encoded(numbers: Any, kind: str) -> Any:
    """Return numbers as raw elements, rounded to the nearest."""
    numbers = np.asarray(numbers)
    if kind == "float32":
        return numbers.astype(np.float32).view(np.int32)
    if kind == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.int16)
    if kind == "bfloat16":
        there = torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).bfloat16()
        return there.view(torch.int16).numpy().reshape(numbers.shape)
    if kind == "float8e4nv":
        there = torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).to(torch.float8_e4m3fn)
        return there.view(torch.uint8).numpy().reshape(numbers.shape)
    return numbers.astype(RAW[BYTES[kind]])


def fitted(numbers: Any, kind: str) -> Any:
    """Return a result as its type has it; an integer that doesn't fit is an error."""
    if kind in FLOATS:
        return decoded(encoded(numbers, kind), kind)
    if kind not in ("int1", "int64"):
        low, high = (
            (0, 255) if kind == "uint8" else (-(1 << INTS[kind] - 1), (1 << INTS[kind] - 1) - 1)
        )
        assert np.min(numbers, initial=0) >= low and np.max(numbers, initial=0) <= high, (
            f"{np.asarray(numbers).flat[0]} ... leave {kind}"
        )
    return numbers


class Value:
    """A tile or a number of a kernel."""

    def __init__(self, numbers: Any, kind: str):
        self._numbers = np.asarray(numbers)
        self.dtype = kind

    @property
    def a(self) -> Any:
        return self._numbers

    @property
    def shape(self) -> list[int]:
        return [*self.a.shape]

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def __bool__(self) -> bool:
        return bool(self.a)

    def __index__(self) -> int:
        assert self.dtype in INTS
        return int(self.a)

    def __getitem__(self, key: Any) -> Value:
        return Value(self.a[key], self.dtype)

    def reshape(self, *shape: Any) -> Value:
        return Value(self.a.reshape(shape[0] if len(shape) == 1 else shape), self.dtype)

    def permute(self, order: Any) -> Value:
        return Value(self.a.transpose(order), self.dtype)

    def to(self, kind: Any, bitcast: bool = False) -> Value:
        if bitcast:
            assert BYTES[kind] == BYTES[self.dtype]
            return Value(decoded(encoded(self.a, self.dtype), kind), kind)
        if kind in FLOATS:
            return Value(fitted(self.a.astype(np.float32), kind), kind)
        whole = self.a.astype(np.int64)
        if INTS[kind] < 64:  # what doesn't fit is cut off, as is asked for
            half = 1 << INTS[kind] - 1
            whole = (
                whole & (2 * half - 1) if kind == "uint8" else (whole + half) % (2 * half) - half
            )
        return Value(whole, kind)


def kind_of(a: Any, b: Any) -> str:
    """Return what an operation of two has for a type; a number of Python takes the other's."""
    kinds = [x.dtype for x in (a, b) if isinstance(x, Value)]
    floats = [k for k in kinds if k in FLOATS]
    if floats:
        return max(floats, key=[*FLOATS].index)
    if any(isinstance(x, float) for x in (a, b)):
        return "float32"
    wide = max(kinds, key=[*INTS].index, default="int32")
    return "int32" if wide == "int1" and len(kinds) < 2 else wide


def plain(x: Any) -> Any:
    return x.a if isinstance(x, Value) else x


def towards_zero(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    assert (b != 0).all()
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def both(a: Any, b: Any, compute: Callable[[Any, Any], Any]) -> Value:
    kind = kind_of(a, b)
    with np.errstate(all="ignore"):
        if kind in FLOATS:
            return Value(
                fitted(compute(*(np.asarray(plain(x), np.float32) for x in (a, b))), kind), kind
            )
        return Value(fitted(compute(plain(a), plain(b)), kind), kind)


def compared(a: Any, b: Any, compute: Callable[[Any, Any], Any]) -> Value:
    return Value(compute(plain(a), plain(b)), "int1")


def operator(compute: Callable[[Any, Any], Any], how: Any = both) -> tuple[Any, Any]:
    def forth(a: Any, b: Any) -> Any:
        return NotImplemented if isinstance(b, Pointer) else how(a, b, compute)

    def back(a: Any, b: Any) -> Any:
        return how(b, a, compute)

    return forth, back


def divided(a: Any, b: Any) -> Value:
    kind = kind_of(a, b)
    return both(a, b, np.divide) if kind in FLOATS else both(a, b, towards_zero)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": towards_zero,
    "mod": lambda a, b: a - towards_zero(a, b) * b, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift, "truediv": np.divide,
}  # fmt: skip
for name, compute in OPERATORS.items():
    for at, method in zip((f"__{name}__", f"__r{name}__"), operator(compute), strict=True):
        setattr(Value, at, method)
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{name}__", operator(getattr(np, {
        "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
        "ne": "not_equal"}[name]), compared)[0])  # fmt: skip
Value.__neg__ = lambda self: both(0, self, np.subtract)  # type: ignore[attr-defined]


class Pending(Value):
    """A product that runs: it is there once it has been waited for."""

    def __init__(self, shape: Sequence[int]):
        super().__init__(np.zeros(shape, np.float32), "float32")
        self.there = False

    @property
    def a(self) -> Any:
        assert self.there, "a product is used before it was waited for"
        return self._numbers

    @property
    def shape(self) -> list[int]:
        return [*self._numbers.shape]


class Storage:
    """A tensor's storage as raw bytes, and the places of the elements that each store wrote."""

    def __init__(self, tensor: torch.Tensor):
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()  # type: ignore[call-overload]
        self.written: list[Any] = []

    def at(self, places: Any, size: int) -> Any:
        """Return which elements of `size` bytes these addresses are."""
        assert (places % size == 0).all(), f"misaligned for {size} bytes"
        inside = (places >= 0) & (places <= len(self.bytes) - size)
        assert inside.all(), f"{places[~inside][:3]} of {len(self.bytes)} bytes"
        return places // size

    def elements(self, size: int) -> Any:
        return self.bytes[: len(self.bytes) // size * size].view(RAW[size])


class Kind(str):
    """A type's name, which kernels ask."""

    def is_fp8(self) -> bool:
        return self.startswith("float8")


class Pointer:
    """Addresses, in bytes from a storage's begin."""

    def __init__(self, storage: Storage, places: Any, kind: str):
        self.storage, self.places, self.kind = storage, np.asarray(places, np.int64), kind

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=Kind(self.kind))

    def __add__(self, by: Any) -> Pointer:
        assert isinstance(by, int) or by.dtype in INTS
        moved = np.asarray(plain(by), np.int64) * BYTES[self.kind]
        return Pointer(self.storage, self.places + moved, self.kind)

    __radd__ = __add__

    def __getitem__(self, by: Any) -> Pointer:
        return Pointer(self.storage, self.places[by], self.kind)

    def to(self, kind: Any) -> Pointer:
        return Pointer(self.storage, self.places, kind.kind)


def chosen(pointer: Pointer, mask: Any) -> tuple[Any, Any]:
    """Return addresses and what a mask lets through, of one shape."""
    seen = np.asarray(True if mask is None else plain(mask), bool)
    shape = np.broadcast_shapes(pointer.places.shape, seen.shape)
    return np.broadcast_to(pointer.places, shape), np.broadcast_to(seen, shape)


def load(pointer: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Value:
    places, seen = chosen(pointer, mask)
    size = BYTES[pointer.kind]
    if other is None:  # nobody may rely on it
        found = np.full(places.shape, -1, RAW[size] if size > 1 else np.int64).astype(RAW[size])
    else:
        found = np.broadcast_to(encoded(plain(other), pointer.kind), places.shape).copy()
    found[seen] = pointer.storage.elements(size)[pointer.storage.at(places[seen], size)]
    return Value(decoded(found, pointer.kind), pointer.kind)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    places, seen = chosen(pointer, mask)
    size = BYTES[pointer.kind]
    numbers = np.broadcast_to(plain(value), places.shape)[seen]
    if pointer.kind in FLOATS and isinstance(value, Value):
        assert value.dtype in FLOATS
    at = pointer.storage.at(places[seen], size)
    pointer.storage.elements(size)[at] = encoded(numbers, pointer.kind)
    pointer.storage.written.append(at * size)


class Shared:
    """Shared memory: what nobody wrote is NaN."""

    def __init__(self, bits: Any, kind: str):
        self.bits, self.dtype = bits, kind

    @property
    def shape(self) -> list[int]:
        return [*self.bits.shape]

    def index(self, at: Any) -> Shared:
        at = int(at)
        assert 0 <= at < len(self.bits)
        return Shared(self.bits[at], self.dtype)

    def slice(self, first: Any, count: int, dim: int = 0) -> Shared:
        first = int(first)
        assert 0 <= first <= self.bits.shape[dim] - count
        whole = (slice(None),) * dim
        return Shared(self.bits[(*whole, slice(first, first + count))], self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.bits.transpose(order), self.dtype)

    def _reinterpret(self, kind: str, shape: Sequence[int], layout: Any) -> Shared:
        found = self.bits.view(RAW[BYTES[kind]])
        shaped = found.reshape(shape)
        assert np.shares_memory(shaped, found)
        return Shared(shaped, kind)

    def load(self, layout: Any = None) -> Value:
        return Value(decoded(np.ascontiguousarray(self.bits), self.dtype), self.dtype)

    def store(self, value: Value) -> None:
        assert value.shape == self.shape
        self.bits[...] = encoded(value.a, self.dtype)


def allocate_shared_memory(kind: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        return Barriers([Barrier() for _ in range(shape[0])])
    size = BYTES[kind]
    return Shared(np.full([int(n) for n in shape], -1, np.int64).astype(RAW[size]), kind)


class Barrier:
    """An mbarrier: phases of so many arrivals, and of the bytes that are to come."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phases = 0

    def arrived(self, bytes_less: int = 0, times: int = 0) -> None:
        assert self.count > 0, "a barrier isn't initialised"
        self.left -= times
        self.bytes -= bytes_less
        assert self.left >= 0
        if not self.left and not self.bytes:
            self.phases += 1
            self.left = self.count


class Barriers:
    def __init__(self, held: list[Barrier]):
        self.held = held

    def index(self, at: Any) -> Barrier:
        at = int(at)
        assert 0 <= at < len(self.held)
        return self.held[at]


class Machine:
    """One program: its place in the grid, and its roles, which run until they wait, one at a time."""

    def __init__(
        self, place: tuple[int, ...], grid: tuple[int, ...], order: tuple[int, ...], warps: int
    ):
        self.place, self.grid, self.order, self.warps = place, grid, order, warps
        self.own = threading.local()
        self.back = threading.Semaphore(0)
        self.turns: list[threading.Semaphore] = []
        self.waiting: list[Callable[[], bool] | None] = []
        self.failed: BaseException | None = None

    @property
    def products(self) -> list[Any]:
        """Products of this role that run, the oldest first."""
        return self.own.__dict__.setdefault("products", [])

    @property
    def groups(self) -> list[list[Any]]:
        """Groups of this role's copies that are on their way; the last one isn't committed."""
        return self.own.__dict__.setdefault("groups", [[]])

    def wait(self, ready: Callable[[], bool]) -> None:
        if ready():
            return
        assert self.turns, "nobody is there to wait for"
        me = self.own.role
        self.waiting[me] = ready
        self.back.release()
        self.turns[me].acquire()
        if self.failed is not None:
            raise SystemExit

    def specialize(self, roles: Sequence[tuple[Any, Any]], *_: Any) -> None:
        done = [False] * len(roles)
        self.turns = [threading.Semaphore(0) for _ in roles]
        self.waiting = [None] * len(roles)

        def run(me: int) -> None:
            self.own.role = me
            self.turns[me].acquire()
            try:
                function, arguments = roles[me]
                if self.failed is None:
                    function(*arguments)
                    assert not self.products, "a role ends while a product runs"
            except SystemExit:
                pass
            except BaseException as error:
                self.failed = self.failed or error
            done[me] = True
            self.back.release()

        threads = [threading.Thread(target=run, args=(me,)) for me in range(len(roles))]
        for thread in threads:
            thread.start()
        while not all(done):
            next_one = next((
                me for me in self.order
                if not done[me] and (self.waiting[me] is None or self.waiting[me]())  # type: ignore[misc]
            ), None)  # fmt: skip
            if self.failed is None and next_one is None:
                self.failed = AssertionError("all roles wait for one another")
            if self.failed is not None:
                next_one = done.index(False)
            assert next_one is not None
            self.waiting[next_one] = None
            self.turns[next_one].release()
            self.back.acquire()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed


class Described:
    """A matrix as the copy engine sees it."""

    def __init__(self, descriptor: Any):
        base = descriptor.base
        self.storage, self.kind = Storage(base), OF_TORCH[base.dtype]
        self.begin = base.storage_offset()
        self.rows, self.columns = descriptor.shape
        self.stride, self.block_shape = descriptor.strides[0], descriptor.block_shape
        self.shape = [Value(self.rows, "int32"), Value(self.columns, "int32")]

    def box(self, row: int, column: int) -> Any:
        """Return a box; what lies outside of the matrix is zero."""
        height, width = self.block_shape
        at = row + np.arange(height)[:, None], column + np.arange(width)[None, :]
        inside = (at[0] >= 0) & (at[0] < self.rows) & (at[1] >= 0) & (at[1] < self.columns)
        places = (self.begin + at[0] * self.stride + at[1]) * 2
        found = np.zeros((height, width), np.int16)
        found[inside] = self.storage.elements(2)[self.storage.at(places[inside], 2)]
        return found


def over(compute: Any) -> Any:
    return lambda a, b: both(a, b, compute)


def along(compute: Any) -> Any:
    return lambda x, axis: Value(compute(x.a, axis=axis), x.dtype)


def alone(compute: Any) -> Any:
    def of(x: Value) -> Value:
        with np.errstate(all="ignore"):
            return Value(compute(x.a).astype(x.a.dtype), x.dtype)

    return of


def where(condition: Any, a: Any, b: Any) -> Value:
    given = [x for x in (a, b) if isinstance(x, Value)]
    kind = kind_of(a, b) if given else ("float32" if isinstance(a, float) else "int32")
    return Value(np.where(plain(condition), plain(a), plain(b)), kind)


def inline(
    asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    shape = np.broadcast_shapes(*(x.a.shape for x in args))
    registers = []
    for x in args:
        bits = encoded(np.broadcast_to(x.a, shape), x.dtype).reshape(-1)
        if BYTES[x.dtype] == 4:  # a register each
            registers += [
                np.ascontiguousarray(bits[at::pack]).view(np.uint32) for at in range(pack)
            ]
            continue
        assert pack * BYTES[x.dtype] == 4
        registers.append(np.ascontiguousarray(bits).view(np.uint32))
    each = [max(1, pack * BYTES[kind] // 4) for kind in kinds]  # registers
    results, found = iter(run_ptx(asm, sum(each), registers)), []
    for count, kind in zip(each, kinds, strict=True):
        bits = np.stack([next(results) for _ in range(count)], -1).reshape(-1)
        if pack * BYTES[kind] < 4:
            bits = bits.astype(RAW[BYTES[kind]])
        found.append(Value(decoded(bits.view(RAW[BYTES[kind]]).reshape(shape), kind), kind))
    return tuple(found) if isinstance(dtype, tuple) else found[0]


def split(x: Value) -> tuple[Value, Value]:
    return Value(x.a[..., 0], x.dtype), Value(x.a[..., 1], x.dtype)


def full(shape: Any, value: Any, kind: str, layout: Any = None) -> Value:
    held = bool if kind == "int1" else np.float32 if kind in FLOATS else np.int64
    return Value(np.full([int(n) for n in shape], plain(value), held), kind)


def demanded(holds: bool) -> None:
    assert holds


def nothing(*_: Any, **__: Any) -> None:
    return None


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def expect(barrier: Barrier, size: int) -> None:
    barrier.bytes += size
    barrier.left -= 1


class Language:
    """What stands for Gluon's and Triton's language on a machine: the program's that runs."""

    machine: Machine

    def wgmma(
        self, a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False
    ) -> Value:
        assert is_async
        found = Pending([a.shape[0], b.shape[1]])

        def finish() -> None:
            left = a.load().a if isinstance(a, Shared) else a.a
            found._numbers = left @ b.load().a + (acc.a if use_acc else 0)
            found.there = True

        self.machine.products.append(finish)
        return found

    def wgmma_wait(self, left: int, deps: Sequence[Value]) -> Any:
        while len(self.machine.products) > left:
            self.machine.products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)

    def copy_async(self, to: Shared, pointer: Pointer, mask: Any = None) -> None:
        places, seen = chosen(pointer, mask)
        size = BYTES[pointer.kind]
        assert [*places.shape] == to.shape and to.dtype == pointer.kind
        found = np.zeros(places.shape, RAW[size])
        found[seen] = pointer.storage.elements(size)[pointer.storage.at(places[seen], size)]

        def arrive() -> None:
            to.bits[...] = found

        self.machine.groups[-1].append(arrive)

    def wait_group(self, left: int) -> None:
        while len(self.machine.groups) - 1 > left:
            for arrive in self.machine.groups.pop(0):
                arrive()

    def copy_box(self, descriptor: Described, at: Sequence[Any], full: Barrier, to: Shared) -> None:
        row, column = (int(x) for x in at)
        assert abs(row) < 1 << 31 and abs(column) < 1 << 31
        box = descriptor.box(row, column)
        assert [*box.shape] == to.shape
        to.bits[...] = box
        full.arrived(bytes_less=box.nbytes)

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            parity = int(phase)
            assert parity in (0, 1)
            self.machine.wait(lambda: (barrier.phases & 1) != parity)

    def language(self) -> SimpleNamespace:
        """Return `gl`, which is `tl`, too."""
        kinds = {name: name for name in (*INTS, *FLOATS)}
        return SimpleNamespace(
            **kinds, load=load, store=store, minimum=over(np.minimum), maximum=over(np.maximum),
            where=where, max=along(np.max), sum=along(np.sum), exp2=alone(np.exp2), log2=alone(np.log2),
            abs=alone(np.abs), cdiv=lambda a, b: (a + (b - 1)) // b, split=split, full=full,
            join=lambda a, b: Value(np.stack([a.a, b.a], -1), a.dtype),
            arange=lambda low, high, layout=None: Value(np.arange(low, high), "int32"),
            zeros=lambda shape, kind, layout=None: full(shape, 0, kind),
            zeros_like=lambda x: full(x.shape, 0, x.dtype),
            convert_layout=lambda x, *_, **__: x, inline_asm_elementwise=inline,
            static_range=range, static_assert=demanded, reshape=lambda x, shape: x.reshape(shape),
            program_id=lambda axis: Value(self.machine.place[axis], "int32"),
            num_programs=lambda axis: Value(self.machine.grid[axis], "int32"),
            num_warps=lambda: self.machine.warps,
            pointer_type=lambda kind: SimpleNamespace(kind=kind),
            allocate_shared_memory=allocate_shared_memory,
            warp_specialize=lambda *roles: self.machine.specialize(*roles),
            constexpr=lambda x: x,
            **dict.fromkeys(
                ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout",
                 "NVMMASharedLayout", "SwizzledSharedLayout", "DistributedLinearLayout"), nothing,
            ),
            extra=SimpleNamespace(
                cuda=SimpleNamespace(gdc_wait=nothing, gdc_launch_dependents=nothing)
            ),
        )  # fmt: skip

    def names(self) -> tuple[SimpleNamespace, dict[str, Any]]:
        """Return the language, and what modules import by name."""
        gl = self.language()
        barriers = SimpleNamespace(
            init=init, wait=self.wait, expect=expect, MBarrierLayout=lambda: Barrier,
            arrive=lambda barrier: barrier.arrived(times=1),
        )  # fmt: skip
        names = {
            "gl": gl, "tl": gl, "mbarrier": barriers, "barrier": nothing, "fence_async_shared": nothing,
            "gdc_launch_dependents": nothing, "gdc_wait": nothing, "warpgroup_mma": self.wgmma,
            "warpgroup_mma_wait": self.wgmma_wait,
            "async_load_box": self.copy_box, "async_load": self.copy_async,
            "units_layout": nothing, "words_layout": nothing,
            "async_copy": SimpleNamespace(
                wait_group=self.wait_group,
                commit_group=lambda: self.machine.groups.append([]),
            ),
            "mma_v2": lambda a, b, acc: Value(a.a @ b.a + acc.a, "float32"),
        }  # fmt: skip
        return gl, names


def run_kernel(
    kernel: Any, grid: tuple[int, ...], given: Sequence[Any], order: tuple[int, ...], warps: int
) -> dict[str, Storage]:
    """Run all programs of a launch, one after another; returns the tensors' storages by argument."""
    storages: dict[int, Storage] = {}
    arguments: list[Any] = []
    by_name: dict[str, Storage] = {}
    constants = {
        name for name, said in kernel.fn.__annotations__.items() if "constexpr" in str(said)
    }
    for name, x in zip(kernel.arg_names, given, strict=True):
        if isinstance(x, torch.Tensor):
            held = storages.setdefault(x.untyped_storage().data_ptr(), Storage(x))
            by_name[name] = held
            begin = x.storage_offset() * x.element_size()
            arguments.append(Pointer(held, begin, OF_TORCH.get(x.dtype, "uint8")))
        elif hasattr(x, "block_shape"):
            arguments.append(Described(x))
        elif name in constants or x is None:
            arguments.append(x)
        elif isinstance(x, float):
            arguments.append(Value(np.float32(x), "float32"))
        else:
            arguments.append(Value(int(x), "int32" if abs(x) < 1 << 31 else "int64"))
    here = Language()
    with patched(here):
        for place in product(*map(range, grid)):
            here.machine = Machine(place, tuple(grid), order, warps)
            kernel.fn(*arguments)
            assert not here.machine.products
    return by_name


@contextmanager
def patched(here: Language) -> Iterator[None]:
    """Give the kernels' modules this file's language, and each other's functions as they are."""
    _, names = here.names()
    with ExitStack() as stack:
        for module in MODULES:
            for name, held in [*vars(module).items()]:
                new = names.get(name)
                if new is None and isinstance(held, language.constexpr):
                    new = held.value
                elif new is None and hasattr(held, "fn") and hasattr(held, "arg_names"):
                    new = held.fn
                if new is not None:
                    stack.enter_context(patch.object(module, name, new))
        yield


@contextmanager
def on_host(order: tuple[int, ...] = (0, 1, 2)) -> Iterator[list[tuple[Any, dict[str, Storage]]]]:
    """Run what is launched here; yields each launch's kernel, and its tensors' storages by argument.

    `order`: which role of a program goes on where several could.
    """
    launches: list[tuple[Any, dict[str, Storage]]] = []

    def call(
        self: Any, grid: Any, tensors: Any, floats: Any, free: Any, kept: Any = launch.NONE
    ) -> None:
        given = (*tensors, *kept.tensors, *floats, *self.ints, *free, *self.constants)
        launches.append(
            (self.kernel, run_kernel(self.kernel, grid, given, order, self.options["num_warps"]))
        )

    with patch.object(launch.Site, "__call__", call):
        yield launches
