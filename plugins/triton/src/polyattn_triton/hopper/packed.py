"""Decode over numbers of 4 or 2 bits, or e4m3, for Hopper, in Gluon: what `kernels.decode` computes.

A warp is a program and attends to 32 keys at a time. Keys are the rows of the first product and values'
columns those of the second, so that a product's short side is the heads of one KV head. Numbers pass
from shared memory to the tensor cores' registers in units of 16 bits, which hold four numbers: a unit's
first numbers, its second and so on are four operands, whose columns are every fourth of a head. So none
is moved once it is unpacked, two at a time, and multiplied by its group's scale. Of 2 bits a unit holds
eight numbers, of e4m3 two, which have no scales.

Of int4 an operand is a group of 32 instead: its codes are multiplied as they are, and its scale
multiplies the group's part of the scores, and the weights.

Gluon has no interpreter: CI compiles this ahead of time, and a GPU checks its values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from polyattn_triton.hopper.names import barrier
from polyattn_triton.hopper.packed_rows import (
    E4M3,
    INT4,
    LEVELS,
    MXFP4,
    NVFP4,
    blocks_of_tile,
    copy_tile,
    halves_layout,
    longer,
    numbers_of,
    quads_layout,
    scale_words,
    units_layout,
    wide_layout,
    word_of,
    words_layout,
)
from polyattn_triton.hopper.unpacking import (
    BELOW,
    BESIDE,
    BYTES_BELOW,
    BYTES_BESIDE,
    CODES,
    E2M1,
    HALVES,
    INTEGERS,
    LEVELS_BELOW,
    LEVELS_BESIDE,
    POWERS,
    QUARTERS,
    STEPS,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RAISED = gl.constexpr(15)
"""Weights are 2^15 times as large, as in `kernels.decode`: float16 then holds small ones."""
LEAST = gl.constexpr(2.0**-126)
"""The smallest unit of values that rows have scales of, and factor of scores."""


UNPACKING = (
    (CODES, INTEGERS, 0),
    (E2M1, E2M1, 1),
    (POWERS, POWERS, 1),
    (STEPS, STEPS, 2),
    (QUARTERS, QUARTERS, 2),
    (BESIDE, BELOW, 0),
    (BESIDE, BELOW, 0),
    (BYTES_BESIDE, BYTES_BELOW, 0),
    (LEVELS_BESIDE, LEVELS_BELOW, 0),
)
"""By form: the function that decodes two units of one row, and of two rows; registers of their scales."""


OF_QUADS = gl.constexpr(HALVES)


@gluon.constexpr_function
def instructions(form, below):
    """The function that decodes two units, with its registers and types; `below`: of two rows."""
    registers = ["=r"] * numbers_of(form) + ["r"] * (1 + UNPACKING[form][2])
    kind = gl.bfloat16 if form == MXFP4 else gl.float16
    return UNPACKING[form][below], ",".join(registers), (kind,) * numbers_of(form)


@gluon.jit
def _numbers(units, by, FORM: gl.constexpr, BELOW_ONE: gl.constexpr):
    """Return operands, a unit's first numbers, its second and so on, of units int16.

    `by`: their groups' scales. `BELOW_ONE`: two units are of two rows, not of one. Of nvfp4 it is the
    -2^14th part. Of codes beside one another (int4) it is the 2^24th part, and of the second and the
    fourth the 2^20th.
    """
    MADE: gl.constexpr = instructions(FORM, BELOW_ONE)
    UNSCALED: gl.constexpr = FORM >= E4M3 or FORM == INT4
    read = (units,) if UNSCALED else (units, by)
    return gl.inline_asm_elementwise(MADE[0], MADE[1], read, MADE[2], is_pure=True, pack=2)


@gluon.jit
def _powers(codes):
    """Return the powers of two that codes of e8m0 stand for, bfloat16: 0 is 2^-127, 255 NaN."""
    codes = codes.to(gl.int32)
    bits = gl.maximum(codes << 7, 64) | (((codes + 1) >> 2) & 64)
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _place(row, i, FORM: gl.constexpr, OF_KEYS: gl.constexpr):
    """Return which of a head's numbers the rows of operand `i` are."""
    if FORM == INT4:
        place = 32 * i + row % 8 * 4 + row // 8
    elif FORM >= E4M3 and OF_KEYS:
        place = row // 2 * 2 * numbers_of(FORM) + row % 2 + 2 * i
    else:
        place = numbers_of(FORM) * row + i
    return place


@gluon.jit
def _product(a, b, acc):
    """Add an operand's product to a tile of the accumulator."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return mma_v2(
        gl.convert_layout(a.reshape((acc.shape[0], b.shape[0])), A, assert_trivial=True), b, acc
    )


@gluon.jit
def _groups(x, COUNT: gl.constexpr):
    """Return the four parts of a tensor's last dimension, each flat."""
    even, odd = gl.split(x.reshape((COUNT, 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _codes(units, SHAPE: gl.constexpr, ORDER: gl.constexpr, BELOW_ONE: gl.constexpr):
    """Return int4's operands, a group's codes each, of units whose last dimension are groups.

    `ORDER`: of the others and of a unit's four numbers, so that a key's lie in one dimension.
    """
    groups = _groups(units, SHAPE[0] * SHAPE[1])
    operands = ()
    for i in gl.static_range(4):
        a, b, c, d = _numbers(groups[i], groups[i], INT4, BELOW_ONE)
        codes = gl.join(gl.join(a, b), gl.join(c, d)).reshape((SHAPE[0], SHAPE[1], 2, 2))
        operands = longer(operands, codes.permute(ORDER))
    return operands


@gluon.jit
def _along(x, LAYOUT: gl.constexpr):
    """Return keys' scales as they meet a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def _times(a, b):
    """Multiply pairs of float16."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", (a, b), gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _exponent(held, BLOCK_N: gl.constexpr):
    """Return the exponent of the largest of a tile's scales, at least 0."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = held._reinterpret(gl.int16, [BLOCK_N, 4], PLAIN).load(LANES)
    largest = gl.max(gl.max(scales.to(gl.int32) & 0x7FFF, 1), 0)
    return gl.maximum((largest >> 10) - 15, 0).to(gl.float32)


@gluon.jit
def _halves(quads, AXIS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return nvfp4's scales, float16 (keys, groups), or (groups, keys), of a key's two words of four.

    A lane's units are of one of each pair of groups. What it converts at once is two of one key, or
    one of two keys, as they then meet a register's two units.
    """
    LANES: gl.constexpr = halves_layout(BLOCK_N, AXIS)
    if AXIS == 1:
        one, other = gl.split(quads.reshape((BLOCK_N // 2, 2, 2)).permute((0, 2, 1)))
        WORDS: gl.constexpr = gl.SliceLayout(2, LANES)
        PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LANES))
        which = gl.where(gl.arange(0, 2, layout=PAIR) == 0, 0x6240, 0x7351)[None, None, :]
        one = gl.convert_layout(one, WORDS, assert_trivial=True)[:, :, None]
        other = gl.convert_layout(other, WORDS, assert_trivial=True)[:, :, None]
    else:
        one, other = gl.split(quads)
        WORD: gl.constexpr = gl.SliceLayout(1, LANES)
        which = gl.where(gl.arange(0, 2, layout=gl.SliceLayout(0, LANES)) == 0, 0x6420, 0x7531)
        which = which[None, :]
        one = gl.convert_layout(one, WORD, assert_trivial=True)[:, None]
        other = gl.convert_layout(other, WORD, assert_trivial=True)[:, None]
    a, b, c, d = gl.inline_asm_elementwise(
        OF_QUADS, "=h,=h,=h,=h,r,r,r", (one, other, which), (gl.float16,) * 4, is_pure=True, pack=1
    )
    scales = gl.join(gl.join(a, b), gl.join(c, d))
    if AXIS == 1:  # (pairs of keys, words, halves, keys of a pair, pairs of groups)
        scales = scales.permute((1, 4, 2, 0, 3)).reshape((8, BLOCK_N))
    else:  # (keys, halves, pairs of groups, words)
        scales = scales.permute((0, 3, 2, 1)).reshape((BLOCK_N, 8))
    return scales


@gluon.jit
def _scales(
    held, UNITS_OF: gl.constexpr, AXIS: gl.constexpr, FORM: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Load a tile's scales as they meet units, in a layout of three dimensions that lacks `AXIS`."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LAYOUT: gl.constexpr = gl.SliceLayout(AXIS, UNITS_OF)
    if FORM == NVFP4:
        quads = held._reinterpret(gl.int32, [BLOCK_N, 2], PLAIN).load(quads_layout(BLOCK_N, AXIS))
        scales = gl.convert_layout(_halves(quads, AXIS, BLOCK_N), LAYOUT, assert_trivial=True)
    elif FORM == MXFP4:
        ROW: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
        scales = _powers(held._reinterpret(gl.uint8, [BLOCK_N, 4], PLAIN).load(ROW))
        if AXIS == 1:
            scales = scales.permute((1, 0))
        scales = gl.convert_layout(scales, LAYOUT)
    else:
        KIND: gl.constexpr = gl.float16 if FORM == INT4 else gl.int32
        held = held._reinterpret(KIND, [BLOCK_N, 4], PLAIN)
        if AXIS == 1:
            held = held.permute((1, 0))
        scales = held.load(LAYOUT)
    return scales


@gluon.jit
def _row_scales(held, LAYOUT: gl.constexpr, FORM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load a tile's scales, one a row, float32 (keys, 1)."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if FORM == LEVELS:
        bits = held._reinterpret(gl.int32, [BLOCK_N, 1], PLAIN).load(LAYOUT).to(gl.int16)
        scales = bits.to(gl.float16, bitcast=True).to(gl.float32)
    else:
        scales = held._reinterpret(gl.float32, [BLOCK_N, 1], PLAIN).load(LAYOUT)
    return scales


@gluon.jit
def _attend(
    Q, K, V, BT, scale, q_t, q_h, k_b, v_b, token, kv_head, length, begin, end, step,
    k_codes, v_codes, k_scales, v_scales, k_t: gl.constexpr, v_t: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Attend with a token's heads to its key tiles from `begin` to `end` by `step`: sums, LSE."""
    COUNT: gl.constexpr = numbers_of(FORM)
    UNITS: gl.constexpr = D // COUNT
    WORDS: gl.constexpr = 2 * UNITS // word_of(FORM)
    KIND: gl.constexpr = gl.bfloat16 if FORM == MXFP4 else gl.float16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    WIDE: gl.constexpr = wide_layout(FORM)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [0, 1])
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    SIGN: gl.constexpr = -1.0 if FORM == NVFP4 else 1.0
    RAISED_BY: gl.constexpr = 2.0**14 if FORM == NVFP4 else D**-0.5 if FORM == LEVELS else 1.0
    SCORED_BY: gl.constexpr = 2.0**20 if FORM == INT4 else RAISED_BY
    RAISE: gl.constexpr = RAISED - 1 if FORM == INT4 else RAISED

    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WIDE)) % 16
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, WIDE))
    keys = (k_codes, k_scales, K, row[:, None] * k_t + word[None, :], k_b, k_t)
    values = (v_codes, v_scales, V, row[:, None] * v_t + word[None, :], v_b, v_t)
    last = gl.minimum(gl.cdiv(length, BLOCK_N), end)
    # A tile's blocks are known before its turn: its copies don't wait for the table.
    blocks = blocks_of_tile(BT, begin, length, BLOCK_N, BLOCK_SIZE)
    for i in gl.static_range(STAGES - 1):
        tile = begin + i * step
        if tile < last:
            copy_tile(keys, blocks, tile, i, length, WORDS, BLOCK_N, BLOCK_SIZE, FORM)
            copy_tile(values, blocks, tile, i, length, WORDS, BLOCK_N, BLOCK_SIZE, FORM)
        async_copy.commit_group()
        blocks = blocks_of_tile(BT, tile + step, length, BLOCK_N, BLOCK_SIZE)

    # Powers of two keep queries inside of float16's range.
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(1, QUERY))
    head = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(0, QUERY))
    AT = Q + token * q_t + (kv_head * G + head).to(gl.int64)[None, :] * q_h
    mine = (head < G)[None, :] & (unit < UNITS)[:, None]
    rows = ()
    most = gl.zeros([UNITS, BLOCK_G], gl.float32, QUERY)
    for i in gl.static_range(COUNT):
        of_query = gl.load(AT + _place(unit, i, FORM, True)[:, None], mask=mine, other=0.0)
        of_query = of_query.to(gl.float32)
        most = gl.maximum(most, gl.abs(of_query))
        rows = longer(rows, of_query)
    most = gl.max(most, 0)
    power = (most.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.where(power == 0.0, 1.0, power)
    q = ()
    less = ()  # codes begin at 0, int4's numbers at -8
    acc = ()
    for i in gl.static_range(COUNT):
        of_query = (rows[i] / (power * SIGN)[None, :]).to(KIND)
        if FORM == INT4:
            of_query = of_query.to(gl.float32)
            less = longer(less, gl.convert_layout(gl.sum(of_query, 0) * (-8.0 * 2.0**-20), HEAD))
            of_query = (of_query * gl.where(unit // 8 % 2 == 0, 16.0, 1.0)[:, None]).to(KIND)
        q = longer(q, gl.convert_layout(of_query, B))
        acc = longer(acc, gl.zeros([UNITS, BLOCK_G], gl.float32, SCORES))
    # Scores are compared before they are scaled: their factor is above 0.
    by = gl.convert_layout(power, HEAD) * (scale * LOG2E * SCORED_BY)
    by = gl.where(by < LEAST, LEAST, by)

    m = gl.full([BLOCK_G], float("-inf"), gl.float32, HEAD)
    sums = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, SCORES)
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    LIE: gl.constexpr = units_layout(UNITS)
    SPAN: gl.constexpr = UNITS // (8 if FORM == NVFP4 else 4)  # of the units that have one scale
    BY_ROW: gl.constexpr = FORM > E4M3
    of_values = length.to(gl.float32) * 0.0 + LEAST
    slot = 0
    for tile in range(begin, last, step):
        async_copy.wait_group(STAGES - 2)
        ahead = tile + (STAGES - 1) * step
        to = slot - 1
        if to < 0:
            to = STAGES - 1
        if ahead < last:
            copy_tile(keys, blocks, ahead, to, length, WORDS, BLOCK_N, BLOCK_SIZE, FORM)
            copy_tile(values, blocks, ahead, to, length, WORDS, BLOCK_N, BLOCK_SIZE, FORM)
        async_copy.commit_group()
        blocks = blocks_of_tile(BT, ahead + step, length, BLOCK_N, BLOCK_SIZE)

        k = k_codes.index(slot)._reinterpret(gl.int16, [BLOCK_N, UNITS], LIE).load(A)
        if FORM >= E4M3:
            k = _numbers(k, k, FORM, False)
        elif FORM == INT4:
            k = k.reshape((BLOCK_N, 4, 8))
            OF_CODES_K: gl.constexpr = k.type.layout
            k_by = _groups(_scales(k_scales.index(slot), OF_CODES_K, 2, FORM, BLOCK_N), BLOCK_N)
            k = _codes(k.permute((0, 2, 1)), (BLOCK_N, 8), (0, 3, 2, 1), False)
        else:
            k = k.reshape((BLOCK_N, UNITS // SPAN, SPAN))
            OF_K: gl.constexpr = k.type.layout
            k_by = _scales(k_scales.index(slot), OF_K, 2, FORM, BLOCK_N)[:, :, None]
            k = _numbers(k, k_by, FORM, False)
        s = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, SCORES)
        for i in gl.static_range(COUNT):
            if FORM == INT4:
                part = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, SCORES) + less[i][None, :]
                s += _product(k[i], q[i], part) * _along(k_by[i], SCORES).to(gl.float32)
            else:
                s = _product(k[i], q[i], s)
        if BY_ROW:
            s = s * _row_scales(k_scales.index(slot), SCORES, FORM, BLOCK_N)
        s = gl.where((key < length - tile * BLOCK_N)[:, None], s, float("-inf"))
        top = gl.max(s, 0) * by
        if FORM == INT4:  # weights times scales stay inside of float16's range
            top += _exponent(v_scales.index(slot), BLOCK_N)
        m_new = gl.maximum(m, top)
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s * by[None, :] - (m_new - RAISE)[None, :])
        m = m_new
        sums = sums * alpha[None, :] + p
        if BY_ROW:  # weights are multiplied by a value's scale over a power of two above all so far
            v_by = _row_scales(v_scales.index(slot), SCORES, FORM, BLOCK_N)
            top = gl.max(gl.max(v_by, 0), 0)
            above = (top.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True) * 2
            above = gl.maximum(of_values, above)
            alpha = alpha * (of_values / above)
            p = p * (v_by / above)
            of_values = above
        weights = gl.convert_layout(p.to(KIND), B)
        v = v_codes.index(slot)._reinterpret(gl.int16, [BLOCK_N, UNITS], LIE)
        v = v.permute((1, 0)).load(A)
        if FORM >= E4M3:
            v = _numbers(v, v, FORM, True)
        elif FORM == INT4:
            v = v.reshape((4, 8, BLOCK_N))
            OF_CODES_V: gl.constexpr = v.type.layout
            v_by = _scales(v_scales.index(slot), OF_CODES_V, 1, FORM, BLOCK_N)
            v_by = _groups(v_by.permute((1, 0)), BLOCK_N)
            v = _codes(v.permute((1, 2, 0)), (8, BLOCK_N), (3, 2, 0, 1), True)
        else:
            v = v.reshape((UNITS // SPAN, SPAN, BLOCK_N))
            OF_V: gl.constexpr = v.type.layout
            v_by = _scales(v_scales.index(slot), OF_V, 1, FORM, BLOCK_N)[:, None, :]
            v = _numbers(v, v_by, FORM, True)
        so_far = acc
        acc = ()
        for i in gl.static_range(COUNT):
            one = so_far[i] * alpha[None, :]
            if FORM == INT4:
                of_group = _times(weights, _along(v_by[i], B))
                acc = longer(acc, _product(v[i], of_group, one))
            else:
                acc = longer(acc, _product(v[i], weights, one))
        slot += 1
        if slot == STAGES:
            slot = 0
    async_copy.wait_group(0)
    total = gl.sum(sums, 0)
    safe = gl.where(total == 0.0, 1.0, total)
    norm = (SIGN * RAISED_BY / safe)[None, :]
    if BY_ROW:
        norm = norm * of_values
    lse = gl.where(total == 0.0, float("-inf"), m - RAISE + gl.log2(safe))
    so_far = acc
    acc = ()
    for i in gl.static_range(COUNT):
        acc = longer(acc, so_far[i] * norm)
    return acc, lse


@gluon.jit
def _store(
    acc, lse, OUT, LSE, at, lse_at, by, lse_by, ok, HAS_LSE: gl.constexpr, FORM: gl.constexpr
):
    """Store the heads' outputs, whose numbers come from one operand after another, and their LSE."""
    LAYOUT: gl.constexpr = acc[0].type.layout
    COUNT: gl.constexpr = numbers_of(FORM)
    unit = gl.arange(0, acc[0].shape[0], layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(COUNT):
        TO = OUT + at[None, :] + _place(unit, i, FORM, False)[:, None]
        gl.store(TO, (acc[i] * by).to(OUT.dtype.element_ty), mask=ok[None, :])
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
    q_t, q_h, k_b, k_h, v_b, v_h, o_t, o_h, lse_t, bt_s, bt_end, splits,
    G: gl.constexpr, D: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr,
    HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, LISTED: gl.constexpr, SCALES: gl.constexpr,
    K_T: gl.constexpr, V_T: gl.constexpr,
):  # fmt: skip
    """A token of one sequence, the heads of one KV head, over all their keys or some of them.

    Grid and arguments as `kernels.decode.decode_kernel`'s; `merge_kernel` merges parts. `FORM`: `INT4`...
    `K_T`, `V_T`: bytes from a key to the next of a block, which are constants so that a copy's rows are
    one address and distances that the instruction holds.
    """
    gl.static_assert(gl.num_warps() == 1)
    gdc_launch_dependents()
    SIZE: gl.constexpr = word_of(FORM)
    WORD: gl.constexpr = gl.int32 if SIZE == 4 else gl.int64
    WORDS: gl.constexpr = 2 * D // numbers_of(FORM) // SIZE
    CODES: gl.constexpr = words_layout(WORDS, SIZE)
    SCALED: gl.constexpr = 1 if FORM == E4M3 else BLOCK_N
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_codes = gl.allocate_shared_memory(WORD, [STAGES, BLOCK_N, WORDS], CODES)
    v_codes = gl.allocate_shared_memory(WORD, [STAGES, BLOCK_N, WORDS], CODES)
    k_scales = gl.allocate_shared_memory(WORD, [STAGES, SCALED, scale_words(FORM)], LINE)
    v_scales = gl.allocate_shared_memory(WORD, [STAGES, SCALED, scale_words(FORM)], LINE)
    # Programs of all heads begin one after another: where rows lie by token, they share lines of memory.
    number = gl.program_id(0) + gl.program_id(1) * gl.num_programs(0)
    program = number // gl.num_programs(1)
    kv_head = number % gl.num_programs(1)
    scale = _scaled(scale, Q_SCALE, K_SCALE, kv_head, False, SCALES)
    v_scale = _scaled(v_scale, V_SCALE, OUT_SCALE, kv_head, True, SCALES)
    KEYS = K.to(gl.pointer_type(WORD)) + kv_head.to(gl.int64) * (k_h // SIZE)
    VALUES = V.to(gl.pointer_type(WORD)) + kv_head.to(gl.int64) * (v_h // SIZE)
    k_b = k_b // SIZE
    v_b = v_b // SIZE
    k_t: gl.constexpr = K_T // SIZE
    v_t: gl.constexpr = V_T // SIZE
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
            acc, lse = _attend(
                Q, KEYS, VALUES, BT + token * bt_s, scale, q_t, q_h, k_b, v_b,
                token, kv_head, gl.load(SEQ_LENS + seq),
                gl.maximum(at - low - item, 0), gl.minimum(stop, high) - low - item, 1,
                k_codes, v_codes, k_scales, v_scales, k_t, v_t,
                G, D, BLOCK_G, BLOCK_N, BLOCK_SIZE, STAGES, FORM,
            )  # fmt: skip
            first = low // share
            if (high - 1) // share > first:
                part = kv_head * 2 * programs + 2 * program + (first == program).to(gl.int32)
                place = part * ROWS + head
                _store(acc, lse, PARTS, PART_LSE, place * D, place,
                       1.0, 1.0, ok, True, FORM)  # fmt: skip
            else:
                _store(acc, lse, OUT, LSE, token * o_t + heads.to(gl.int64) * o_h,
                       token * lse_t + heads, v_scale, LN2, ok, HAS_LSE, FORM)  # fmt: skip
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
        acc, lse = _attend(
            Q, KEYS, VALUES, BT + token * bt_s, scale, q_t, q_h, k_b, v_b,
            token, kv_head, length, begin, length, step, k_codes, v_codes, k_scales, v_scales,
            k_t, v_t,
            G, D, BLOCK_G, BLOCK_N, BLOCK_SIZE, STAGES, FORM,
        )  # fmt: skip
        if SPLIT:
            part = (program * gl.num_programs(1) + kv_head) * splits + begin
            place = part * ROWS + head
            _store(acc, lse, PARTS, PART_LSE, place * D, place, 1.0, 1.0, ok, True, FORM)
        else:
            _store(acc, lse, OUT, LSE, token * o_t + heads.to(gl.int64) * o_h,
                   token * lse_t + heads, v_scale, LN2, ok, HAS_LSE, FORM)  # fmt: skip
