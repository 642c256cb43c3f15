"""The recurrent kernels: convolution, and the gated scan of Mamba-2 and linear attention. By the token:
`kernels.step`; the delta rule: `kernels.delta`.

A program owns a sequence's part of the state from its first token to its last, in registers: one
launch, each input read once, no state written between chunks. Chunks as in Dao and Gu (2024) and
Yang et al. (2024). States are float32 here, whatever they are kept in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.tiles import load_tile, store_tile

LEAST = tl.constexpr(-104.0)
"""Of a log decay: e^-104 is 0 in float32. Infinity times 0 isn't, and has no difference from itself."""


@triton.jit
def sequence_of(seq, STARTS, SEQ_LENS, STATE_SLOTS):
    """A sequence's slot, first token, number of tokens (0 without slot), and whether its state began."""
    slot = tl.load(STATE_SLOTS + seq)
    start = tl.load(STARTS + seq)
    count = tl.where(slot < 0, 0, tl.load(STARTS + seq + 1) - start)
    return slot, start, count, tl.load(SEQ_LENS + seq) > count


@triton.jit
def piece_of(
    piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART: tl.constexpr
):
    """A piece's slot, its sequence's first token and number of tokens (0: nothing to do), whether the
    state began, and the piece's own first token and end in the sequence.
    """
    seq = piece
    first = 0
    if PART != "whole":
        seq = tl.load(PIECE_SEQ + piece)
        first = tl.load(PIECE_START + piece)
    slot = tl.load(STATE_SLOTS + seq)
    start = tl.load(STARTS + seq)
    count = tl.where(slot < 0, 0, tl.load(STARTS + seq + 1) - start)
    end = count
    if PART != "whole":
        end = tl.minimum(first + piece_tokens, count)
    return slot, start, count, tl.load(SEQ_LENS + seq) > count, first, end


@triton.jit
def chunk_of(TILE_SEQ, TILE_START, STARTS, STATE_SLOTS):
    """A program's sequence, its chunk's first token, and the tokens from there on, 0 without slot."""
    seq = tl.load(TILE_SEQ + tl.program_id(0))
    begin = tl.load(STARTS + seq) + tl.load(TILE_START + tl.program_id(0))
    left = tl.load(STARTS + seq + 1) - begin
    return seq, begin, tl.where(tl.load(STATE_SLOTS + seq) < 0, 0, left)


@triton.jit
def state_of(
    STATE,
    LEFT,
    kk,
    vv,
    first,
    begun,
    piece_tokens,
    KS: tl.constexpr,
    VS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    kind: tl.constexpr,
):
    """A program's part of a head's state as (values, keys): its place, and its content in float32.

    `LEFT`: a piece's and head's place in (pieces, heads, rows, BLOCK_K), which "left" fills. A row of
    values is what the piece leaves of no state; one of keys, in blocks of their own behind these, what
    it makes of 1 in this key. Before "out" a piece's values are those that the ones before it leave.
    """
    place = STATE + kk[None, :] * VS + vv[:, None]
    there = (kk < KS)[None, :] & (vv < VS)[:, None]
    h = tl.load(place, mask=there & begun & (first == 0), other=0.0).to(tl.float32)
    VALUES: tl.constexpr = (VS + BLOCK_V - 1) // BLOCK_V * BLOCK_V
    ROWS: tl.constexpr = VALUES + (KS + BLOCK_V - 1) // BLOCK_V * BLOCK_V
    if PART == "left":
        h += tl.where((vv - VALUES)[:, None] == kk[None, :], 1.0, 0.0)
    if PART == "out":
        earlier = first // piece_tokens
        each = tl.num_programs(1).to(tl.int64) * (ROWS * BLOCK_K)
        own = vv[:, None] * BLOCK_K + kk[None, :]
        keys = (VALUES + kk)[:, None] * (2 * BLOCK_K) + kk[None, :]
        held = (kk < KS)[:, None]
        h += tl.load(LEFT - earlier * each + own, mask=there & (first > 0), other=0.0)
        for i in tl.range(1, earlier, num_stages=1):  # more would fill the shared memory
            before = LEFT - (earlier - i) * each
            through = before.to(tl.pointer_type(kind)) + keys
            more = tl.load(before + own)
            high = h.to(kind)
            more = tl.dot(high, tl.load(through + BLOCK_K, mask=held, other=0.0), more)
            most = tl.load(through, mask=held, other=0.0)
            more = tl.dot((h - high.to(tl.float32)).to(kind), most, more)
            h = tl.dot(high, most, more)
    return place, there, h


@triton.jit
def leave(
    LEFT,
    h,
    kk,
    vv,
    VS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    kind: tl.constexpr,
):
    """Store what "left" finds, as `state_of` reads it: a key's row as its two halves, of 16 bits each."""
    if tl.program_id(2) * BLOCK_V < VS:
        tl.store(LEFT + vv[:, None] * BLOCK_K + kk[None, :], h)
    else:
        place = LEFT.to(tl.pointer_type(kind)) + vv[:, None] * (2 * BLOCK_K) + kk[None, :]
        high = h.to(kind)
        tl.store(place, high)
        tl.store(place + BLOCK_K, (h - high.to(tl.float32)).to(kind))


@triton.jit
def left_place(
    piece, head, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The place of a piece's head in what pieces leave, as `state_of` has it."""
    ROWS: tl.constexpr = (VS + BLOCK_V - 1) // BLOCK_V + (KS + BLOCK_V - 1) // BLOCK_V
    return (piece.to(tl.int64) * tl.num_programs(1) + head) * (ROWS * BLOCK_V * BLOCK_K)


@triton.jit
def _softplus(x):
    """max(x, 0) + log(1 + u) of u = exp(-|x|), which is u times a polynomial to 2e-7 of itself.

    Fitted at the Chebyshev nodes of [0, 1]: half the instructions of a logarithm, and right where u is
    lost beside 1.
    """
    u = tl.exp2(tl.abs(x) * -1.4426950408889634)
    p = u * 0.005253457797148085 - 0.02958850739317554
    p = p * u + 0.07836166801885099
    p = p * u - 0.13674769705510198
    p = p * u + 0.19111431080553018
    p = p * u - 0.24844369892454324
    p = p * u + 0.33319271342497936
    p = p * u - 0.49999501516786776
    p = p * u + 0.999999970540657
    return tl.maximum(x, 0.0) + p * u


@triton.jit
def gated(y, Z, at, mask):
    """Return y silu(z), z from `Z` + `at`."""
    z = tl.load(Z + at, mask=mask, other=0.0).to(tl.float32)
    return y * z / (1.0 + tl.exp(-z))


@triton.jit
def draft_place(TARGETS, targets_t, seq, t):
    """The slot of the state after a sequence's token `t` (`Batch.state_targets`); -1: it is not kept."""
    return tl.load(TARGETS + seq * targets_t + t)


@triton.jit
def conv_kernel(
    X, OUT, STATE, WEIGHT, BIAS, STARTS, SEQ_LENS, STATE_SLOTS, TILE_SEQ, TILE_START,
    x_t, o_t, st_s,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, DECODE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """A tile of a sequence's tokens and channels; the first tile also makes the new state.

    Grid: (tiles, channel blocks). State (slots, CHANNELS, WIDTH - 1); where `RING` isn't 0, (slots,
    CHANNELS, RING): position p's input in column p % RING.
    """
    if DECODE:
        seq = tl.program_id(0)
        first = 0
        start = seq
        count = 1
    else:
        seq = tl.load(TILE_SEQ + tl.program_id(0))
        first = tl.load(TILE_START + tl.program_id(0))
        start = tl.load(STARTS + seq)
        count = tl.load(STARTS + seq + 1) - start
    slot = tl.load(STATE_SLOTS + seq)
    if slot < 0:
        return
    before = tl.load(SEQ_LENS + seq) - count
    begun = before > 0
    LENGTH: tl.constexpr = RING if RING else WIDTH - 1
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_ok = c < CHANNELS
    t = first + tl.arange(0, BLOCK_T)
    x_row = X + start.to(tl.int64) * x_t
    state = STATE + slot * st_s + c * LENGTH
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if HAS_BIAS:
        acc += tl.load(BIAS + c, mask=c_ok, other=0.0)[None, :]
    for w in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + w
        new = tl.load(
            x_row + at[:, None] * x_t + c[None, :],
            mask=((at >= 0) & (at < count))[:, None] & c_ok[None, :],
            other=0.0,
        ).to(tl.float32)
        if WIDTH > 1:
            column = at + WIDTH - 1
            if RING:  # before the sequence's first position the ring holds 0
                column = (before + at + RING) % RING
            new += tl.load(
                state[None, :] + column[:, None],
                mask=((at < 0) & begun)[:, None] & c_ok[None, :],
                other=0.0,
            ).to(tl.float32)
        acc += new * tl.load(WEIGHT + c * WIDTH + w, mask=c_ok, other=0.0)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    store_tile(OUT + (start + t).to(tl.int64) * o_t, acc, c, t < count, CHANNELS)
    if RING:
        if first == 0:
            tl.debug_barrier()  # every thread has read what another may overwrite
            for w in tl.static_range(RING):
                source = count - RING + w
                given = tl.load(x_row + source * x_t + c, mask=c_ok & (source >= 0), other=0.0)
                tl.store(
                    state + (before + source + RING) % RING,
                    given.to(STATE.dtype.element_ty),
                    mask=c_ok & ((source >= 0) | (begun == 0)),
                )
    elif first == 0:
        # In the order of the state, so that reads come before overwrites.
        for w in tl.static_range(WIDTH - 1):
            source = count - (WIDTH - 1) + w
            given = tl.load(x_row + source * x_t + c, mask=c_ok & (source >= 0), other=0.0)
            held = tl.load(state + source + WIDTH - 1, mask=c_ok & (source < 0) & begun, other=0.0)
            kept = tl.where(source >= 0, given.to(tl.float32), held.to(tl.float32))
            tl.debug_barrier()
            tl.store(state + w, kept.to(STATE.dtype.element_ty), mask=c_ok)


@triton.jit
def chunk_decays(g, past, at, first, count, CHUNK: tl.constexpr, EXACT: tl.constexpr):
    """What decays since a chunk's begin, from token to token, until its end, and in all of it.

    The last token's own share must be 1, so that the sum at the end is the running one.
    `EXACT`: log decays are summed as whole numbers, which float32 holds, and as what is left of them. Of
    one sum, differences are off by up to 3e-4 after tokens that forget much: half a place of float16.
    """
    g = tl.where(g < LEAST, LEAST, g)
    last = at == tl.minimum(first + CHUNK, count) - 1
    if EXACT:
        whole = tl.floor(g + 0.5)
        total = tl.cumsum(whole, 0)
        rest = tl.cumsum(g - whole, 0)
        since = tl.exp(total + rest)
        apart = (total[:, None] - total[None, :]) + (rest[:, None] - rest[None, :])
        to_end = (tl.sum(whole, 0) - total) + (tl.sum(tl.where(last, rest, 0.0), 0) - rest)
    else:
        rest = tl.cumsum(g, 0)
        since = tl.exp(rest)
        apart = rest[:, None] - rest[None, :]
        to_end = tl.sum(tl.where(last, rest, 0.0), 0) - rest
    between = tl.exp(tl.where(past, apart, float("-inf")))
    return since, between, tl.exp(to_end), tl.sum(tl.where(last, since, 0.0), 0)


@triton.jit(do_not_specialize=["piece_tokens"])
def gated_kernel(
    Q, K, V, DT, G, A, D, DT_BIAS, Z, OUT, STATE, LEFT, STARTS, SEQ_LENS, STATE_SLOTS,
    PIECE_SEQ, PIECE_START, scale,
    q_t, q_g, k_t, k_g, v_t, v_h, dt_t, g_t, z_t, z_h, o_t, o_h, st_s, st_h, st_k, st_v, piece_tokens,
    EACH: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, MAMBA: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Mamba-2 (q = C, k = B, v = dt x, g = dt A) and linear attention (g constant), in chunks.

    Grid: (sequences or pieces, heads, value blocks). Of `piece_tokens` tokens "left" writes what a piece
    leaves of no state to LEFT (pieces, heads, BLOCK_K, values), and behind these what decays in it
    (pieces, heads); "out" starts from what the pieces before it leave.
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    slot, start, count, begun, begin, stop = piece_of(
        piece, STARTS, SEQ_LENS, STATE_SLOTS, PIECE_SEQ, PIECE_START, piece_tokens, PART
    )
    if count == 0 or (PART == "left" and stop == count):  # the last one's rest is unused
        return
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok = kk < KS
    v_ok = vv < VS
    place = STATE + slot * st_s + head * st_h + kk[:, None] * st_k + vv[None, :] * st_v
    from_state = begun & (begin == 0)
    h = tl.load(place, mask=k_ok[:, None] & v_ok[None, :] & from_state, other=0.0).to(tl.float32)
    own = piece.to(tl.int64) * tl.num_programs(1) + head
    WIDE: tl.constexpr = (VS + BLOCK_V - 1) // BLOCK_V * BLOCK_V
    inner = kk[:, None] * WIDE + vv[None, :]
    DECAYS = LEFT + tl.num_programs(0).to(tl.int64) * (tl.num_programs(1) * (BLOCK_K * WIDE))
    if PART == "out":
        for back in range(begin // piece_tokens, 0, -1):
            before = own - back * tl.num_programs(1)
            h = h * tl.load(DECAYS + before) + tl.load(LEFT + before * (BLOCK_K * WIDE) + inner)
    decays = 1.0
    rate = tl.load(A + head)
    if HAS_D:
        skip = tl.load(D + head)
    if HAS_BIAS:
        bias = tl.load(DT_BIAS + head)
    group = head // EACH
    rows = tl.arange(0, CHUNK)
    past = rows[:, None] >= rows[None, :]
    kind: tl.constexpr = K.dtype.element_ty  # float32 where B and C are
    EXACT: tl.constexpr = MAMBA and V.dtype.element_ty == tl.float32  # equal rates need it never
    if not MAMBA:  # equal rates: whole chunks decay alike
        since, between, until, whole = chunk_decays(
            tl.zeros([CHUNK], tl.float32) + rate, past, rows, 0, CHUNK, CHUNK, EXACT
        )
        rest = (stop - begin - 1) % CHUNK + 1
        g = tl.where(rows < rest, rate, 0.0)
        _, _, rest_until, rest_whole = chunk_decays(g, past, rows, 0, rest, CHUNK, EXACT)
    for first in range(begin, stop, CHUNK):
        at = first + rows
        ok = at < stop
        row = (start + at).to(tl.int64)
        if PART != "left":
            q = load_tile(Q + row * q_t + group * q_g, kk, ok, KS)
        k = load_tile(K + row * k_t + group * k_g, kk, ok, KS)
        x = load_tile(V + row * v_t + head * v_h, vv, ok, VS)
        wide = x.to(tl.float32)
        if MAMBA:
            dt = tl.load(DT + row * dt_t + head, mask=ok, other=0.0).to(tl.float32)
            if HAS_BIAS:
                dt += bias
            if SOFTPLUS:
                dt = _softplus(dt)
            dt = tl.where(ok, dt, 0.0)
            g = dt * rate
            wide *= dt[:, None]
            since, between, until, whole = chunk_decays(g, past, at, first, stop, CHUNK, EXACT)
        elif first + CHUNK > stop:
            until, whole = rest_until, rest_whole
        v = wide.to(kind)
        if PART != "left":
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * between
            y = tl.dot(q, h.to(q.dtype), input_precision="ieee") * since[:, None]
            y = tl.dot(s.to(kind), v, y, input_precision="ieee") * scale
            if HAS_D:
                y += skip * x.to(tl.float32)
            if GATED:
                at_z = row[:, None] * z_t + head * z_h + vv[None, :]
                y = gated(y, Z, at_z, ok[:, None] & v_ok[None, :])
            store_tile(OUT + row * o_t + head * o_h, y, vv, ok, VS)
        if PART == "left":  # whose registers hold no outputs: the values, which are fewer, decay
            v = (wide * until[:, None]).to(kind)
        else:
            k = (k.to(tl.float32) * until[:, None]).to(kind)
        h = tl.dot(tl.trans(k), v, h * whole, input_precision="ieee")
        decays *= whole
    if PART == "left":
        tl.store(LEFT + own * (BLOCK_K * WIDE) + inner, h)
        tl.store(DECAYS + own, decays)  # the same of each block of values
    elif stop == count:
        tl.store(place, h.to(STATE.dtype.element_ty), mask=k_ok[:, None] & v_ok[None, :])
