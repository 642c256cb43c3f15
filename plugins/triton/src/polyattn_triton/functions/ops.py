"""What generated functions call: torch's meaning of operations where Triton's own is another."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MINUS_LOG2E = tl.constexpr(-1.4426950408889634)


@triton.jit
def at(index, size, stride):
    """Return an element's index: from the end if negative, as torch counts; never outside."""
    index = tl.where(index < 0, index + size, index)
    index = tl.maximum(tl.minimum(index, size - 1), 0)
    return index.to(tl.int64) * stride


@triton.jit
def load(tensor, i, j=None):
    """An element of an input, for hand-written source: an index for each of one or two dimensions.

    `tensor`: its pointer, then the size and the stride of each dimension.
    """
    place = at(i, tensor[1], tensor[2])
    if j is not None:
        place += at(j, tensor[3], tensor[4])
    return tl.load(tensor[0] + place)


@triton.jit
def floor_div(a, b):
    """Quotient of integers, rounded down."""
    quotient = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def floor_mod(a, b):
    """Remainder of integers, with the divisor's sign."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def on_nvidia(_semantic: Any = None) -> Any:
    """Whether the target of the compilation is NVIDIA's; the interpreter has no target."""
    if _semantic is None:
        return False
    return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


on_nvidia.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def as_it_is(tile):
    """A tile of float16. A product whose operand is reshaped isn't compiled for Hopper (Triton 3.6)."""
    if on_nvidia():
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tl.float16, True, 2)
    return tile


@triton.jit
def look_up(code, otherwise, ASM: tl.constexpr):
    """The values of four-bit codes in a table (`rows.table_asm`), float16, or else `otherwise`."""
    if on_nvidia():
        otherwise = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [code.to(tl.int8)], tl.float16, True, 4
        )
    return otherwise


@triton.jit
def _share(x):
    """1 / (1 + 2^x), to 4e-7 of itself.

    A quotient that may be of any size takes many instructions; a sum from 1 on can't leave the range of
    NVIDIA's own inverse. Elsewhere it is the square of an inverse root, one instruction of the special
    units as well. Their tanh (half of it, and a half) is off by 2.4e-4 of 1: as much as weights are whose
    bias is minus the logarithm of 4,096.
    """
    if on_nvidia():
        share = tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x],
            tl.float32,
            True,
            1,
        )
    else:
        root = tl.rsqrt(1.0 + tl.exp2(x))
        share = root * root
    return share


@triton.jit
def tanh(x):
    return 1.0 - 2.0 * _share(x * (2.0 * LOG2E))


@triton.jit
def sigmoid(x):
    return _share(x * MINUS_LOG2E)
