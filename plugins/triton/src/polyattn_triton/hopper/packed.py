"""Decode over four-bit numbers, or e4m3, for Hopper, in Gluon: what `kernels.decode` computes.

A warp is a program and attends to 32 keys at a time. Keys are the rows of the first product and values'
columns those of the second, so that a product's short side is the heads of one KV head. Numbers pass
from shared memory to the tensor cores' registers in units of 16 bits, which hold four numbers: a unit's
first numbers, its second and so on are four operands, whose columns are every fourth of a head. So none
is moved once it is unpacked, two at a time, and multiplied by its group's scale. Of e4m3 a unit holds two
numbers, which have no scales.

Gluon has no interpreter: CI compiles this ahead of time, and a GPU checks its values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from polyattn_triton.hopper.rows import barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RAISED = gl.constexpr(15)
"""Weights are 2^15 times as large, as in `kernels.decode`: float16 then holds small ones."""

# Four bits, of two units, are the low bits of 1024's mantissa, or of its next four: that minus 1032 is
# exact, as is a 16th of it minus 72.
INTEGERS = gl.constexpr("""
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
    add.rn.f16x2 a, a, less;
    fma.rn.f16x2 b, b, part, by;
    add.rn.f16x2 c, c, less;
    fma.rn.f16x2 t, t, part, by;
    mul.rn.f16x2 $0, a, $5;
    mul.rn.f16x2 $1, b, $5;
    mul.rn.f16x2 $2, c, $5;
    mul.rn.f16x2 $3, t, $5;
}
""")
# e2m1's sign, exponent and mantissa in the places of float16's high byte are its 2^14th part. $5 holds
# two pairs of scales, of which $6 says which is meant.
E2M1 = """
    .reg .b32 a, b, low, high, none, by;
    mov.b32 none, 0;
    shl.b32 a, $4, 4;
    shl.b32 b, $4, 1;
    and.b32 a, a, 0x80808080;
    lop3.b32 low, b, 0x0e0e0e0e, a, 0xea;
    shr.u32 b, $4, 3;
    and.b32 a, $4, 0x80808080;
    lop3.b32 high, b, 0x0e0e0e0e, a, 0xea;
    prmt.b32 a, low, none, 0x2404;
    mul.rn.f16x2 $0, a, by;
    prmt.b32 a, high, none, 0x2404;
    mul.rn.f16x2 $1, a, by;
    prmt.b32 a, low, none, 0x3414;
    mul.rn.f16x2 $2, a, by;
    prmt.b32 a, high, none, 0x3414;
    mul.rn.f16x2 $3, a, by;
"""
HALVES = """
    .reg .b16 first, second;
    .reg .b32 s, t;
    mov.b32 {first, second}, $5;
    cvt.rn.f16x2.e4m3x2 s, first;
"""
# Of two units in a row, which are of one group.
E2M1_BESIDE = gl.constexpr(
    "{" + HALVES + E2M1.replace("mov.b32 none", "prmt.b32 by, s, s, $6;\n    mov.b32 none") + "}"
)
# Of two rows, each of which has its own.
SECOND = "cvt.rn.f16x2.e4m3x2 t, second;\n    prmt.b32 by, s, t, $6;\n    mov.b32 none"
E2M1_BELOW = gl.constexpr("{" + HALVES + E2M1.replace("mov.b32 none", SECOND) + "}")
# Two units of e4m3, beside one another in a row: each one's two numbers are neighbours of an operand.
BESIDE = gl.constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
# And of two rows: their first numbers are neighbours, and their second ones.
BELOW = gl.constexpr("""
{
    .reg .b32 t;
    .reg .b16 low, high;
    prmt.b32 t, $2, $2, 0x3120;
    mov.b32 {low, high}, t;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")


@gluon.jit
def _converted(units, ASM: gl.constexpr):
    """Return two operands of float16 from units int16 of e4m3."""
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [units], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _integers(units, scales):
    """Return the first, second, third and fourth numbers of units int16 times their scales, float16."""
    return gl.inline_asm_elementwise(
        INTEGERS,
        "=r,=r,=r,=r,r,r",
        [units, scales],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _floats(units, scales, which, ASM: gl.constexpr):
    """The same for e2m1, times two's 14th power; of pairs of scales int16 `which` says which is meant."""
    return gl.inline_asm_elementwise(
        ASM,
        "=r,=r,=r,=r,r,r,r",
        [units, scales, which],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _which(LAYOUT: gl.constexpr, one: gl.constexpr, other: gl.constexpr):
    """Of eight units, of two groups: the bytes that are the first one's scale, or the other's."""
    unit = gl.arange(0, 8, layout=LAYOUT)
    return gl.where(unit < 4, one, other).to(gl.int16)


@gluon.jit
def _block(BT, tile, part: gl.constexpr, length, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The block that holds a tile's 16 keys from 16 x `part` on; past the length block 0."""
    at = tile * BLOCK_N + part * 16
    return gl.load(BT + at // BLOCK_SIZE, mask=at < length, other=0)


@gluon.jit
def _copy(
    codes, scales, ROWS, first, second, tile, slot, length, of_row, b, t,
    WORDS: gl.constexpr, WIDE: gl.constexpr, LINE: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, EIGHT: gl.constexpr,
):  # fmt: skip
    """Copy a tile's rows into shared memory, 16 of each of two blocks.

    Past the length scales are zero, or 8-bit numbers.
    """
    for part in gl.static_range(2):
        at = tile * BLOCK_N + part * 16
        block = first if part == 0 else second
        FROM = ROWS + block.to(gl.int64) * b + (at % BLOCK_SIZE) * t
        to = codes.index(slot).slice(part * 16, 16)
        if EIGHT:
            row = gl.arange(0, 16, layout=gl.SliceLayout(1, WIDE))
            mine = (row < length - at)[:, None]
            async_copy.async_copy_global_to_shared(to, FROM + of_row, mask=mine)
        else:
            async_copy.async_copy_global_to_shared(to, FROM + of_row)
            line = gl.arange(0, 16, layout=gl.SliceLayout(1, LINE))
            async_copy.async_copy_global_to_shared(
                scales.index(slot).slice(part * 16, 16),
                FROM + WORDS + (line * t)[:, None],
                mask=(line < length - at)[:, None],
            )


@gluon.jit
def _copy_both(
    k_codes, k_scales, v_codes, v_scales, K, V, first, second, tile, slot, length, of_k, of_v,
    k_b, k_t, v_b, v_t, WORDS: gl.constexpr, WIDE: gl.constexpr, LINE: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, EIGHT: gl.constexpr,
):  # fmt: skip
    """Copy a tile's keys and values, which lie in these two blocks."""
    _copy(
        k_codes,
        k_scales,
        K,
        first,
        second,
        tile,
        slot,
        length,
        of_k,
        k_b,
        k_t,
        WORDS,
        WIDE,
        LINE,
        BLOCK_N,
        BLOCK_SIZE,
        EIGHT,
    )
    _copy(
        v_codes,
        v_scales,
        V,
        first,
        second,
        tile,
        slot,
        length,
        of_v,
        v_b,
        v_t,
        WORDS,
        WIDE,
        LINE,
        BLOCK_N,
        BLOCK_SIZE,
        EIGHT,
    )


@gluon.jit
def _product(a, b, acc):
    """Add an operand's product to a tile of the accumulator."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return mma_v2(
        gl.convert_layout(a.reshape((acc.shape[0], b.shape[0])), A, assert_trivial=True), b, acc
    )


@gluon.jit
def _attend(
    Q, K, V, BT, scale, q_t, q_h, k_b, k_t, v_b, v_t, token, kv_head, length, begin, end, step,
    k_codes, v_codes, k_scales, v_scales,
    G: gl.constexpr, D: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Attend with a token's heads to its key tiles from `begin` to `end` by `step`: acc, m, l."""
    EIGHT: gl.constexpr = FORM == 2
    FLOAT: gl.constexpr = FORM == 1
    UNITS: gl.constexpr = D // 2 if EIGHT else D // 4
    WORDS: gl.constexpr = UNITS // 4
    KIND: gl.constexpr = gl.int16 if FLOAT else gl.float16  # of eight units' two scales, or one
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 2 if EIGHT else 1], [4, 8], [1, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [0, 1])
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    RAISED_BY: gl.constexpr = 16384.0 if FLOAT else 1.0

    row = gl.arange(0, 16, layout=gl.SliceLayout(1, WIDE))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, WIDE))
    of_k = row[:, None] * k_t + word[None, :]
    of_v = row[:, None] * v_t + word[None, :]
    last = gl.minimum(gl.cdiv(length, BLOCK_N), end)
    # A tile's blocks are known before its turn: its copies don't wait for the table.
    first = _block(BT, begin, 0, length, BLOCK_N, BLOCK_SIZE)
    second = _block(BT, begin, 1, length, BLOCK_N, BLOCK_SIZE)
    for i in gl.static_range(STAGES - 1):
        tile = begin + i * step
        if tile < last:
            _copy_both(
                k_codes, k_scales, v_codes, v_scales, K, V, first, second, tile, i, length,
                of_k, of_v, k_b, k_t, v_b, v_t, WORDS, WIDE, LINE, BLOCK_N, BLOCK_SIZE, EIGHT,
            )  # fmt: skip
        async_copy.commit_group()
        first = _block(BT, tile + step, 0, length, BLOCK_N, BLOCK_SIZE)
        second = _block(BT, tile + step, 1, length, BLOCK_N, BLOCK_SIZE)

    # Powers of two keep queries inside of float16's range.
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(1, QUERY))
    head = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(0, QUERY))
    place = unit // 2 * 4 + unit % 2 if EIGHT else 4 * unit
    NEXT: gl.constexpr = 2 if EIGHT else 1
    AT = Q + token * q_t + (kv_head * G + head)[None, :] * q_h + place[:, None]
    mine = (head < G)[None, :] & (unit < UNITS)[:, None]
    q0 = gl.load(AT, mask=mine, other=0.0).to(gl.float32)
    q1 = gl.load(AT + NEXT, mask=mine, other=0.0).to(gl.float32)
    most = gl.maximum(gl.abs(q0), gl.abs(q1))
    if not EIGHT:
        q2 = gl.load(AT + 2, mask=mine, other=0.0).to(gl.float32)
        q3 = gl.load(AT + 3, mask=mine, other=0.0).to(gl.float32)
        most = gl.maximum(most, gl.maximum(gl.abs(q2), gl.abs(q3)))
    most = gl.max(most, 0)
    power = (most.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.where(power == 0.0, 1.0, power)
    q0 = gl.convert_layout((q0 / power[None, :]).to(gl.float16), B)
    q1 = gl.convert_layout((q1 / power[None, :]).to(gl.float16), B)
    if not EIGHT:
        q2 = gl.convert_layout((q2 / power[None, :]).to(gl.float16), B)
        q3 = gl.convert_layout((q3 / power[None, :]).to(gl.float16), B)
    by = gl.convert_layout(power, HEAD) * (scale * LOG2E * RAISED_BY)

    acc0 = gl.zeros([UNITS, BLOCK_G], gl.float32, SCORES)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    m = gl.full([BLOCK_G], float("-inf"), gl.float32, HEAD)
    sums = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, SCORES)
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    LIE: gl.constexpr = units_layout(UNITS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    slot = 0
    for tile in range(begin, last, step):
        async_copy.wait_group(STAGES - 2)
        ahead = tile + (STAGES - 1) * step
        to = slot - 1
        if to < 0:
            to = STAGES - 1
        if ahead < last:
            _copy_both(
                k_codes, k_scales, v_codes, v_scales, K, V, first, second, ahead, to, length,
                of_k, of_v, k_b, k_t, v_b, v_t, WORDS, WIDE, LINE, BLOCK_N, BLOCK_SIZE, EIGHT,
            )  # fmt: skip
        async_copy.commit_group()
        first = _block(BT, ahead + step, 0, length, BLOCK_N, BLOCK_SIZE)
        second = _block(BT, ahead + step, 1, length, BLOCK_N, BLOCK_SIZE)

        k = k_codes.index(slot)._reinterpret(gl.int16, [BLOCK_N, UNITS], LIE).load(A)
        s = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, SCORES)
        if EIGHT:
            k0, k1 = _converted(k, BESIDE)
            s = _product(k0, q0, s)
            s = _product(k1, q1, s)
        else:
            k = k.reshape((BLOCK_N, UNITS // 8, 8))
            k_by = k_scales.index(slot)._reinterpret(KIND, [BLOCK_N, UNITS // 8], PLAIN)
            k_by = k_by.load(gl.SliceLayout(2, k.type.layout))[:, :, None]
            if FLOAT:
                which = _which(gl.SliceLayout(0, gl.SliceLayout(1, k.type.layout)), 0x1010, 0x3232)
                k0, k1, k2, k3 = _floats(k, k_by, which[None, None, :], E2M1_BESIDE)
            else:
                k0, k1, k2, k3 = _integers(k, k_by)
            s = _product(k0, q0, s)
            s = _product(k1, q1, s)
            s = _product(k2, q2, s)
            s = _product(k3, q3, s)
        s = gl.where((key < length - tile * BLOCK_N)[:, None], s * by[None, :], float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 0))
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s - (m_new - RAISED)[None, :])
        m = m_new
        sums = sums * alpha[None, :] + p
        weights = gl.convert_layout(p.to(gl.float16), B)
        more = alpha[None, :]
        v = v_codes.index(slot)._reinterpret(gl.int16, [BLOCK_N, UNITS], LIE)
        v = v.permute((1, 0)).load(A)
        if EIGHT:
            v0, v1 = _converted(v, BELOW)
            acc0 = _product(v0, weights, acc0 * more)
            acc1 = _product(v1, weights, acc1 * more)
        else:
            v = v.reshape((UNITS // 8, 8, BLOCK_N))
            v_by = v_scales.index(slot)._reinterpret(KIND, [BLOCK_N, UNITS // 8], PLAIN)
            v_by = v_by.permute((1, 0)).load(gl.SliceLayout(1, v.type.layout))[:, None, :]
            if FLOAT:
                which = _which(gl.SliceLayout(0, gl.SliceLayout(2, v.type.layout)), 0x5410, 0x7632)
                v0, v1, v2, v3 = _floats(v, v_by, which[None, :, None], E2M1_BELOW)
            else:
                v0, v1, v2, v3 = _integers(v, v_by)
            acc0 = _product(v0, weights, acc0 * more)
            acc1 = _product(v1, weights, acc1 * more)
            acc2 = _product(v2, weights, acc2 * more)
            acc3 = _product(v3, weights, acc3 * more)
        slot += 1
        if slot == STAGES:
            slot = 0
    async_copy.wait_group(0)
    total = gl.sum(sums, 0)
    safe = gl.where(total == 0.0, 1.0, total)
    norm = (RAISED_BY / safe)[None, :]
    lse = gl.where(total == 0.0, float("-inf"), m - RAISED + gl.log2(safe))
    return acc0 * norm, acc1 * norm, acc2 * norm, acc3 * norm, lse


@gluon.constexpr_function
def units_layout(units):
    """How a tile's units of 16 bits lie in shared memory: 16 bytes of eight rows in different banks."""
    return gl.SwizzledSharedLayout(8, 64 // units, units // 8, [1, 0])


@gluon.constexpr_function
def words_layout(words):
    """The same for words of 8 bytes."""
    return gl.SwizzledSharedLayout(2, 16 // words, words // 2, [1, 0])


@gluon.jit
def _store(
    acc0, acc1, acc2, acc3, lse, OUT, LSE, at, lse_at, by, lse_by, ok, HAS_LSE: gl.constexpr,
    EIGHT: gl.constexpr,
):  # fmt: skip
    """Store the heads' outputs, each second or fourth number from one operand, and their LSE."""
    LAYOUT: gl.constexpr = acc0.type.layout
    unit = gl.arange(0, acc0.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    TO = OUT + at[None, :] + (2 if EIGHT else 4) * unit[:, None]
    mine = ok[None, :]
    gl.store(TO, (acc0 * by).to(OUT.dtype.element_ty), mask=mine)
    gl.store(TO + 1, (acc1 * by).to(OUT.dtype.element_ty), mask=mine)
    if not EIGHT:
        gl.store(TO + 2, (acc2 * by).to(OUT.dtype.element_ty), mask=mine)
        gl.store(TO + 3, (acc3 * by).to(OUT.dtype.element_ty), mask=mine)
    if HAS_LSE:
        gl.store(LSE + lse_at, lse * lse_by, mask=ok)


@gluon.jit
def _scaled(number, ONE, TWO, at, DIVIDED: gl.constexpr, SCALES: gl.constexpr):
    """A KV head's scale, as `kernels.softmax.logit_scale` and `value_scale` have it."""
    if SCALES > 0:
        place = at * (SCALES - 1)
        number = number * gl.load(ONE + place)
        if DIVIDED:
            number = number / gl.load(TWO)
        else:
            number = number * gl.load(TWO + place)
    return number


@gluon.jit(do_not_specialize=["lse_t", "bt_s", "bt_end", "splits"])
def packed_kernel(
    Q, K, V, OUT, LSE, SINKS, SLOPES, INPUTS, Q_SCALE, K_SCALE, V_SCALE, OUT_SCALE,
    PARTS, PART_LSE, DONE, BT, SEQ_LENS, STARTS, WORK,
    scale, v_scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_t, o_h, lse_t, bt_s, bt_end, splits,
    G: gl.constexpr, D: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr,
    HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, LISTED: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """A token of one sequence, the heads of one KV head, over all their keys or some of them.

    Grid and arguments as `kernels.decode.decode_kernel`'s; `merge_kernel` merges parts. `FORM`:
    0 integers from -8, with a scale in float16 for each 32; 1 e2m1, with one in e4m3 for each 16; 2 e4m3.
    """
    gl.static_assert(gl.num_warps() == 1)
    gdc_launch_dependents()
    WORD: gl.constexpr = gl.int64
    EIGHT: gl.constexpr = FORM == 2
    WORDS: gl.constexpr = D // 8 if EIGHT else D // 16
    CODES: gl.constexpr = words_layout(WORDS)
    SCALED: gl.constexpr = 1 if EIGHT else BLOCK_N
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_codes = gl.allocate_shared_memory(WORD, [STAGES, BLOCK_N, WORDS], CODES)
    v_codes = gl.allocate_shared_memory(WORD, [STAGES, BLOCK_N, WORDS], CODES)
    k_scales = gl.allocate_shared_memory(WORD, [STAGES, SCALED, 1], LINE)
    v_scales = gl.allocate_shared_memory(WORD, [STAGES, SCALED, 1], LINE)
    # Programs of all heads begin one after another: where rows lie by token, they share lines of memory.
    number = gl.program_id(0) + gl.program_id(1) * gl.num_programs(0)
    program = number // gl.num_programs(1)
    kv_head = number % gl.num_programs(1)
    scale = _scaled(scale, Q_SCALE, K_SCALE, kv_head, False, SCALES)
    v_scale = _scaled(v_scale, V_SCALE, OUT_SCALE, kv_head, True, SCALES)
    KEYS = K.to(gl.pointer_type(WORD)) + kv_head.to(gl.int64) * (k_h // 8)
    VALUES = V.to(gl.pointer_type(WORD)) + kv_head.to(gl.int64) * (v_h // 8)
    k_b = k_b // 8
    k_t = k_t // 8
    v_b = v_b // 8
    v_t = v_t // 8
    head = gl.arange(
        0, BLOCK_G, layout=gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
    )
    ok = head < G
    heads = kv_head * G + head
    if LISTED:
        share = gl.load(WORK)
        item = gl.load(WORK + 2)
        count = gl.load(WORK + 3)
        programs = gl.num_programs(0)
        FIRST = WORK + 4 + program
        ENDS = WORK + 4 + 3 * programs
        seq = gl.load(FIRST)
        low = gl.load(FIRST + programs)
        high = gl.load(FIRST + 2 * programs)
        at = program * share
        stop = gl.minimum(at + share, gl.load(WORK + 1))
        while at < stop:
            token = seq.to(gl.int64)
            acc0, acc1, acc2, acc3, lse = _attend(
                Q, KEYS, VALUES, BT + token * bt_s, scale, q_t, q_h, k_b, k_t, v_b, v_t,
                token, kv_head, gl.load(SEQ_LENS + seq),
                gl.maximum(at - low - item, 0), gl.minimum(stop, high) - low - item, 1,
                k_codes, v_codes, k_scales, v_scales,
                G, D, BLOCK_G, BLOCK_N, BLOCK_SIZE, STAGES, FORM,
            )  # fmt: skip
            first = low // share
            if (high - 1) // share > first:
                part = kv_head * 2 * programs + 2 * program + (first == program).to(gl.int32)
                place = part * ROWS + head
                _store(acc0, acc1, acc2, acc3, lse, PARTS, PART_LSE, place * D, place,
                       1.0, 1.0, ok, True, EIGHT)  # fmt: skip
            else:
                _store(acc0, acc1, acc2, acc3, lse, OUT, LSE, token * o_t + heads * o_h,
                       token * lse_t + heads, v_scale, LN2, ok, HAS_LSE, EIGHT)  # fmt: skip
            barrier()  # the next one's copies go where this one's products read
            at = high
            low = high
            seq = gl.minimum(seq + 1, count - 1)
            high = gl.load(ENDS + seq + 1)
    else:
        token = program.to(gl.int64)
        begin = 0
        step = 1
        if SPLIT:
            begin = gl.program_id(2)
            step = splits
        length = gl.load(SEQ_LENS + program)
        acc0, acc1, acc2, acc3, lse = _attend(
            Q, KEYS, VALUES, BT + token * bt_s, scale, q_t, q_h, k_b, k_t, v_b, v_t,
            token, kv_head, length, begin, length, step, k_codes, v_codes, k_scales, v_scales,
            G, D, BLOCK_G, BLOCK_N, BLOCK_SIZE, STAGES, FORM,
        )  # fmt: skip
        if SPLIT:
            part = (program * gl.num_programs(1) + kv_head) * splits + begin
            place = part * ROWS + head
            _store(
                acc0,
                acc1,
                acc2,
                acc3,
                lse,
                PARTS,
                PART_LSE,
                place * D,
                place,
                1.0,
                1.0,
                ok,
                True,
                EIGHT,
            )
        else:
            _store(acc0, acc1, acc2, acc3, lse, OUT, LSE, token * o_t + heads * o_h,
                   token * lse_t + heads, v_scale, LN2, ok, HAS_LSE, EIGHT)  # fmt: skip
