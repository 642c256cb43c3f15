"""Index keys are scored, and the best candidates chosen: two kernels, whatever the indexer.

A score lies in device memory between them. The second finds the score of the last candidate that is
chosen by the bits of a number whose order is the scores' order, eight at a time, and lists the ids.
"""

import triton
import triton.language as tl


@triton.jit
def _index_keys(
    KEYS, SCALES, TABLE, e, there, page, scale_page, DTYPE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return a tile of a sequence's keys, (entries, BLOCK_D), and their scales; TABLE is its row."""
    dd = tl.arange(0, BLOCK_D)
    block = tl.load(TABLE + e // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    row = block * page + (e % PAGE_SIZE) * D
    inside = there[:, None] & (dd < D)[None, :]
    keys = tl.load(KEYS + row[:, None] + dd[None, :], mask=inside, other=0.0).to(DTYPE)
    scales = tl.zeros(e.shape, dtype=tl.float32)
    if SCALED:
        scales = tl.load(SCALES + block * scale_page + e % PAGE_SIZE, mask=there, other=0.0)
    return keys, scales


@triton.jit
def _write_scores(
    OUT, q, weights, keys, scales, scale, token, e, seen, width,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, RELU: tl.constexpr, WEIGHTED: tl.constexpr,
    BY_HEAD: tl.constexpr, SCALED: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Score a tile of keys for a token, and write each score, or the best of POOL neighbours.

    Scales are positive: they may come after the activation and the sum over heads.
    """
    hh = tl.arange(0, BLOCK_H)
    s = tl.dot(keys, q, input_precision="ieee")
    if SCALED:
        scale = scales * scale
    else:
        scale = tl.zeros(e.shape, dtype=tl.float32) + scale
    if RELU:
        s = tl.maximum(s, 0.0)
    if POOL > 1:
        c = tl.max(tl.reshape(e, [e.shape[0] // POOL, POOL]), 1) // POOL
    else:
        c = e
    kept = c * POOL < seen
    if BY_HEAD:
        s *= scale[:, None]
        if POOL > 1:
            s = tl.where((e < seen)[:, None] & (s == s), s, float("-inf"))
            s = tl.max(tl.reshape(s, [e.shape[0] // POOL, POOL, BLOCK_H]), 1)
        to = OUT + (token * HEADS + hh[None, :]) * width + c[:, None]
        tl.store(to, s, mask=(hh < HEADS)[None, :] & kept[:, None])
    else:
        if WEIGHTED:
            s *= weights[None, :]
        s = tl.sum(s, 1) * scale
        if POOL > 1:
            s = tl.where((e < seen) & (s == s), s, float("-inf"))
            s = tl.max(tl.reshape(s, [e.shape[0] // POOL, POOL]), 1)
        tl.store(OUT + token * width + c, s, mask=kept)


@triton.jit(do_not_specialize=["tokens", "width", "table_s"])
def index_scores_kernel(
    Q, KEYS, SCALES, WEIGHTS, TABLE, SEQS, ENDS, VISIBLE, OUT, scale,
    q_t, q_h, w_t, w_h, page, scale_page, tokens, width, table_s,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr, ENTRIES: tl.constexpr, TILES: tl.constexpr,
    RELU: tl.constexpr, WEIGHTED: tl.constexpr, BY_HEAD: tl.constexpr, SCALED: tl.constexpr,
    POOL: tl.constexpr,
):  # fmt: skip
    """Score some tiles of ENTRIES for a token, or one tile for several tokens, which may share it.

    Grid: (runs of TILES, tiles of TOKENS); one of the two is 1.
    """
    first = tl.program_id(0) * ENTRIES * TILES
    dd = tl.arange(0, BLOCK_D)
    hh = tl.arange(0, BLOCK_H)
    inside = (hh < HEADS)[None, :] & (dd < D)[:, None]
    at = hh[None, :] * q_h + dd[:, None]
    weights = tl.zeros([BLOCK_H], dtype=tl.float32)
    if TOKENS == 1:
        token = tl.program_id(1).to(tl.int64)
        seen = tl.load(VISIBLE + token).to(tl.int32)
        TABLE += tl.load(SEQS + token) * table_s
        q = tl.load(Q + token * q_t + at, mask=inside, other=0.0)
        if WEIGHTED:
            weights = tl.load(WEIGHTS + token * w_t + hh * w_h, mask=hh < HEADS, other=0.0)
            weights = weights.to(tl.float32)
        for start in range(first, tl.minimum(first + ENTRIES * TILES, seen), ENTRIES):
            e = start + tl.arange(0, ENTRIES)
            keys, scales = _index_keys(
                KEYS, SCALES, TABLE, e, e < seen, page, scale_page, Q.dtype.element_ty, D, BLOCK_D,
                PAGE_SIZE, SCALED,
            )  # fmt: skip
            _write_scores(
                OUT, q, weights, keys, scales, scale, token, e, seen, width, HEADS, BLOCK_H, RELU,
                WEIGHTED, BY_HEAD, SCALED, POOL,
            )  # fmt: skip
    else:
        e = first + tl.arange(0, ENTRIES)
        before = -1
        keys = tl.zeros([ENTRIES, BLOCK_D], dtype=Q.dtype.element_ty)
        scales = tl.zeros([ENTRIES], dtype=tl.float32)
        for i in range(TOKENS):
            token = tl.program_id(1).to(tl.int64) * TOKENS + i
            seen = tl.load(VISIBLE + token, mask=token < tokens, other=0).to(tl.int32)
            if first < seen:
                seq = tl.load(SEQS + token).to(tl.int32)
                if seq != before:
                    before = seq
                    keys, scales = _index_keys(
                        KEYS, SCALES, TABLE + seq.to(tl.int64) * table_s, e, e < tl.load(ENDS + token),
                        page, scale_page, Q.dtype.element_ty, D, BLOCK_D, PAGE_SIZE, SCALED,
                    )  # fmt: skip
                q = tl.load(Q + token * q_t + at, mask=inside, other=0.0)
                if WEIGHTED:
                    weights = tl.load(WEIGHTS + token * w_t + hh * w_h, mask=hh < HEADS, other=0.0)
                    weights = weights.to(tl.float32)
                _write_scores(
                    OUT, q, weights, keys, scales, scale, token, e, seen, width, HEADS, BLOCK_H, RELU,
                    WEIGHTED, BY_HEAD, SCALED, POOL,
                )  # fmt: skip


@triton.jit
def _ranked(
    SCORES, HELD, IDS, start, high, seen, there, FIRST: tl.constexpr, LAST: tl.constexpr,
    POOL: tl.constexpr, BLOCK_POOL: tl.constexpr, WITHIN: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Return BLOCK candidates, their ranks, uint32 whose order is the scores', and which there are."""
    c = start + tl.arange(0, BLOCK)
    ok = c < high
    if LISTED:
        c = tl.load(IDS + c, mask=ok, other=-1)
        ok = c >= 0
    e = c[:, None] * POOL + tl.arange(0, BLOCK_POOL)[None, :]
    inside = ok[:, None] & (tl.arange(0, BLOCK_POOL) < POOL)[None, :] & (e < seen)
    if WITHIN > 0:
        inside = inside & (tl.load(HELD + e // WITHIN, mask=inside, other=0) != 0)
    s = tl.load(SCORES + e, mask=inside, other=float("-inf"))
    s = tl.where(s == s, s, float("-inf"))
    s = tl.max(s, 1) + 0.0  # -0 and 0 are one score
    ok = tl.max(inside.to(tl.int32), 1) > 0
    bits = s.to(tl.uint32, bitcast=True)
    rank = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    if FIRST + LAST > 0:
        rank = tl.where((c < FIRST) | (c >= there - LAST), 0xFFFFFFFF, rank).to(tl.uint32)
    return c, rank, ok


@triton.jit(do_not_specialize=["ids_n", "out_n", "width", "each", "parts"])
def index_select_kernel(
    SCORES, VISIBLE, BUDGETS, TAILS, HELD, IDS, OUT,
    held_t, held_c, ids_n, out_n, width, each, parts,
    CHOICES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, POOL: tl.constexpr,
    BLOCK_POOL: tl.constexpr, WITHIN: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """List the best of a part's candidates, ascending; of equal scores the smaller ids.

    Grid: (tokens * choices, parts). LISTED: the candidates are `ids_n` ids of earlier parts, else
    `each` of them from the part's first one on.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = row // CHOICES
    seen = tl.load(VISIBLE + token).to(tl.int32)
    there = (seen + POOL - 1) // POOL
    SCORES += row * width
    HELD += token * held_t + (row % CHOICES) * held_c
    OUT += (row * parts + part) * out_n
    IDS += row * ids_n
    low = part * each
    high = tl.minimum(low + each, there)
    if LISTED:
        low = 0
        high = ids_n
    left = tl.load(BUDGETS + token).to(tl.int32)
    bins = tl.arange(0, 256)
    prefix = tl.zeros([], dtype=tl.uint32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], dtype=tl.int32)
        for start in range(low, high, BLOCK):
            _, rank, ok = _ranked(
                SCORES, HELD, IDS, start, high, seen, there, FIRST, LAST, POOL, BLOCK_POOL, WITHIN,
                BLOCK, LISTED,
            )  # fmt: skip
            if step > 0:
                ok = ok & ((rank >> (shift + 8)) == prefix)
            counts += tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=ok)
        above = tl.cumsum(counts, 0, reverse=True)  # of this byte's value or a larger one
        if step == 0:
            left = tl.minimum(left, tl.max(above, 0))
        byte = tl.sum((above >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(bins == byte + 1, above, 0), 0)
        prefix = (prefix << 8) | byte.to(tl.uint32)
    count = 0
    equal = 0
    for start in range(low, high, BLOCK):
        c, rank, ok = _ranked(
            SCORES, HELD, IDS, start, high, seen, there, FIRST, LAST, POOL, BLOCK_POOL, WITHIN,
            BLOCK, LISTED,
        )  # fmt: skip
        same = (ok & (rank == prefix)).to(tl.int32)
        order = equal + tl.cumsum(same, 0)
        best = (ok & (rank > prefix)) | ((same != 0) & (order <= left))
        place = count + tl.cumsum(best.to(tl.int32), 0) - 1
        tl.store(OUT + place, c, mask=best)
        equal += tl.sum(same, 0)
        count += tl.sum(best.to(tl.int32), 0)
    if TAIL:
        tail = tl.load(TAILS + token).to(tl.int32)
        if tail >= 0:
            tl.store(OUT + count, tail)
