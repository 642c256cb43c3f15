"""The prefill kernel: tiles of query tokens, over packed keys or over pages.

As FlashAttention (Dao et al., 2022). The rows of a tile are (query token, head of its group), so
that a KV head's whole group shares each load of K and V. Tiles come whole, or as pieces dealt out by
`schedule`, where a step has too few tiles or too uneven ones.
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
from polyattn_triton.kernels.parts import as_merged, store_part
from polyattn_triton.kernels.softmax import finish, logit_scale, logits, value_scale
from polyattn_triton.kernels.tile_lists import list_of
from polyattn_triton.kernels.tiles import (
    blocks_of,
    floored,
    in_elements,
    keys_seen,
    load_cached_rows,
    load_rows,
    load_tile,
    my_stretch,
    next_tile,
    part_at,
    piece_of,
    row_places,
    tile_at,
    tiles_seen,
)

WEIGHT_SCALE = tl.constexpr(256.0)
"""What weights up to 1 are multiplied by before they are rounded to e4m3, whose largest is 448."""


@triton.jit
def _tiles(
    acc, m, l, q, K, V, BT, LIST, kv_start, first, last, skip_from, skip_by, row_pos, seq_len, seen,
    slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
    MASK: tl.constexpr, PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, CHANGE: tl.constexpr, WAY: tl.constexpr,
    LISTED: tl.constexpr, TURNS, origin, ROPE: tl.constexpr, SPAN: tl.constexpr, KEPT: tl.constexpr,
    EIGHT: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles `first` to `last`; those from `skip_from` on lie `skip_by` further.

    `LISTED`: the tiles are those that LIST names there. `ROPE`: q is its pairs and its rest, turned to
    places after `origin`, and keys are turned likewise; `KEPT`: of the kept first tokens' tiles alone.
    `seen`: the first three of `keys_seen`'s ends, of all rows. `EIGHT`: all products are of e4m3 numbers,
    `acc` is `WEIGHT_SCALE` times the sum.
    """
    LIKE = q[0] if ROPE > 0 else q
    if ROPE > 0:
        BLOCK_H: tl.constexpr = pair_block(SPAN)
        turn_high, turn_low = frequencies(TURNS, BLOCK_H)
        place_cos, place_sin = places_in_tile(TURNS, BLOCK_N, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    if LISTED:
        tile = tl.load(LIST + first)
        ahead = tl.load(LIST + first + 1)
    else:
        tile = tile_at(first, skip_from, skip_by, SINK_TOKENS)
    if PAGED:
        block = blocks_of(BT, tile * BLOCK_N + offs_n, seq_len, BLOCK_SIZE)
    for i in range(first, last):
        key_pos = tile * BLOCK_N + offs_n
        tile_pos = tile * BLOCK_N
        inside = key_pos < seq_len
        if MASK and (WINDOW > 0 or CHUNK > 0):  # what no row sees may be gone
            low, kept_stop, near = seen
            of_kept = (key_pos >= low) & (key_pos < kept_stop)
            inside = inside & (of_kept | (key_pos >= near))
        if LISTED:
            # Two steps ahead, for the same reason as blocks. What is handed on as it is would keep the
            # loop from being pipelined (Triton 3.6).
            tile = tl.maximum(ahead, 0)
            ahead = tl.load(LIST + i + 2)
        else:
            tile = tile_at(i + 1, skip_from, skip_by, SINK_TOKENS)
        if PAGED:
            row = block.to(tl.int64)
            k_row = row * k_b + (key_pos % BLOCK_SIZE) * k_t
            v_row = row * v_b + (key_pos % BLOCK_SIZE) * v_t
            # The next tile's blocks, a step ahead: loads that wait for a load of their own step
            # are not put in flight early (Triton 3.6).
            block = blocks_of(BT, tile * BLOCK_N + offs_n, seq_len, BLOCK_SIZE)
        else:
            k_row = (kv_start + key_pos).to(tl.int64) * k_t
            v_row = (kv_start + key_pos).to(tl.int64) * v_t
        if ROPE > 0:
            k, k_second = load_pairs(K, k_row, inside, SPAN, BLOCK_H, ROPE)
            if SPAN < D:
                k_rest = load_rest(K, k_row, inside, D, SPAN, rest_block(D, SPAN))
        elif MASK or READ_K is not None:
            k = load_cached_rows(K, k_row, inside, offs_d, BLOCK_N, D, BLOCK_D, READ_K)
        else:
            k = load_rows(K + k_row[:, None] + offs_d[None, :], offs_d, D, BLOCK_D)
        if MASK or READ_V is not None:
            v = load_cached_rows(V, v_row, inside, offs_dv, BLOCK_N, DV, BLOCK_DV, READ_V)
        else:
            v = load_rows(V + v_row[:, None] + offs_dv[None, :], offs_dv, DV, BLOCK_DV)
        if ROPE > 0:
            cos, sin = turn_by(tile_pos - origin, turn_high, turn_low)
            cos, sin = turned(place_cos, place_sin, cos[None, :], sin[None, :])
            k, k_second = turned(k.to(tl.float32), k_second.to(tl.float32), cos, sin)
            s = tl.dot(q[0], tl.trans(k.to(LIKE.dtype)), input_precision="ieee")
            s = tl.dot(q[1], tl.trans(k_second.to(LIKE.dtype)), s, input_precision="ieee")
            if SPAN < D:
                s = tl.dot(q[2], tl.trans(k_rest.to(LIKE.dtype)), s, input_precision="ieee")
        else:
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        s = logits(
            s, row_pos, key_pos, seq_len, slope, scale, soft_cap, changed,
            MASK, CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY,
        )  # fmt: skip
        if ROPE > 0 and SINK_TOKENS > 0:  # each key in the tile that was turned for it
            own_tile = (key_pos < SINK_TOKENS) == KEPT
            s = tl.where(own_tile[None, :], s, 0.0 if WAY == 2 else float("-inf"))
        if WAY == 2:  # the weights themselves
            p = s
        else:
            m_new = tl.maximum(m, tl.max(s, 1))
            # A row that has seen nothing yet must not become NaN.
            if MASK or WAY > 0:
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
            else:
                base = m_new
            alpha = tl.exp2(m - base)
            p = tl.exp2(s - base[:, None])
            l = l * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            m = m_new
        if EIGHT:
            # A tile's sum by itself: Hopper adds products of 8 bits up in 14 bits of mantissa.
            acc += tl.dot((p * WEIGHT_SCALE).to(v.dtype), v)
        else:
            acc = tl.dot(p.to(LIKE.dtype), v.to(LIKE.dtype), acc, input_precision="ieee")
    return acc, m, l


@triton.jit
def _attend(
    Q, K, V, BT, SLOPES, INPUTS, scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s,
    seq, kv_head, token0, query_len, kv_start, seq_len, start, begin, end, listed_at,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    ROWS_OF: tl.constexpr, CHANGE: tl.constexpr, WAY: tl.constexpr, SPLIT: tl.constexpr,
    LISTED: tl.constexpr, RESCORE: tl.constexpr, WHERE_SEEN: tl.constexpr,
    ROPE: tl.constexpr, SPAN: tl.constexpr, TURNS_AT: tl.constexpr, EIGHT: tl.constexpr,
    SINGLE: tl.constexpr, BY_ROW: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr,
):  # fmt: skip
    """Attend with a tile's rows to all its key tiles, or (`SPLIT`) those from `begin` to `end`.

    `SINGLE`: the layer's dtype is float32, so queries in e4m3 are multiplied in it. `BY_ROW`: all key
    tiles are masked, by one loop, so that what a row sums follows from no other row of its tile.

    `LISTED`: to those alone that the list of tile `listed_at` names, which are first those whose keys are
    all seen. `RESCORE`, `WHERE_SEEN`: what `CHANGE` and `WAY` are on these.
    """
    rows = tl.arange(0, BLOCK_M)
    in_query, head = row_places(start, rows, kv_head, G, BLOCK_M)
    row_ok = in_query < query_len
    context = seq_len - query_len
    row_pos = context + in_query
    first_pos = context + start // G
    last_pos = context + (tl.minimum(start + BLOCK_M, query_len * G) - 1) // G

    # Which key tiles: with kept tokens theirs, then those of the window, one range with a gap; else one
    # of which [full_low, full_high) needs no mask.
    low, kept_stop, near, high = keys_seen(
        first_pos, last_pos, seq_len, CAUSAL, WINDOW, CHUNK, SINK_TOKENS
    )
    seen = low, kept_stop, near
    low_tile, high_tile, skip_from, skip_by = tiles_seen(
        low, kept_stop, near, high, BLOCK_N, SINK_TOKENS, ROPE > 0
    )
    full_low = low_tile
    full_high = high // BLOCK_N
    if CAUSAL:
        full_high = tl.minimum(full_high, (first_pos + 1) // BLOCK_N)
    if WINDOW > 0:
        full_low = tl.maximum(0, tl.cdiv(last_pos - WINDOW + 1, BLOCK_N))
        if not CAUSAL:
            full_high = low_tile
    if CHUNK > 0:
        full_low = tl.maximum(full_low, tl.cdiv(floored(last_pos, CHUNK) * CHUNK, BLOCK_N))
        full_high = tl.minimum(full_high, (floored(first_pos, CHUNK) + 1) * CHUNK // BLOCK_N)
    if SINK_TOKENS > 0:
        full_low = high_tile
        full_high = high_tile
    if BY_ROW:
        full_low = low_tile
        full_high = low_tile
    if LISTED:
        LIST, PARTLY, whole, count = list_of(INPUTS, listed_at, kv_head)
        entry = 0
        stop = count
        if SPLIT:  # the same share of the list
            counted = tl.maximum(high_tile - low_tile, 1)
            entry = tl.minimum(begin, counted) * count // counted
            stop = tl.minimum(end, counted) * count // counted
    else:
        if SPLIT:
            high_tile = tl.minimum(high_tile, low_tile + end)
            low_tile += begin
        full_low = tl.minimum(tl.maximum(full_low, low_tile), high_tile)
        full_high = tl.maximum(tl.minimum(full_high, high_tile), full_low)

    offs_d = tl.arange(0, BLOCK_D)
    q_row = (token0 + in_query).to(tl.int64) * q_t + head.to(tl.int64) * q_h
    q = load_tile(Q + q_row, offs_d, row_ok, D)
    # A query that was rotated before is no longer of 8 bits.
    PRODUCTS: tl.constexpr = EIGHT and Q.dtype.element_ty.is_fp8()
    if Q.dtype.element_ty.is_fp8() and not EIGHT:
        q = q.to(tl.float32 if SINGLE else tl.float16)  # exact
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(SLOPES + head, mask=row_ok, other=0.0)

    changed = 0
    if WAY > 0:
        changed = ROWS_OF(INPUTS, seq, head, row_pos)

    q_kept = q
    TURNS = 0
    if ROPE > 0:
        TURNS = tl.load(INPUTS + TURNS_AT).to(tl.pointer_type(tl.float32))
        own, own_second, kept, kept_second, rest = turned_queries(
            Q, TURNS, q_row, row_ok, row_pos, last_pos, q,
            D, SPAN, pair_block(SPAN), ROPE, CAUSAL, WINDOW, SINK_TOKENS,
        )  # fmt: skip
        q_kept = (kept.to(q.dtype), kept_second.to(q.dtype), rest)
        q = (own.to(q.dtype), own_second.to(q.dtype), rest)
    K += kv_head.to(tl.int64) * k_h
    V += kv_head.to(tl.int64) * v_h
    BT += seq.to(tl.int64) * bt_s
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if LISTED:
        acc, m, l = _tiles(
            acc, m, l, q, K, V, BT, LIST, kv_start, tl.minimum(entry, whole), tl.minimum(stop, whole),
            0, 0, row_pos, seq_len, seen, slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
            False, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
            CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, RESCORE, WHERE_SEEN, True,
            TURNS, last_pos, ROPE, SPAN, False, PRODUCTS, READ_K, READ_V,
        )  # fmt: skip
        acc, m, l = _tiles(
            acc, m, l, q, K, V, BT, PARTLY, kv_start, tl.maximum(entry - whole, 0),
            tl.maximum(stop - whole, 0),
            0, 0, row_pos, seq_len, seen, slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
            True, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
            CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY, True,
            TURNS, last_pos, ROPE, SPAN, False, PRODUCTS, READ_K, READ_V,
        )  # fmt: skip
    else:
        if ROPE > 0 and SINK_TOKENS > 0:
            kept_tile = tl.minimum(tl.maximum(skip_from, low_tile), high_tile)
            acc, m, l = _tiles(
                acc, m, l, q_kept, K, V, BT, BT, kv_start, low_tile, kept_tile, skip_from, skip_by,
                row_pos, seq_len, seen, slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
                True, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
                CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY, False,
                TURNS, 0, ROPE, SPAN, True, PRODUCTS, READ_K, READ_V,
            )  # fmt: skip
            low_tile = kept_tile
            full_low = tl.maximum(full_low, low_tile)
            full_high = tl.maximum(full_high, full_low)
        if (WINDOW > 0 or CHUNK > 0) and not BY_ROW:
            acc, m, l = _tiles(
                acc, m, l, q, K, V, BT, BT, kv_start, low_tile, full_low, skip_from, skip_by, row_pos,
                seq_len, seen, slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
                True, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
                CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY, False,
                TURNS, last_pos, ROPE, SPAN, False, PRODUCTS, READ_K, READ_V,
            )  # fmt: skip
        if SINK_TOKENS == 0 and not BY_ROW:
            acc, m, l = _tiles(
                acc, m, l, q, K, V, BT, BT, kv_start, full_low, full_high, skip_from, skip_by, row_pos,
                seq_len, seen, slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
                False, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
                CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY, False,
                TURNS, last_pos, ROPE, SPAN, False, PRODUCTS, READ_K, READ_V,
            )  # fmt: skip
        acc, m, l = _tiles(
            acc, m, l, q, K, V, BT, BT, kv_start, full_high, high_tile, skip_from, skip_by, row_pos,
            seq_len, seen, slope, scale, soft_cap, changed, k_b, k_t, v_b, v_t,
            True, PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
            CAUSAL, WINDOW, CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, CHANGE, WAY, False,
            TURNS, last_pos, ROPE, SPAN, False, PRODUCTS, READ_K, READ_V,
        )  # fmt: skip
    if PRODUCTS:
        acc = acc * (1.0 / WEIGHT_SCALE)
    if WAY == 2:  # nothing is to be divided by
        m = tl.zeros([BLOCK_M], tl.float32)
        l = tl.full([BLOCK_M], 1.0, tl.float32)
    return acc, m, l


@triton.jit(do_not_specialize=["lse_t", "bt_s"])
def prefill_kernel(
    Q, K, V, OUT, LSE, SINKS, SLOPES, INPUTS, Q_SCALE, K_SCALE, V_SCALE, OUT_SCALE,
    PARTS, PART_LSE, BT, SEQ_LENS, STARTS, KEY_STARTS, WORK,
    scale, v_scale, soft_cap,
    q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_t, o_h, lse_t, bt_s,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    ROWS_OF: tl.constexpr, CHANGE: tl.constexpr, WAY: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr, SCALES: tl.constexpr,
    LISTED: tl.constexpr, RESCORE: tl.constexpr, WHERE_SEEN: tl.constexpr,
    ROPE: tl.constexpr, SPAN: tl.constexpr, TURNS_AT: tl.constexpr, EIGHT: tl.constexpr,
    BY_ROW: tl.constexpr, READ_K: tl.constexpr, READ_V: tl.constexpr, ROWS_WAY: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Tiles of query rows of one KV head, whole or in pieces.

    Grid: (tiles, KV heads), WORK their sequences, then their first rows; `SPLIT`: (programs, KV
    heads), whose stretches WORK holds, and `merge_kernel` merges. `KEY_STARTS`: where sequences'
    packed keys start. `ROPE`: keys are rotated as they are loaded (`cache_rope`). `EIGHT`: queries,
    keys and values that come in e4m3 are multiplied in it, and weights rounded to it. `BY_ROW`: a row's
    bits follow from no other row: an uncut tile's are rounded as if it were merged, too. `UNIT`: elements
    that the strides count in (`in_units`).
    """
    q_t, q_h, o_t, o_h = in_elements((q_t, q_h, o_t, o_h), UNIT)
    k_b, k_t, k_h, v_b, v_t, v_h = in_elements((k_b, k_t, k_h, v_b, v_t, v_h), UNIT)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    scale = logit_scale(scale, Q_SCALE, K_SCALE, kv_head, SCALES)
    v_scale = value_scale(v_scale, V_SCALE, OUT_SCALE, kv_head, SCALES)
    if SPLIT:
        if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
            tl.extra.cuda.gdc_launch_dependents()
        at, stop, tile, low, high, seq, start = my_stretch(WORK, True)
        while at < stop:
            begin, end, part, first, last = piece_of(WORK, at, stop, low, high)
            token0 = tl.load(STARTS + seq)
            seq_len = tl.load(SEQ_LENS + seq)
            query_len = tl.load(STARTS + seq + 1) - token0
            kv_start = 0
            if not PAGED:
                kv_start = tl.load(KEY_STARTS + seq)
            acc, m, l = _attend(
                Q, K, V, BT, SLOPES, INPUTS, scale, soft_cap,
                q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s,
                seq, kv_head, token0, query_len, kv_start, seq_len,
                start, begin, end, tile,
                G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, PAGED, CAUSAL, WINDOW,
                CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, ROWS_OF, CHANGE, WAY, True,
                LISTED, RESCORE, WHERE_SEEN, ROPE, SPAN, TURNS_AT, EIGHT,
                OUT.dtype.element_ty == tl.float32, BY_ROW, READ_K, READ_V,
            )  # fmt: skip
            in_query, head = row_places(start, rows, kv_head, G, BLOCK_M)
            row_ok = in_query < query_len
            if last > first:
                part_row = part_at(part, kv_head, tl.num_programs(0)) * BLOCK_M
                store_part(acc, m, l, PARTS, PART_LSE, part_row + rows, row_ok, DV, BLOCK_DV)
            else:
                if BY_ROW:
                    acc, m, l = as_merged(acc, m, l)
                finish(
                    acc, m, l, OUT, LSE, SINKS, v_scale, (token0 + in_query).to(tl.int64), head,
                    row_ok,
                    o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
            at = high
            low = high
            tile, high, seq, start = next_tile(WORK, tile, True)
    else:
        seq = tl.load(WORK + tl.program_id(0))
        start = tl.load(WORK + tl.num_programs(0) + tl.program_id(0))
        token0 = tl.load(STARTS + seq)
        seq_len = tl.load(SEQ_LENS + seq)
        query_len = tl.load(STARTS + seq + 1) - token0
        kv_start = 0
        if not PAGED:
            kv_start = tl.load(KEY_STARTS + seq)
        acc, m, l = _attend(
            Q, K, V, BT, SLOPES, INPUTS, scale, soft_cap,
            q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bt_s,
            seq, kv_head, token0, query_len, kv_start, seq_len,
            start, 0, 0, tl.program_id(0),
            G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, PAGED, CAUSAL, WINDOW,
            CHUNK, SINK_TOKENS, SOFT_CAP, ALIBI, ROWS_OF, CHANGE, WAY, False,
            LISTED, RESCORE, WHERE_SEEN, ROPE, SPAN, TURNS_AT, EIGHT,
            OUT.dtype.element_ty == tl.float32, BY_ROW, READ_K, READ_V,
        )  # fmt: skip
        in_query, head = row_places(start, rows, kv_head, G, BLOCK_M)
        finish(
            acc, m, l, OUT, LSE, SINKS, v_scale, (token0 + in_query).to(tl.int64), head,
            in_query < query_len, o_t, o_h, lse_t, DV, BLOCK_DV, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
