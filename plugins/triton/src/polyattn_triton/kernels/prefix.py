"""The decode kernel of rows that share keys: each shared key is read once for a tile of their tokens.

A program goes through its pieces (`prefix_schedule`): tokens of rows over a chunk of the keys that these
share, or one row's over its own. Two heights of tiles in one launch; what a row has of each piece
is a part, and `merge_parts_kernel` merges a row's parts in the order of its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.decode import power_below
from polyattn_triton.kernels.parts import store_part
from polyattn_triton.kernels.softmax import finish, logit_scale, logits, value_scale
from polyattn_triton.kernels.tiles import (
    blocks_in_table,
    in_elements,
    load_cached_rows,
    load_rows,
    load_tile,
)
from polyattn_triton.prefix_schedule import PIECE

FIELDS = tl.constexpr(PIECE)


@triton.jit
def _over_keys(
    acc, m, sums, q, K, V, BT, row_scale, soft_cap, row_pos, slope, k_b, k_t, v_b, v_t, bt_end, begin,
    stop, end, MASK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIKE: tl.constexpr,
    ACROSS: tl.constexpr, RAISED: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys from `begin` to `stop`; without `MASK` none reaches beyond `end`."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    block = blocks_in_table(BT, begin + offs_n, bt_end, BLOCK_SIZE)
    for start in range(begin, stop, BLOCK_N):
        key_pos = start + offs_n
        offset = key_pos % BLOCK_SIZE
        row = block.to(tl.int64)
        k_row = row * k_b + offset * k_t
        v_row = k_row
        if not ALIKE:
            v_row = row * v_b + offset * v_t
        # The next tile's blocks, a step ahead, as in `decode`.
        block = blocks_in_table(BT, key_pos + BLOCK_N, bt_end, BLOCK_SIZE)
        if MASK or READ_K is not None:
            held = key_pos < end
            k = load_cached_rows(K, k_row, held, offs_d, BLOCK_N, D, BLOCK_D, READ_K)
            v = load_cached_rows(V, v_row, held, offs_dv, BLOCK_N, DV, BLOCK_DV, READ_V)
        else:
            k = load_rows(K + k_row[:, None] + offs_d[None, :], offs_d, D, BLOCK_D)
            v = load_rows(V + v_row[:, None] + offs_dv[None, :], offs_dv, DV, BLOCK_DV)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        s = logits(
            s, row_pos, key_pos, end, slope, row_scale, soft_cap, 0,
            MASK, CAUSAL, WINDOW, 0, 0, SOFT_CAP, ALIBI, None, 0,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if CAUSAL or WINDOW > 0:  # of a row that has seen no key there is nothing yet
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s - (base - RAISED)[:, None])
        if ACROSS:
            sums = sums * alpha[:, None] + p
        else:
            sums = sums * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, sums


@triton.jit
def _attend(
    Q, K, V, BT, ROWS_AT, POSITIONS, SLOPES, PARTS, PART_LSE, scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
    seq, begin, end, count, part, kv_head,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIKE: tl.constexpr, READ_K: tl.constexpr,
    READ_V: tl.constexpr, ROWS_WAY: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """Attend with `count` rows' heads of one KV head to the keys [begin, end), and store their part."""
    ACROSS: tl.constexpr = BLOCK_M <= 16  # a row lies across the warps
    offs_d = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    row_ok = rows < count * G
    token = tl.load(ROWS_AT + rows // G, mask=row_ok, other=0).to(tl.int64)
    q_row = token * q_t + (kv_head * G + rows % G).to(tl.int64) * q_h
    q = load_tile(Q + q_row, offs_d, row_ok, D)
    row_pos = rows
    slope = 0.0
    if CAUSAL or WINDOW > 0 or ALIBI:
        row_pos = tl.load(POSITIONS + token, mask=row_ok, other=end - 1)
    if ALIBI:
        slope = tl.load(SLOPES + kv_head * G + rows % G, mask=row_ok, other=0.0)
    # As in `decode`: small floats are multiplied in float16, which powers of two make wide enough.
    BY_HALF: tl.constexpr = (
        K.dtype.element_ty.is_fp8() or ROWS_WAY >= 8
    ) and Q.dtype.element_ty == tl.bfloat16
    RAISED: tl.constexpr = 15 if BY_HALF else 0
    row_scale = scale
    if BY_HALF:
        unit = power_below(tl.max(tl.abs(q.to(tl.float32)), 1))
        q = (q.to(tl.float32) / unit[:, None]).to(tl.float16)
        row_scale = scale * unit[:, None]
    K += kv_head.to(tl.int64) * k_h
    V += kv_head.to(tl.int64) * v_h
    BT += seq.to(tl.int64) * bt_s
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if ACROSS:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up across once, after the loop
    else:
        sums = tl.zeros([BLOCK_M], tl.float32)
    whole = begin
    if not ACROSS and WINDOW == 0:  # only the last keys of a run don't fill a tile
        seen = end
        if CAUSAL:  # and the later ones aren't before every token
            seen = tl.minimum(end, tl.maximum(begin, tl.min(row_pos, 0) + 1))
        whole = begin + (seen - begin) // BLOCK_N * BLOCK_N
        acc, m, sums = _over_keys(
            acc, m, sums, q, K, V, BT, row_scale, soft_cap, row_pos, slope, k_b, k_t, v_b, v_t, bt_end,
            begin, whole, end, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, SOFT_CAP,
            ALIKE, ACROSS, RAISED, READ_K, READ_V, CAUSAL, WINDOW, ALIBI,
        )  # fmt: skip
    acc, m, sums = _over_keys(
        acc, m, sums, q, K, V, BT, row_scale, soft_cap, row_pos, slope, k_b, k_t, v_b, v_t, bt_end,
        whole, end, end, True, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, SOFT_CAP,
        ALIKE, ACROSS, RAISED, READ_K, READ_V, CAUSAL, WINDOW, ALIBI,
    )  # fmt: skip
    if ACROSS:
        total = tl.sum(sums, 1)
    else:
        total = sums
    store_part(acc, m - RAISED, total, PARTS, PART_LSE, part + rows, row_ok, DV, BLOCK_DV)


@triton.jit
def _piece(WORK, piece, there):
    """A piece: whose table, the keys [begin, end), which rows, how many, where its part goes."""
    FIELD = WORK + piece * FIELDS
    seq = tl.load(FIELD, mask=there, other=0)
    begin = tl.load(FIELD + 1, mask=there, other=0)
    end = tl.load(FIELD + 2, mask=there, other=0)
    rows_at = tl.load(FIELD + 3, mask=there, other=0)
    count = tl.load(FIELD + 4, mask=there, other=0)
    lies = tl.load(FIELD + 5, mask=there, other=0)
    return seq, begin, end, rows_at, count, lies


@triton.jit(do_not_specialize=["bt_s", "bt_end", "bounds", "part_rows", "places"])
def prefix_kernel(
    Q, K, V, SLOPES, Q_SCALE, K_SCALE, PARTS, PART_LSE, BT, WORK,
    scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end, bounds, part_rows, places,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, SMALL: tl.constexpr, TALL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr, ALIKE: tl.constexpr, EARLY: tl.constexpr,
    SCALES: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr, ROWS_WAY: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The pieces that WORK has for this program. Grid: (programs, KV heads).

    `bounds`: where WORK says which pieces are whose; `places`: and where tokens are in their sequences.
    `part_rows`: of all parts of a KV head. `CAUSAL`: sequences have several tokens.
    `UNIT`: elements that the strides count in (`in_units`).
    """
    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        tl.extra.cuda.gdc_launch_dependents()
    q_t, q_h = in_elements((q_t, q_h), UNIT)
    k_b, k_t, k_h, v_b, v_t, v_h = in_elements((k_b, k_t, k_h, v_b, v_t, v_h), UNIT)
    kv_head = tl.program_id(1)
    scale = logit_scale(scale, Q_SCALE, K_SCALE, kv_head, SCALES)
    mine = WORK + bounds + tl.program_id(0)
    first = tl.load(mine)
    last = tl.load(mine + 1)
    seq, begin, end, rows_at, count, lies = _piece(WORK, first, first < last)
    for piece in tl.range(first, last, num_stages=1):
        # The next piece's fields arrive while this one is computed.
        later = _piece(WORK, tl.minimum(piece + 1, last - 1), True)
        ROWS_AT = WORK + rows_at
        POSITIONS = WORK + places
        part = kv_head * part_rows + lies
        if SMALL == TALL:
            _attend(
                Q, K, V, BT, ROWS_AT, POSITIONS, SLOPES, PARTS, PART_LSE, scale, soft_cap,
                q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
                seq, begin, end, count, part, kv_head,
                G, D, DV, BLOCK_D, BLOCK_DV, SMALL, BLOCK_N, BLOCK_SIZE, SOFT_CAP, ALIKE,
                READ_K, READ_V, ROWS_WAY, CAUSAL, WINDOW, ALIBI,
            )  # fmt: skip
        else:
            if count * G <= SMALL:
                _attend(
                    Q, K, V, BT, ROWS_AT, POSITIONS, SLOPES, PARTS, PART_LSE, scale, soft_cap,
                    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
                    seq, begin, end, count, part, kv_head,
                    G, D, DV, BLOCK_D, BLOCK_DV, SMALL, BLOCK_N, BLOCK_SIZE, SOFT_CAP, ALIKE,
                    READ_K, READ_V, ROWS_WAY, CAUSAL, WINDOW, ALIBI,
                )  # fmt: skip
            else:
                _attend(
                    Q, K, V, BT, ROWS_AT, POSITIONS, SLOPES, PARTS, PART_LSE, scale, soft_cap,
                    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
                    seq, begin, end, count, part, kv_head,
                    G, D, DV, BLOCK_D, BLOCK_DV, TALL, BLOCK_N, BLOCK_SIZE, SOFT_CAP, ALIKE,
                    READ_K, READ_V, ROWS_WAY, CAUSAL, WINDOW, ALIBI,
                )  # fmt: skip
        seq, begin, end, rows_at, count, lies = later


@triton.jit(do_not_specialize=["lse_t", "parts", "listed", "part_rows"])
def merge_parts_kernel(
    OUT, LSE, SINKS, V_SCALE, OUT_SCALE, PARTS, PART_LSE, WORK,
    v_scale, o_t, o_h, lse_t, parts, listed, part_rows,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, EARLY: tl.constexpr,
    SCALES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a token's heads, in the order listed. Grid: (tokens, G / ROWS, KV heads).

    A token without parts, a padding row, gets output 0 and LSE -inf.
    """
    o_t, o_h = in_elements((o_t, o_h), UNIT)
    token = tl.program_id(0)
    kv_head = tl.program_id(2)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok = rows < G
    offs_p = tl.arange(0, AT_ONCE)
    offs_dv = tl.arange(0, BLOCK_DV)
    v_scale = value_scale(v_scale, V_SCALE, OUT_SCALE, kv_head, SCALES)
    first = tl.load(WORK + parts + token)
    count = tl.load(WORK + parts + token + 1) - first
    PLACES = WORK + listed + first
    head_rows = kv_head * part_rows + rows
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    if EARLY:  # the parts are complete from here on
        tl.extra.cuda.gdc_wait()
    for start in range(0, count, AT_ONCE):
        some = start + offs_p < count
        places = tl.load(PLACES + start + offs_p, mask=some, other=0)
        lse = tl.load(
            PART_LSE + head_rows[:, None] + places[None, :],
            mask=ok[:, None] & some[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(lse, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(tl.exp2(lse - base[:, None]), 1)
        acc = acc * alpha[:, None]
        for i in tl.static_range(AT_ONCE):  # unrolled, so that all these loads are in flight
            there = start + i < count
            part = head_rows + tl.load(PLACES + start + i, mask=there, other=0)
            here = ok & there
            x = tl.load(
                PARTS + part[:, None] * DV + offs_dv[None, :],
                mask=here[:, None] & (offs_dv < DV)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            one = tl.load(PART_LSE + part, mask=here, other=float("-inf"), cache_modifier=".cg")
            acc += x * tl.exp2(one - base)[:, None]
        m = m_new
    finish(
        acc, m, l, OUT, LSE, SINKS, v_scale, token.to(tl.int64), kv_head * G + rows, ok,
        o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
    )  # fmt: skip
