"""How do a cache's bytes become numbers for Hopper's tensor cores? In PTX, two units of 16 bits at once.

`$0` on are the operands; then come two units, then their scales. A unit's first numbers, its second and
so on are one operand each.
"""

from __future__ import annotations

# Four bits, of two units, are the low bits of a subnormal float16, or its next four, 16 times as much.
CODES = """
{
    .reg .b32 t;
    shr.u32 t, $4, 8;
    and.b32 $0, $4, 0x000f000f;
    and.b32 $1, $4, 0x00f000f0;
    and.b32 $2, t, 0x000f000f;
    and.b32 $3, t, 0x00f000f0;
}
"""
# They are the low bits of 1024's mantissa, or its next four: that minus 1032 is exact, as is a 16th of it
# minus 72.
INTEGERS = """
{
    .reg .b32 t, a, b, c, magic, less, part, by;
    mov.b32 magic, 0x64006400;
    mov.b32 less, 0xe408e408;
    mov.b32 part, 0x2c002c00;
    mov.b32 by, 0xd480d480;
    shr.u32 t, $4, 8;
    lop3.b32 a, $4, 0x000f000f, magic, 0xea;
    lop3.b32 b, $4, 0x00f000f0, magic, 0xea;
    lop3.b32 c, t, 0x000f000f, magic, 0xea;
    lop3.b32 t, t, 0x00f000f0, magic, 0xea;
    add.rn.f16x2 $0, a, less;
    fma.rn.f16x2 $1, b, part, by;
    add.rn.f16x2 $2, c, less;
    fma.rn.f16x2 $3, t, part, by;
}
"""
# e2m1's exponent and mantissa, and its inverted sign, in the places of float16's are its -2^14th part:
# of code n, the fourth to the second bit of 240 - 14 n, and the highest. $5 is the units' scales.
E2M1 = """
{
    .reg .b32 a, low, high;
    and.b32 a, $4, 0x0f0f0f0f;
    mad.lo.s32 low, a, -14, 0xf0f0f0f0;
    shr.u32 a, $4, 4;
    and.b32 a, a, 0x0f0f0f0f;
    mad.lo.s32 high, a, -14, 0xf0f0f0f0;
    shl.b32 a, low, 8;
    and.b32 a, a, 0x8e008e00;
    mul.rn.f16x2 $0, a, $5;
    shl.b32 a, high, 8;
    and.b32 a, a, 0x8e008e00;
    mul.rn.f16x2 $1, a, $5;
    and.b32 a, low, 0x8e008e00;
    mul.rn.f16x2 $2, a, $5;
    and.b32 a, high, 0x8e008e00;
    mul.rn.f16x2 $3, a, $5;
}
"""
# Of eight scales in e4m3, four as float16: bytes that $6 selects.
HALVES = """
{
    .reg .b32 t, low, high;
    .reg .b16 first, second;
    prmt.b32 t, $4, $5, $6;
    mov.b32 {first, second}, t;
    cvt.rn.f16x2.e4m3x2 low, first;
    cvt.rn.f16x2.e4m3x2 high, second;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}
"""
# Two units of e4m3, beside one another in a row: each one's two numbers are neighbours of an operand.
BESIDE = """
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
"""
# And of two rows: their first numbers are neighbours, and their second ones.
BELOW = """
{
    .reg .b32 t;
    .reg .b16 low, high;
    prmt.b32 t, $2, $2, 0x3120;
    mov.b32 {low, high}, t;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
"""


def _steps(bits: int) -> str:
    """Codes of 4 or 2 bits times a step, from a least number on: a float16 each, of either unit's group.

    A code in the mantissa of 1024, times a power of two, less 1024 times that: all exact.
    """
    each, half = 16 // bits, 8 // bits
    text = [
        ".reg .b32 x, t, magic, by, least, part, less;",
        "mov.b32 magic, 0x64006400;",
        f"prmt.b32 by, ${each + 1}, ${each + 2}, 0x5410;",
        f"prmt.b32 least, ${each + 1}, ${each + 2}, 0x7632;",
        f"shr.u32 t, ${each}, 8;",
    ]
    for at in range(half):
        place = bits * at
        mask = ((1 << bits) - 1) << place
        less, part = 0xE400 - (place << 10), 0x3C00 - (place << 10)
        text += [f"mov.b32 {n}, {x << 16 | x:#x};" for n, x in (("part", part), ("less", less))]
        for source, to in ((f"${each}", at), ("t", half + at)):
            text += [
                f"lop3.b32 x, {source}, {mask << 16 | mask:#x}, magic, 0xea;",
                "fma.rn.f16x2 x, x, part, less;",
                f"fma.rn.f16x2 ${to}, x, by, least;",
            ]
    return "{" + "\n".join(text) + "}"


def _powers() -> str:
    """e2m1 in the places of bfloat16's bits is its 2^126th part; scales are bfloat16's."""
    moves = ("shl.b32 x, $4, 6", "shl.b32 x, $4, 2", "shr.u32 x, $4, 2", "shr.u32 x, $4, 6")
    text = [".reg .b32 x, s, big;", "mov.b32 big, 0x7e807e80;"]
    for at, move in enumerate(moves):
        text += [
            f"{move};",
            f"shl.b32 s, $4, {12 - 4 * at};",
            "and.b32 x, x, 0x01c001c0;",
            "lop3.b32 x, s, 0x80008000, x, 0xea;",
            "mul.rn.bf16x2 x, x, big;",
            f"mul.rn.bf16x2 ${at}, x, $5;",
        ]
    return "{" + "\n".join(text) + "}"


STEPS = _steps(4)
QUARTERS = _steps(2)
POWERS = _powers()
# Bytes of two's complement, 128 more, are the low bits of 1024's mantissa.
_BYTES = """
{
    .reg .b32 x, magic, less;
    mov.b32 magic, 0x64646464;
    mov.b32 less, 0xe480e480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, magic, FIRST;
    prmt.b32 $1, x, magic, SECOND;
    add.rn.f16x2 $0, $0, less;
    add.rn.f16x2 $1, $1, less;
}
"""
BYTES_BESIDE = _BYTES.replace("FIRST", "0x4140").replace("SECOND", "0x4342")
BYTES_BELOW = _BYTES.replace("FIRST", "0x4240").replace("SECOND", "0x4341")


def _levels(below: bool) -> str:
    """Codes of turboquant4, as float16: `prmt` looks the bytes of four up, of eight levels above 0.

    A code below 8 is the opposite of the code 15 less. Operands as those of bytes: of two units of one
    row, or `below`.
    """
    text = [
        ".reg .b32 u, up, at, low, high, minus, l0, l1, h0, h1;",
        "mov.b32 l0, 0x8a41351c; mov.b32 l1, 0x77237906;",
        "mov.b32 h0, 0x3b393630; mov.b32 h1, 0x41403e3d;",
        f"prmt.b32 u, $4, $4, {'0x3120' if below else '0x3210'};",
        "shr.u32 up, u, 3;",
        "and.b32 up, up, 0x11111111;",
        "mad.lo.s32 at, up, 7, 0;",
        "lop3.b32 at, u, at, 0x77777777, 0x82;",
        "shl.b32 up, up, 2;",
    ]
    for to in (0, 2):
        text += [
            "prmt.b32 low, l0, l1, at;",
            "prmt.b32 high, h0, h1, at;",
            "prmt.b32 minus, 0x80808080, 0, up;",
            "or.b32 high, high, minus;",
            f"prmt.b32 ${to}, low, high, {'0x6240' if below else '0x5140'};",
            f"prmt.b32 ${to + 1}, low, high, {'0x7351' if below else '0x7362'};",
            "shr.u32 at, at, 16;",
            "shr.u32 up, up, 16;",
        ]
    return "{" + "\n".join(text[:-2]) + "}"


LEVELS_BESIDE, LEVELS_BELOW = _levels(False), _levels(True)
