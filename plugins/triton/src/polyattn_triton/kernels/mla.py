"""The MLA kernel: MQA over the latent cache, whose key tile is its value tile too.

Absorbed as in DeepSeek-V2 (2024): a query is [latent, rope], a cached row [latent, rope], and the
latent part of the row is the value. Each row is loaded once for scores and output. Logits are kept
in base 2; the LSE leaves in base e. The rows of a tile of queries are (token, head) of one sequence;
tiles come whole, or as pieces dealt out by `schedule` that `decode.merge_kernel` merges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.kernels.parts import store_part
from polyattn_triton.kernels.softmax import LOG2E, finish
from polyattn_triton.kernels.tiles import (
    blocks_of,
    load_held_rows,
    load_rows,
    load_tile,
    my_stretch,
    next_tile,
    piece_of,
)


@triton.jit
def _load(
    KV, BT, SLOTS, tile, length, kv_b, kv_t,
    MASK: tl.constexpr, SPARSE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load a tile of rows: latents, rope keys, and which of them there are.

    Slots past the length may hold NaN: with `MASK` they are not loaded at all.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    offs_p = tl.arange(0, BLOCK_P)
    at = tile * BLOCK_N + offs_n
    inside = at < length
    if SPARSE:
        slot = tl.load(SLOTS + at, mask=inside, other=-1)
        inside = slot >= 0
        slot = tl.maximum(slot, 0)
        row = (slot // BLOCK_SIZE).to(tl.int64) * kv_b + (slot % BLOCK_SIZE) * kv_t
    elif BLOCK_SIZE % BLOCK_N == 0:  # the whole tile lies in one block: one pointer, short offsets
        block = tl.load(BT + tile * BLOCK_N // BLOCK_SIZE, mask=tile * BLOCK_N < length, other=0)
        KV += block.to(tl.int64) * kv_b + (tile * BLOCK_N % BLOCK_SIZE) * kv_t
        row = offs_n * kv_t
    else:
        block = blocks_of(BT, at, length, BLOCK_SIZE).to(tl.int64)
        row = block * kv_b + (at % BLOCK_SIZE) * kv_t
    latent = KV + (row[:, None] + offs_r[None, :])
    rope = KV + RANK + (row[:, None] + offs_p[None, :])
    if MASK:
        k = load_held_rows(latent, inside, offs_r, RANK, BLOCK_R)
        k_rope = load_held_rows(rope, inside, offs_p, ROPE, BLOCK_P)
    else:
        k = load_rows(latent, offs_r, RANK, BLOCK_R)
        k_rope = load_rows(rope, offs_p, ROPE, BLOCK_P)
    return k, k_rope, inside


@triton.jit
def _take(
    acc, m, l, q, q_rope, k, k_rope, seen, scale, taken, MASK: tl.constexpr, APART: tl.constexpr
):
    """Take one tile of rows into the running softmax."""
    k = k.to(q.dtype)
    k_rope = k_rope.to(q.dtype)
    by = scale * LOG2E
    if APART:
        # Always taken. The branch keeps the compiler from laying the scores out for the product
        # that follows, which on Hopper has every warp group compute all of them; scaled apart,
        # the two products aren't made a chain of their own, with the same effect.
        if taken:
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * by
            s += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee") * by
        else:
            s = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee") * by
    if MASK:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    if MASK:  # a row that has seen nothing yet must not become NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        base = m_new
    alpha = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(q.dtype), k, acc, input_precision="ieee")
    return acc, m_new, l


@triton.jit
def _rows(
    acc, m, l, q, q_rope, KV, BT, SLOTS, first, last, length, row_pos, scale, kv_b, kv_t,
    MASK: tl.constexpr, SPARSE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    APART: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Attend to tiles `first` to `last` of the sequence's rows, or of the chosen ones."""
    for tile in range(first, last):
        k, k_rope, inside = _load(
            KV, BT, SLOTS, tile, length, kv_b, kv_t,
            MASK, SPARSE, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        seen = inside[None, :]
        if MASK and FEW == 1:
            at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = seen & (at[None, :] <= row_pos[:, None])
        acc, m, l = _take(acc, m, l, q, q_rope, k, k_rope, seen, scale, last > 0, MASK, APART)
    return acc, m, l


@triton.jit
def _attend(
    Q, KV, BT, SLOTS, scale, q_t, q_h, kv_b, kv_t, table_s,
    seq, token0, query_len, length, start, begin, end,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPARSE: tl.constexpr, APART: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Attend with a tile's rows to all its key tiles, or (`SPLIT`) those from `begin` to `end`."""
    offs_r = tl.arange(0, BLOCK_R)
    offs_p = tl.arange(0, BLOCK_P)
    row = start + tl.arange(0, BLOCK_H)
    row_ok = row < query_len * HEADS
    row_pos = length - query_len + row // HEADS
    q_row = (token0 + row // HEADS).to(tl.int64) * q_t + (row % HEADS).to(tl.int64) * q_h
    q = load_tile(Q + q_row, offs_r, row_ok, RANK)
    q_rope = load_tile(Q + RANK + q_row, offs_p, row_ok, ROPE)
    if SPARSE:
        SLOTS += token0.to(tl.int64) * table_s
    else:
        BT += seq.to(tl.int64) * table_s

    first = 0
    high = length
    full = length // BLOCK_N
    if FEW == 1:
        context = length - query_len
        high = context + (tl.minimum(start + BLOCK_H, query_len * HEADS) - 1) // HEADS + 1
        full = (context + start // HEADS + 1) // BLOCK_N
    last = tl.cdiv(high, BLOCK_N)
    if SPLIT:
        first = begin
        last = tl.minimum(end, last)
    full = tl.maximum(tl.minimum(full, last), first)
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    if not SPARSE:
        acc, m, l = _rows(
            acc, m, l, q, q_rope, KV, BT, SLOTS, first, full, length, row_pos, scale, kv_b, kv_t,
            False, SPARSE, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE, APART, FEW,
        )  # fmt: skip
        first = full
    return _rows(
        acc, m, l, q, q_rope, KV, BT, SLOTS, first, last, length, row_pos, scale, kv_b, kv_t,
        True, SPARSE, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE, APART, FEW,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lse_t", "table_s"])
def mla_kernel(
    Q, KV, OUT, LSE, PARTS, PART_LSE, BT, SLOTS, SEQ_LENS, STARTS, WORK, scale, v_scale,
    q_t, q_h, kv_b, kv_t, o_t, o_h, lse_t, table_s,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPARSE: tl.constexpr, FEW: tl.constexpr,
    HAS_LSE: tl.constexpr, EARLY: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Tiles of (token, head) rows over their sequence's cached rows, whole or in pieces.

    Grid: (tiles), WORK their sequences, then their first rows; `SPLIT`: (programs), whose stretches
    WORK holds. `FEW`: sequences have a few query tokens instead of one; 1: causal, 2: each sees all
    keys. `SPARSE`: a sequence is a token, its rows SLOTS. `table_s`: the width of the block table, or
    of SLOTS.
    """
    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_H)
    at = tl.program_id(0)
    stop = at + 1
    if SPLIT:
        at, stop, tile, low, high, seq, start = my_stretch(WORK, True)
    else:
        seq = tl.load(WORK + at)
        start = tl.load(WORK + tl.num_programs(0) + at)
    while at < stop:
        token0 = seq
        query_len = 1
        if FEW:
            token0 = tl.load(STARTS + seq)
            query_len = tl.load(STARTS + seq + 1) - token0
        if SPARSE:
            length = table_s
        else:
            length = tl.load(SEQ_LENS + seq)
        begin = 0
        end = 0
        first = 0
        last = 0
        part = 0
        if SPLIT:
            begin, end, part, first, last = piece_of(WORK, at, stop, low, high)
        acc, m, l = _attend(
            Q, KV, BT, SLOTS, scale, q_t, q_h, kv_b, kv_t, table_s,
            seq, token0, query_len, length, start, begin, end,
            HEADS, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_H, BLOCK_N, BLOCK_SIZE, SPLIT, SPARSE, APART,
            FEW,
        )  # fmt: skip
        row_ok = start + rows < query_len * HEADS
        if last > first:
            store_part(acc, m, l, PARTS, PART_LSE, part * BLOCK_H + rows, row_ok, RANK, BLOCK_R)
        else:
            finish(
                acc, m, l, OUT, LSE, LSE, v_scale,
                (token0 + (start + rows) // HEADS).to(tl.int64),
                (start + rows) % HEADS, row_ok, o_t, o_h, lse_t, RANK, BLOCK_R, False, HAS_LSE,
            )  # fmt: skip
        if SPLIT:
            at = high
            low = high
            tile, high, seq, start = next_tile(WORK, tile, True)
        else:
            at = stop
