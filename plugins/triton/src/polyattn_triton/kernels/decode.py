"""The decode kernel: a query token a sequence, or a few, over its pages; and what merges parts.

Split-KV as in Flash-Decoding (Dao et al., 2023). The rows of a tile are (query token, head of one
group). Written for latency: one loop, whose step reads nothing that it must wait for. Sequences of
even lengths are split alike; others are dealt out as `schedule` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.cache_rope import (
    frequencies,
    load_pairs,
    load_rest,
    pair_block,
    places_in_tile,
    rest_block,
    turn_by,
    turned,
    turned_queries,
)
from polyattn_triton.kernels.parts import merged, store_part
from polyattn_triton.kernels.softmax import finish, logit_scale, logits, value_scale
from polyattn_triton.kernels.tiles import (
    blocks_in_table,
    even_piece,
    in_elements,
    keys_seen,
    load_cached_rows,
    load_held_rows,
    load_tile,
    my_stretch,
    next_tile,
    part_at,
    piece_of,
    placed,
    row_places,
    tile_at,
    tiles_seen,
    times_longer,
)


@triton.jit
def power_below(x):
    """The largest power of two that is no larger than a float32 x; 1 for zero."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0.0, 1.0, power)


@triton.jit
def _split_pairs(pairs, LIKE, q):
    """Return the even and the odd columns, as q's type, of 8-bit values that were loaded in pairs.

    Values of 16 bits turn on their way from shared memory; those of 8 would come one by one.
    """
    if LIKE.dtype.element_ty.is_fp8():
        even = (pairs & 0xFF).to(tl.uint8).to(LIKE.dtype.element_ty, bitcast=True)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(LIKE.dtype.element_ty, bitcast=True)
    else:
        even = (pairs << 8) >> 8
        odd = pairs >> 8
    return even.to(q.dtype), odd.to(q.dtype)


@triton.jit
def _attend(
    Q, K, V, SLOPES, INPUTS, BT, scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
    seq, kv_head, token0, query_len, seq_len, start, begin, end, step,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    ROWS_OF: tl.constexpr, CHANGE: tl.constexpr, WAY: tl.constexpr, FEW: tl.constexpr,
    ALIKE: tl.constexpr, PAIRED: tl.constexpr, ROPE: tl.constexpr, SPAN: tl.constexpr,
    TURNS_AT: tl.constexpr, SINGLE: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr,
    ROWS_WAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one tile's rows to its key tiles from `begin` to `end` by `step`: acc, m, l.

    `SINGLE`: the layer's dtype is float32, so queries in e4m3 are multiplied in it. `ROWS_WAY`: bits,
    1 the cache has rows of bytes, 2 and 4 keys' and values' elements of even and odd places come apart,
    8 as float16 (`functions.rows`).
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    K_APART: tl.constexpr = (ROWS_WAY & 2) > 0
    V_APART: tl.constexpr = (ROWS_WAY & 4) > 0
    PAIRS: tl.constexpr = PAIRED and WAY < 2
    offs_dv = tl.arange(0, BLOCK_DV // 2 if PAIRS else BLOCK_DV)
    rows = tl.arange(0, BLOCK_M)
    if FEW:
        in_query, head = row_places(start, rows, kv_head, G, BLOCK_M)
        row_ok = in_query < query_len
        q_row = (token0 + in_query).to(tl.int64) * q_t + head.to(tl.int64) * q_h
        row_pos = seq_len - query_len + in_query
        first_pos = seq_len - query_len + start // G
        last_row = tl.minimum(start + BLOCK_M, query_len * G) - 1
        last_pos = seq_len - query_len + last_row // G
    else:
        head = kv_head * G + rows
        row_ok = rows < G
        q_row = token0.to(tl.int64) * q_t + head.to(tl.int64) * q_h
        row_pos = seq_len - 1 + rows * 0
        first_pos = seq_len - 1
        last_pos = first_pos
    q = load_tile(Q + q_row, offs_d, row_ok, D)
    # A float of 8 or 4 bits becomes float16 in one instruction and bfloat16 in several. Powers of two
    # keep queries and weights inside of float16's range: the weights' is not undone, since it is in
    # their sum too (without a softmax there is none).
    HALF_ROWS: tl.constexpr = ROWS_WAY >= 8
    SMALL: tl.constexpr = (
        (K.dtype.element_ty.is_fp8() or HALF_ROWS)
        and Q.dtype.element_ty == tl.bfloat16
        and ROPE == 0
    )
    BY_HALF: tl.constexpr = SMALL and WAY < 2
    HALF_QUERY: tl.constexpr = Q.dtype.element_ty.is_fp8() and not SINGLE
    RAISED: tl.constexpr = 15 if (BY_HALF or HALF_QUERY) and WAY < 2 else 0
    if Q.dtype.element_ty.is_fp8():
        q = q.to(tl.float32 if SINGLE else tl.float16)  # exact
    row_scale = scale
    if BY_HALF:
        unit = power_below(tl.max(tl.abs(q.to(tl.float32)), 1))
        q = (q.to(tl.float32) / unit[:, None]).to(tl.float16)
        row_scale = scale * unit[:, None]
    q_odd = q
    if K_APART:
        q, q_odd = tl.split(tl.reshape(q, (BLOCK_M, BLOCK_D // 2, 2)))
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(SLOPES + head, mask=row_ok, other=0.0)
    changed = 0
    if WAY > 0:
        changed = ROWS_OF(INPUTS, seq, head, row_pos)

    low, kept_stop, near, high = keys_seen(
        first_pos, last_pos, seq_len, CAUSAL and FEW, WINDOW, CHUNK, SINK_TOKENS
    )
    if SINK_TOKENS == 0:
        low = near
    # With sink tokens their tiles, then those of the window: one range with a gap.
    first, last, skip_from, skip_by = tiles_seen(
        low, kept_stop, near, high, BLOCK_N, SINK_TOKENS, ROPE > 0
    )
    last = tl.minimum(last, first + end)
    first += begin

    if ROPE > 0:
        TURNS = tl.load(INPUTS + TURNS_AT).to(tl.pointer_type(tl.float32))
        BLOCK_H: tl.constexpr = pair_block(SPAN)
        turn_high, turn_low = frequencies(TURNS, BLOCK_H)
        place_cos, place_sin = places_in_tile(TURNS, BLOCK_N, BLOCK_H)
        own, own_second, kept, kept_second, rest = turned_queries(
            Q, TURNS, q_row, row_ok, row_pos, last_pos, q,
            D, SPAN, BLOCK_H, ROPE, CAUSAL, WINDOW, SINK_TOKENS,
        )  # fmt: skip
    K += kv_head.to(tl.int64) * k_h
    V += kv_head.to(tl.int64) * v_h
    if PAIRS:
        V = V.to(tl.pointer_type(tl.int16))
        v_b = v_b // 2
        v_t = v_t // 2
    BT += seq.to(tl.int64) * bt_s
    WIDTH: tl.constexpr = BLOCK_DV // 2 if PAIRS or V_APART else BLOCK_DV
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    odd = acc
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up across once, after the loop
    tile = tile_at(first, skip_from, skip_by, SINK_TOKENS)
    block = blocks_in_table(BT, tile * BLOCK_N + offs_n, bt_end, BLOCK_SIZE)
    for i in range(first, last, step):
        key_pos = tile * BLOCK_N + offs_n
        offset = key_pos % BLOCK_SIZE
        # Few tokens' pointers to places are made once: 0.90 to 1.01 of the time (H200). One token's loop
        # then takes 1.05, as ptxas no longer has its products hide its addresses.
        if FEW and BLOCK_N % BLOCK_SIZE == 0:
            offset = offs_n % BLOCK_SIZE
        row = block.to(tl.int64)
        at_block, place = row * k_b, offset * k_t
        KEYS, k_row = placed(K, at_block, place, FEW and READ_K is None)
        if PAIRS or not ALIKE:
            at_block, place = row * v_b, offset * v_t
        VALUES, v_row = placed(V, at_block, place, FEW and READ_V is None)
        tile_pos = tile * BLOCK_N
        tile = tile_at(i + step, skip_from, skip_by, SINK_TOKENS)
        # The next tile's blocks, a step ahead: keys that wait for a load of their own step are not
        # put in flight early (Triton 3.6).
        block = blocks_in_table(BT, tile * BLOCK_N + offs_n, bt_end, BLOCK_SIZE)
        held = key_pos < seq_len
        if WINDOW > 0 or CHUNK > 0:
            held = held & (key_pos >= low)
        if SINK_TOKENS > 0:  # what lies between them and the window may be gone
            held = held & ((key_pos < kept_stop) | (key_pos >= near))
        if ROPE > 0:
            k, k_second = load_pairs(KEYS, k_row, held, SPAN, BLOCK_H, ROPE)
            if SPAN < D:
                k_rest = load_rest(KEYS, k_row, held, D, SPAN, rest_block(D, SPAN))
        elif K_APART:
            k, k_odd = READ_K(KEYS, k_row, held, BLOCK_N, D, BLOCK_D)
        else:
            k = load_cached_rows(KEYS, k_row, held, offs_d, BLOCK_N, D, BLOCK_D, READ_K)
        if V_APART:
            v, v_odd = READ_V(VALUES, v_row, held, BLOCK_N, DV, BLOCK_DV)
        elif PAIRS:
            both = load_held_rows(
                VALUES + v_row[:, None] + offs_dv[None, :], held, offs_dv, DV // 2, WIDTH
            )
            v, v_odd = _split_pairs(both, K, q)
        else:
            v = load_cached_rows(VALUES, v_row, held, offs_dv, BLOCK_N, DV, BLOCK_DV, READ_V)
        if ROPE > 0:
            at = last_pos - tile_pos
            a = own
            b = own_second
            if SINK_TOKENS > 0:
                of_kept = i < skip_from
                at = tl.where(of_kept, -tile_pos, at)
                a = tl.where(of_kept, kept, a)
                b = tl.where(of_kept, kept_second, b)
            cos, sin = turn_by(at, turn_high, turn_low)
            a, b = turned(a, b, cos[None, :], sin[None, :])
            k, k_second = turned(k.to(tl.float32), k_second.to(tl.float32), place_cos, place_sin)
            s = tl.dot(a.to(q.dtype), tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            s = tl.dot(b.to(q.dtype), tl.trans(k_second.to(q.dtype)), s, input_precision=PRECISION)
            if SPAN < D:
                s = tl.dot(rest, tl.trans(k_rest.to(q.dtype)), s, input_precision=PRECISION)
        else:
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            if K_APART:
                s = tl.dot(q_odd, tl.trans(k_odd.to(q.dtype)), s, input_precision=PRECISION)
        s = logits(
            s, row_pos, key_pos, seq_len, slope, row_scale, soft_cap, changed,
            True, CAUSAL and FEW, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY,
        )  # fmt: skip
        if ROPE > 0 and SINK_TOKENS > 0:  # each key in the tile that was turned for it
            own_tile = (key_pos < SINK_TOKENS) == of_kept
            s = tl.where(own_tile[None, :], s, 0.0 if WAY == 2 else float("-inf"))
        if WAY == 2:  # the weights themselves
            acc = tl.dot(s.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
            if V_APART:
                odd = tl.dot(s.to(q.dtype), v_odd.to(q.dtype), odd, input_precision=PRECISION)
        else:
            m_new = tl.maximum(m, tl.max(s, 1))
            base = m_new
            # The first tiles may lie outside of the chunk, or behind a row: it sees nothing there.
            if SINK_TOKENS > 0 or FEW or WAY > 0:
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - base)
            p = tl.exp2(s - (base - RAISED)[:, None])
            sums = sums * alpha[:, None] + p
            acc = tl.dot(
                p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION
            )
            if PAIRS or V_APART:
                odd = tl.dot(
                    p.to(q.dtype),
                    v_odd.to(q.dtype),
                    odd * alpha[:, None],
                    input_precision=PRECISION,
                )
            m = m_new
    if PAIRS or V_APART:
        acc = tl.join(acc, odd).reshape([BLOCK_M, BLOCK_DV])
    total = tl.sum(sums, 1)
    if WAY == 2:  # nothing is to be divided by
        m = tl.zeros([BLOCK_M], tl.float32)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    return acc, m - RAISED, total


@triton.jit(do_not_specialize=["lse_t", "bt_s", "bt_end", "splits"])
def decode_kernel(
    Q, K, V, OUT, LSE, SINKS, SLOPES, INPUTS, Q_SCALE, K_SCALE, V_SCALE, OUT_SCALE,
    PARTS, PART_LSE, DONE, BT, SEQ_LENS, STARTS, WORK,
    scale, v_scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_t, o_h, lse_t, bt_s, bt_end, splits,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    ROWS_OF: tl.constexpr, CHANGE: tl.constexpr, WAY: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
    ALIKE: tl.constexpr, PAIRED: tl.constexpr, LISTED: tl.constexpr, TILED: tl.constexpr,
    FEW: tl.constexpr, SCALES: tl.constexpr, ROPE: tl.constexpr, SPAN: tl.constexpr,
    TURNS_AT: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr, ROWS_WAY: tl.constexpr,
    LONG: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Tiles of the rows of one KV head, over all their keys or some of them.

    Grid, `LISTED`: (programs, KV heads), whose stretches WORK holds; else (sequences, KV heads,
    splits), each sequence one tile. `TILED`: WORK lists tiles of rows, else sequences. `FEW`: a few
    query tokens a sequence instead of one. With
    `AT_ONCE` the split that ends last merges all, up to so many; without, `merge_kernel` merges
    parts. `ALIKE`: V has K's strides. `PAIRED`: V's 8-bit values are loaded two at a time.
    `LONG`: keys from which on a sequence's pieces are longer; 0: all are as WORK says.
    `PRECISION`: of products of float32.
    `bt_end`: a block table's last column. `ROPE`: keys are rotated as they are loaded (`cache_rope`).
    `UNIT`: elements that the strides count in (`in_units`).
    """
    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        tl.extra.cuda.gdc_launch_dependents()
    q_t, q_h, o_t, o_h = in_elements((q_t, q_h, o_t, o_h), UNIT)
    k_b, k_t, k_h, v_b, v_t, v_h = in_elements((k_b, k_t, k_h, v_b, v_t, v_h), UNIT)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    scale = logit_scale(scale, Q_SCALE, K_SCALE, kv_head, SCALES)
    v_scale = value_scale(v_scale, V_SCALE, OUT_SCALE, kv_head, SCALES)
    if LISTED:
        at, stop, tile, low, high, seq, start = my_stretch(WORK, TILED)
        while at < stop:
            begin, end, part, first, last = piece_of(WORK, at, stop, low, high)
            seq_len = tl.load(SEQ_LENS + seq)
            if LONG > 0:
                if BLOCK_M > 16:
                    begin, end = even_piece(WORK, first, last, seq_len, LONG, BLOCK_N)
                else:
                    longer = times_longer(seq_len, LONG)
                    begin *= longer
                    end *= longer
            token0 = seq
            query_len = 1
            if FEW:
                token0 = tl.load(STARTS + seq)
                query_len = tl.load(STARTS + seq + 1) - token0
            acc, m, l = _attend(
                Q, K, V, SLOPES, INPUTS, BT, scale, soft_cap,
                q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
                seq, kv_head, token0, query_len, seq_len, start, begin, end, 1,
                G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW, CHUNK,
                SINK_TOKENS, SOFT_CAP, ALIBI, ROWS_OF, CHANGE, WAY, FEW, ALIKE, PAIRED,
                ROPE, SPAN, TURNS_AT, OUT.dtype.element_ty == tl.float32, READ_K, READ_V, ROWS_WAY,
                PRECISION,
            )  # fmt: skip
            row_ok = start + rows < query_len * G
            if last > first:
                part_row = part_at(part, kv_head, tl.num_programs(0)) * ROWS
                store_part(acc, m, l, PARTS, PART_LSE, part_row + rows, row_ok, DV, BLOCK_DV)
            else:
                finish(
                    acc, m, l, OUT, LSE, SINKS, v_scale,
                    (token0 + (start + rows) // G).to(tl.int64),
                    kv_head * G + (start + rows) % G, row_ok,
                    o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
            at = high
            low = high
            tile, high, seq, start = next_tile(WORK, tile, TILED)
        if EARLY and FEW:  # what waits for this launch waits for one that it runs beside, too
            tl.extra.cuda.gdc_wait()
    else:
        seq = tl.program_id(0)
        split = tl.program_id(2)
        seq_len = tl.load(SEQ_LENS + seq)
        # The splits take the tiles in turn: which one is a split's first depends on no length
        # (without a window), so its blocks are asked for together with the length.
        begin = 0
        step = 1
        if SPLIT:
            begin = split
            step = splits
        acc, m, l = _attend(
            Q, K, V, SLOPES, INPUTS, BT, scale, soft_cap,
            q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s, bt_end,
            seq, kv_head, seq, 1, seq_len, 0, begin, seq_len, step,
            G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW, CHUNK,
            SINK_TOKENS, SOFT_CAP, ALIBI, ROWS_OF, CHANGE, WAY, False, ALIKE, PAIRED,
            ROPE, SPAN, TURNS_AT, OUT.dtype.element_ty == tl.float32, READ_K, READ_V, ROWS_WAY, PRECISION,
        )  # fmt: skip
        token = seq.to(tl.int64)
        head = kv_head * G + rows
        row_ok = rows < G
        if SPLIT:
            which = seq * tl.num_programs(1) + kv_head
            first_row = which * splits * ROWS
            part_row = first_row + split * ROWS + rows
            store_part(acc, m, l, PARTS, PART_LSE, part_row, row_ok, DV, BLOCK_DV)
            if AT_ONCE > 0:
                tl.debug_barrier()  # all of this program's part is stored before it is counted
                if tl.atomic_add(DONE + which, 1, sem="acq_rel") == splits - 1:
                    tl.store(DONE + which, 0)
                    group = tl.arange(0, ROWS)
                    total, top, weight = merged(
                        PARTS, PART_LSE, first_row + group, splits, group < G,
                        ROWS, DV, BLOCK_DV, AT_ONCE, WAY == 2, BLOCK_DV <= 64 and not PAIRED,
                    )  # fmt: skip
                    finish(
                        total, top, weight, OUT, LSE, SINKS, v_scale, token, kv_head * G + group,
                        group < G, o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
                    )  # fmt: skip
        else:
            finish(
                acc, m, l, OUT, LSE, SINKS, v_scale, token, head, row_ok, o_t, o_h, lse_t,
                DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
            )  # fmt: skip
