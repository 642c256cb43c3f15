"""The MLA kernel: MQA over the latent cache, whose key tile is its value tile too.

Absorbed as in DeepSeek-V2 (2024): a query is [latent, rope], a cached row [latent, rope], and the
latent part of the row is the value. Each row is loaded once for scores and output. Logits are kept
in base 2; the LSE leaves in base e. Splits are merged by `decode.merge_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyattn_triton.softmax import LN2, LOG2E
from polyattn_triton.tiles import blocks_of, load_held_rows, load_rows


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
def _attend(
    acc, m, l, q, q_rope, k, k_rope, inside, scale, taken, MASK: tl.constexpr, APART: tl.constexpr
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
        s = tl.where(inside[None, :], s, float("-inf"))
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
    acc, m, l, q, q_rope, KV, BT, SLOTS, first, last, length, scale, kv_b, kv_t,
    MASK: tl.constexpr, SPARSE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Attend to tiles `first` to `last` of the sequence's rows, or of the chosen ones."""
    for tile in range(first, last):
        k, k_rope, inside = _load(
            KV, BT, SLOTS, tile, length, kv_b, kv_t,
            MASK, SPARSE, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        acc, m, l = _attend(acc, m, l, q, q_rope, k, k_rope, inside, scale, last > 0, MASK, APART)
    return acc, m, l


@triton.jit(do_not_specialize=["lse_t", "table_s", "splits"])
def mla_kernel(
    Q, KV, OUT, LSE, PARTS, PART_LSE, BT, SLOTS, SEQ_LENS, scale, v_scale,
    q_t, q_h, kv_b, kv_t, o_t, o_h, lse_t, table_s,
    splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPARSE: tl.constexpr,
    HAS_LSE: tl.constexpr, EARLY: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One token, some of its heads, all its rows or one split of them.

    Grid: (tokens, head blocks, splits). `table_s`: the width of the block table, or of SLOTS.
    """
    if EARLY:  # let the merge be scheduled while this runs (Hopper's dependent launch)
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < HEADS
    offs_r = tl.arange(0, BLOCK_R)
    offs_p = tl.arange(0, BLOCK_P)
    if SPARSE:
        length = table_s
        SLOTS += token * table_s
    else:
        length = tl.load(SEQ_LENS + token)
        BT += token * table_s
    q_row = token * q_t + head * q_h
    q = tl.load(
        Q + q_row[:, None] + offs_r[None, :],
        mask=head_ok[:, None] & (offs_r < RANK)[None, :], other=0.0,
    )  # fmt: skip
    q_rope = tl.load(
        Q + RANK + q_row[:, None] + offs_p[None, :],
        mask=head_ok[:, None] & (offs_p < ROPE)[None, :], other=0.0,
    )  # fmt: skip

    first = 0
    last = tl.cdiv(length, BLOCK_N)
    full = length // BLOCK_N
    if SPLIT:
        each = tl.cdiv(last, splits)
        first = split * each
        last = tl.minimum(first + each, last)
    full = tl.maximum(tl.minimum(full, last), first)
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    if not SPARSE:
        acc, m, l = _rows(
            acc, m, l, q, q_rope, KV, BT, SLOTS, first, full, length, scale, kv_b, kv_t,
            False, SPARSE, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE, APART,
        )  # fmt: skip
        first = full
    acc, m, l = _rows(
        acc, m, l, q, q_rope, KV, BT, SLOTS, first, last, length, scale, kv_b, kv_t,
        True, SPARSE, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_N, BLOCK_SIZE, APART,
    )  # fmt: skip

    safe = tl.where(l == 0.0, 1.0, l)
    stored = head_ok[:, None] & (offs_r < RANK)[None, :]
    if SPLIT:
        part = (token * HEADS + head) * splits + split
        tl.store(PARTS + part[:, None] * RANK + offs_r[None, :], acc / safe[:, None], mask=stored)
        lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(safe))
        tl.store(PART_LSE + part, lse, mask=head_ok)
    else:
        out = acc * (v_scale / safe)[:, None]
        o_row = token * o_t + head * o_h
        tl.store(OUT + o_row[:, None] + offs_r[None, :], out.to(OUT.dtype.element_ty), mask=stored)
        if HAS_LSE:
            lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe)) * LN2)
            tl.store(LSE + token * lse_t + head, lse, mask=head_ok)
