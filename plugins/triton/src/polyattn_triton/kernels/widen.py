"""Copies of cached keys and values in 16 bits, for a kernel that multiplies nothing narrower."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["bt_s", "count", "seqs", "halvings"])
def widen_kernel(
    K, V, K_OUT, V_OUT, BT, SEQ_LENS, STARTS, FIRSTS, ORIGINS,
    k_b, k_t, k_h, v_b, v_t, v_h, o_t, o_h, bt_s, count, seqs, halvings,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    READ_K: tl.constexpr, READ_V: tl.constexpr,
):  # fmt: skip
    """Copy the step's tokens, sequence after sequence. Grid: (tiles of `ROWS` of them, KV heads).

    `count` tokens are copied; FIRSTS says which of them is each sequence's first, ORIGINS which would be
    its token 0 (`hopper.widening`). `halvings` find one of `seqs` sequences. What no query sees is 0.
    `READ_K`, `READ_V`: how rows of bytes are read (`functions.rows`).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    held = row < count
    seq = tl.zeros([ROWS], tl.int32)  # the last whose first token isn't beyond
    beyond = seq + seqs
    for _ in range(halvings):
        middle = (seq + beyond) // 2
        reached = tl.load(FIRSTS + middle) <= row
        seq = tl.where(reached, middle, seq)
        beyond = tl.where(reached, beyond, middle)
    key_pos = row - tl.load(ORIGINS + seq)
    if WINDOW > 0:
        queries = tl.load(STARTS + seq + 1) - tl.load(STARTS + seq)
        held = held & (key_pos > tl.load(SEQ_LENS + seq) - queries - WINDOW)
    place = tl.load(BT + seq.to(tl.int64) * bt_s + key_pos // BLOCK_SIZE, mask=held, other=0)
    block = place.to(tl.int64)
    slot = key_pos % BLOCK_SIZE
    columns = tl.arange(0, D)
    k_row = block * k_b + slot * k_t + head * k_h
    v_row = block * v_b + slot * v_t + head * v_h
    if READ_K is None:
        k = tl.load(K + k_row[:, None] + columns[None, :], mask=held[:, None], other=0.0)
        v = tl.load(V + v_row[:, None] + columns[None, :], mask=held[:, None], other=0.0)
    else:
        k = READ_K(K, k_row, held, ROWS, D, D)
        v = READ_V(V, v_row, held, ROWS, D, D)
    to = row.to(tl.int64) * o_t + head * o_h
    inside = (row < count)[:, None]
    tl.store(K_OUT + to[:, None] + columns[None, :], k.to(K_OUT.dtype.element_ty), mask=inside)
    tl.store(V_OUT + to[:, None] + columns[None, :], v.to(V_OUT.dtype.element_ty), mask=inside)
