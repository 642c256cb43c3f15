"""Runs the few instructions of PTX that kernels write themselves, over NumPy, lane by lane."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Bits = Any
"""uint32, one register of many lanes."""


def halves(x: Bits) -> Any:
    """Two float16 of each register, as float64."""
    return x.view(np.float16).reshape(-1, 2).astype(np.float64)


def packed(numbers: Any) -> Bits:
    """Round once, to the nearest, as an instruction does: such sums and products are exact in float64."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(numbers.astype(np.float16)).view(np.uint32).reshape(-1)


def lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    """Any function of three bits: bit `4 a + 2 b + c` of the table."""
    found = np.zeros_like(a)
    for at in range(8):
        if int(table.flat[0]) >> at & 1:
            some = (a if at & 4 else ~a) & (b if at & 2 else ~b) & (c if at & 1 else ~c)
            found |= some
    return found


def prmt(a: Bits, b: Bits, which: Bits) -> Bits:
    """Bytes of two registers, each by four bits: 0 to 3 the first's, 4 to 7 the second's."""
    held = np.stack([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1).reshape(
        -1, 8
    )
    places = np.stack([which >> np.uint32(4 * at) & 15 for at in range(4)], -1)
    chosen = np.take_along_axis(held, places & 7, 1)
    chosen = np.where(places & 8, np.where(chosen & 128, 255, 0), chosen)  # a sign's copies
    return np.ascontiguousarray(chosen.astype(np.uint8)).view(np.uint32).reshape(-1)


def of_e4m3(x: Bits) -> Bits:
    """The two numbers of a register's low half."""
    numbers = torch.from_numpy(x.astype(np.uint16)).view(torch.float8_e4m3fn).half()
    return numbers.numpy().view(np.uint32).reshape(-1)


def scaled(a: Bits, b: Bits) -> Bits:
    """Products of two bfloat16 each, rounded once: exact in float32 where one is a power of two."""
    x, y = (torch.from_numpy(v.view(np.int16).copy()).view(torch.bfloat16).double() for v in (a, b))
    bits: Bits = (x * y).bfloat16().view(torch.int16).numpy().view(np.uint32)
    return bits


def rounded(high: Bits, low: Bits, kind: str) -> Bits:
    """Two float32 as 16 bits each."""
    pair = np.stack([low, high], -1).view(np.float32)
    if kind == "f16x2":
        return packed(pair)
    bits = pair.view(np.uint32)
    near = bits + 0x7FFF + (bits >> 16 & 1)
    near = np.where(np.isnan(pair), np.uint32(0x7FFF0000), near) >> 16
    return (near[:, 0] | near[:, 1] << 16).astype(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Bits]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by,
    "and.b32": lambda a, b: a & b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "add.rn.f16x2": lambda a, b: packed(halves(a) + halves(b)),
    "mul.rn.bf16x2": scaled,
    "mul.rn.f16x2": lambda a, b: packed(halves(a) * halves(b)),
    "fma.rn.f16x2": lambda a, b, c: packed(halves(a) * halves(b) + halves(c)),
    "cvt.rn.bf16x2.f32": lambda high, low: rounded(high, low, "bf16x2"),
    "cvt.rn.f16x2.e4m3x2": of_e4m3,
    "cvt.rn.f16x2.f32": lambda high, low: rounded(high, low, "f16x2"),
    "setp.lt.s32": lambda a, b: (a.view(np.int32) < b.view(np.int32)).astype(np.uint32),
    "selp.f32": lambda a, b, p: np.where(p != 0, a, b),
}


def run_ptx(asm: str, results: int, given: Sequence[Bits]) -> list[Bits]:
    """Run instructions whose operands `$0`, ... are first the results, then what is given."""
    held: dict[str, Bits] = {f"${results + at}": x for at, x in enumerate(given)}
    count = len(given[0])

    def operand(name: str) -> Bits:
        if name in held:
            return held[name]
        number = int(name.removeprefix("0f"), 16) if name.startswith("0f") else int(name, 0)
        return np.full(count, number & 0xFFFFFFFF, np.uint32)

    with np.errstate(all="ignore"):
        for said in re.sub(r"[{}]", "", asm).split(";"):
            name, _, rest = said.strip().partition(" ")
            if not name or name == ".reg":
                continue
            *to, last = (x.strip() for x in rest.split(","))
            if name == "mov.b32" and len(to) == 2:  # into two of 16 bits
                held[to[0]], held[to[1]] = operand(last) & 0xFFFF, operand(last) >> 16
                continue
            held[to[0]] = INSTRUCTIONS[name](*map(operand, [*to[1:], last]))
    return [held[f"${at}"] for at in range(results)]
