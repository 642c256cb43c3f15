"""How do parts of a tile become one? Attention states in a workspace, and what merges them in order."""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.softmax import finish, value_scale
from polyattn_triton.kernels.tiles import in_elements, my_stretch, part_at, store_tile, tile_of


@triton.jit
def _following(first, start, i, APART: tl.constexpr, LISTED: tl.constexpr):
    """Where a tile's part `start + i` lies, after its first program (`schedule.part_of`) or split.

    The constant `i` is added last, to 64 bits: all parts are then loaded by offsets of one address.
    """
    if LISTED:
        at = first + tl.where(start + i == 0, APART, 0) + start * (2 * APART) + i * (2 * APART)
    else:
        at = first + start * APART + i * APART
    return at


@triton.jit
def merged(
    PARTS, PART_LSE, first, count, row_ok, ROWS: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr, SUMMED: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the `count` <= `AT_ONCE` even splits of `ROWS` rows, in their order: output, maximum, sum.

    `first`: where the rows lie in the first split; the others' follow. `SUMMED`: parts have no
    softmax, so that nothing is to be divided by. `ONCE`: each LSE is loaded once, into all threads of
    its row, so that no maximum passes between threads. H200, heads of 64: 0.73 to 0.97 of a step; of
    128, 0.98 to 1.015, and over e4m3 to 1.08, as ptxas then has the loop over keys wait for blocks.
    """
    first = first.to(tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, AT_ONCE)
    each = ()
    m = tl.full([ROWS], float("-inf"), tl.float32)
    if not ONCE:
        # Other programs wrote these a moment ago: loaded past the L1.
        lse = tl.load(
            PART_LSE + first[:, None] + offs_p[None, :] * ROWS,
            mask=row_ok[:, None] & (offs_p < count)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        m = tl.max(lse, 1)
        base = tl.where(m == float("-inf"), 0.0, m)
        l = tl.sum(tl.exp2(lse - base[:, None]), 1)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for i in tl.static_range(AT_ONCE):  # unrolled, so that all these loads are in flight
        part = first + i * ROWS
        ok = row_ok & (i < count)
        x = tl.load(
            PARTS + part[:, None] * DV + offs_dv[None, :],
            mask=ok[:, None] & (offs_dv < DV)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        one = tl.load(PART_LSE + part, mask=ok, other=float("-inf"), cache_modifier=".cg")
        if ONCE:
            each += ((one, x),)  # type: ignore[assignment]
            m = tl.maximum(m, one)
        else:
            acc += x * tl.exp2(one - base)[:, None]
    if ONCE:
        base = tl.where(m == float("-inf"), 0.0, m)
        l = tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(AT_ONCE):
            weight = tl.exp2(each[i][0] - base)
            l += weight
            acc += each[i][1] * weight[:, None]
    if SUMMED:
        l = tl.full([ROWS], 1.0, tl.float32)
    return acc, m, l


@triton.jit
def _gathered(
    PARTS, PART_LSE, first, count, row_ok, APART: tl.constexpr, LISTED: tl.constexpr,
    ROWS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """Merge any number of parts, `APART` rows from one another, with one load for all of them.

    Where parts are loaded one by one, ptxas leaves few in flight. A launch of merges alone has room.
    """
    first = first.to(tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, AT_ONCE)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(0, count, AT_ONCE):
        part = _following(first[None, :], start, offs_p[:, None], APART, LISTED)
        ok = row_ok[None, :] & (start + offs_p < count)[:, None]
        x = tl.load(
            PARTS + part[:, :, None] * DV + offs_dv[None, None, :],
            mask=ok[:, :, None] & (offs_dv < DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.load(PART_LSE + part, mask=ok, other=float("-inf"), cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        weights = tl.exp2(lse - base[None, :])
        l = l * alpha + tl.sum(weights, 0)
        acc = acc * alpha[:, None] + tl.sum(x * weights[:, :, None], 0)
        m = m_new
    if SUMMED:
        l = tl.full([ROWS], 1.0, tl.float32)
    return acc, m, l


@triton.jit
def store_part(acc, m, l, PARTS, PART_LSE, at, row_ok, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Store rows of one part, normalised, with their LSE in base 2."""
    offs_dv = tl.arange(0, BLOCK_DV)
    safe = tl.where(l == 0.0, 1.0, l)
    store_tile(PARTS + at * DV, acc * (1.0 / safe)[:, None], offs_dv, row_ok, DV)
    tl.store(PART_LSE + at, tl.where(l == 0.0, float("-inf"), m + tl.log2(safe)), mask=row_ok)


@triton.jit
def as_merged(acc, m, l):
    """What `_gathered` makes of one part that `store_part` stores of these rows, bit for bit."""
    safe = tl.where(l == 0.0, 1.0, l)
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(safe))
    return acc * (1.0 / safe)[:, None], lse, tl.where(l == 0.0, 0.0, 1.0)


@triton.jit(do_not_specialize=["lse_t", "programs", "by_tile"])
def merge_kernel(
    PARTS, PART_LSE, OUT, LSE, SINKS, V_SCALE, OUT_SCALE, STARTS, WORK, v_scale, o_t, o_h, lse_t,
    programs, by_tile,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SLICES: tl.constexpr,
    HEIGHT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, LISTED: tl.constexpr,
    TILED: tl.constexpr, BY_TOKEN: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr, SCALES: tl.constexpr, SUMMED: tl.constexpr, ALIKE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ROWS rows of a tile of HEIGHT rows: the one that a program came into.

    Grid: (programs, HEIGHT / ROWS x SLICES, KV heads); one that ended no tile of others has nothing to
    do. `SLICES`: of a row's columns, BLOCK_DV each, where DV is as many.
    `by_tile`: (tiles, ...), where these are fewer; one that has an uncut tile has nothing to do.
    `TILED`: tiles are of rows, else of sequences. `BY_TOKEN`: sequences are of one token each.
    Not `LISTED`: of a sequence's even splits, `programs` of each; the grid is of sequences.
    `ALIKE`: a step has classes, each with a merge. Elsewhere nothing waits for a merge's programs, and
    to let the next launch be scheduled costs 8,192 of them 4 us (H200).
    """
    if EARLY and ALIKE:  # the merge of the next class may be scheduled, too
        tl.extra.cuda.gdc_launch_dependents()
    o_t, o_h = in_elements((o_t, o_h), UNIT)
    program = tl.program_id(0)
    kv_head = tl.program_id(2)
    v_scale = value_scale(v_scale, V_SCALE, OUT_SCALE, kv_head, SCALES)
    if LISTED:
        share = tl.load(WORK)
        if by_tile:
            low, high, seq, start = tile_of(WORK, program, programs, TILED)
            mine = high > low
        else:
            at, stop, _tile, low, high, seq, start = my_stretch(WORK, TILED)
            mine = at < stop
        first = low // share
        last = (high - 1) // share
        mine = mine & (first < last) & ((by_tile != 0) | (last == program))
        count = last - first + 1
        part = part_at(2 * first, kv_head, programs)
    else:
        seq = program
        start = 0
        mine = True
        count = programs
        part = (seq * tl.num_programs(2) + kv_head) * programs
    token0 = seq
    query_len = 1
    if not BY_TOKEN:
        token0 = tl.load(STARTS + seq, mask=mine, other=0)
        query_len = tl.load(STARTS + seq + 1, mask=mine, other=0) - token0
    above = tl.program_id(1) // SLICES * ROWS
    mine = mine & (start + above < query_len * G)
    if EARLY:  # the parts are complete from here on
        tl.extra.cuda.gdc_wait()
    if mine:
        rows = above + tl.arange(0, ROWS)
        column = tl.program_id(1) % SLICES * BLOCK_DV
        ok = (start + rows < query_len * G) & (rows < HEIGHT)
        acc, m, l = _gathered(
            PARTS + column, PART_LSE, part * HEIGHT + rows, count, ok, HEIGHT, LISTED, ROWS, DV,
            BLOCK_DV, AT_ONCE, SUMMED,
        )  # fmt: skip
        finish(
            acc, m, l, OUT + column, LSE, SINKS, v_scale, (token0 + (start + rows) // G).to(tl.int64),
            kv_head * G + (start + rows) % G, ok,
            o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE, column == 0,
        )  # fmt: skip
