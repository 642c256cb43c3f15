"""How are a row's bytes read as numbers, and written? The parts that row formats are made of.

`half`, `single`, `e4m3` and `level` read integers as floats in a `decode`; core traces them into
kernels. The others write in an `encode`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, fx

E4M3_MAX = 448.0
E2M1_MAX = 6.0
HALF_MAX = 65504.0


def _leaf(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Let a function of bits stay one operation in a trace."""

    @wraps(function)
    def read(bits: Any) -> Any:
        if isinstance(bits, fx.Proxy):
            return bits.tracer.create_proxy("call_function", read, (bits,), {})
        return function(bits)

    return read


@_leaf
def half(bits: Tensor) -> Tensor:
    """Return the float16 of these 16 bits, integers, as float32."""
    return bits.to(torch.int16).view(torch.float16).float()


@_leaf
def single(bits: Tensor) -> Tensor:
    """Return the float32 of these 32 bits, integers."""
    return bits.to(torch.int32).view(torch.float32)


def e4m3(code: Any) -> Any:
    """Return the number that a code of e4m3 (OCP's) stands for; 127 and 255 are NaN."""
    # Its exponent and mantissa in float16's places are its 256th part.
    value = half((code & 127) << 7 | (code & 128) << 8) * 256.0
    return torch.where((code & 127) == 127, float("nan"), value)


def e2m1(code: Any) -> Any:
    """Return the number that a code of e2m1, four bits, stands for."""
    return half((code & 7) << 9 | (code & 8) << 12) * 16384.0


@cache
def codebook(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers that codes are indices of, float32, copied to a device once."""
    return torch.tensor(levels, dtype=torch.float32, device=device)


def level(levels: tuple[float, ...], code: Any) -> Any:
    """Return the number of a codebook that a code is the index of."""
    device = torch.device("cpu") if isinstance(code, fx.Proxy) else code.device
    return codebook(levels, device)[code]


def nibble(row: Any, d: Any) -> Any:
    """Return four bits of a row that begins with pairs of them, element 2 i in the low ones."""
    return (row[d // 2] >> (4 * (d % 2))) & 15


def half_at(row: Any, at: Any) -> Any:
    """Return the float16 whose first byte is byte `at` of a row."""
    return half(row[at] | row[at + 1] << 8)


def single_at(row: Any, at: Any) -> Any:
    """Return the float32 whose first byte is byte `at` of a row."""
    return single(row[at] | row[at + 1] << 8 | row[at + 2] << 16 | row[at + 3] << 24)


def grouped(row: Tensor, count: int) -> Tensor:
    """Return rows (..., size) in groups of `count` neighbours, (..., size / count, count)."""
    groups: Tensor = row.unflatten(-1, (-1, count))
    return groups


def written(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values (..., n), rounded to a dtype, as their bytes, uint8 (..., n * itemsize)."""
    # `contiguous` keeps a stride of 0 where a dimension has one element; a copy has none.
    return values.to(dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def packed(codes: Tensor, bits: int = 4) -> Tensor:
    """Return codes (..., size) of 4 or 2 bits as bytes, the first of each byte in its low bits."""
    each = grouped(codes.to(torch.uint8), 8 // bits)
    result: Tensor = each[..., 0].clone()
    for at in range(1, 8 // bits):
        result |= each[..., at] << (bits * at)
    return result


def over(values: Tensor, number: float) -> Tensor:
    """Return values over a number, rounded once: on a GPU torch multiplies by a number's reciprocal."""
    return values / torch.full_like(values, number)


def divided(values: Tensor, scale: Tensor) -> Tensor:
    """Return values over scales that broadcast; zeros where a scale is 0."""
    return torch.where(scale == 0, 0.0, values / scale)


def root(x: Tensor) -> Tensor:
    """Return the square roots of float32 numbers, rounded once: MKL's, which torch calls, may not be."""
    return x.double().sqrt().float()


def power_below(x: Tensor) -> Tensor:
    """Return the largest power of two that is no larger than float32 numbers above 0; else 1."""
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((power == 0) | ~(power < torch.inf), 1.0, power)


def summed(values: Tensor) -> Tensor:
    """Return the sums of rows (..., size), (..., 1), by halves: the same bits on every device.

    `size` is a power of two.
    """
    while (half := values.shape[-1] // 2) > 0:
        values = values[..., :half] + values[..., half:]
    return values


def e2m1_codes(x: Tensor) -> Tensor:
    """Return the code of the nearest e2m1 number, uint8; of two equally near, the even mantissa's."""
    a = x.abs()
    code = torch.zeros_like(a, dtype=torch.uint8)
    for index, bound in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        # Halfway between codes i and i + 1: to i + 1 where that is even.
        code += (a > bound) | ((a == bound) & bool(index % 2))
    return code | (torch.signbit(x).to(torch.uint8) << 3)
