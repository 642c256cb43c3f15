"""Index keys are scored, and the best candidates chosen: two kernels, whatever the indexer.

A score lies in device memory between them. The second finds the score of the last candidate that is
chosen, by numbers whose order is the scores' order, and lists the ids. Of many candidates the first
writes the best of each group as well: the k best entries are in the k groups whose best are best.
"""

import triton
import triton.language as tl

from polyattn_triton.functions.ops import on_nvidia
from polyattn_triton.kernels.choice import place_of
from polyattn_triton.kernels.decode import power_below


@triton.jit
def _seen(STARTS, LENS, token, seqs, DECODE: tl.constexpr):
    """A token's sequence, and how many of its tokens it sees."""
    seq, position, length = place_of(STARTS, LENS, token, seqs, DECODE)
    return seq, tl.maximum(tl.minimum(position + 1, length), 0)


@triton.jit
def _queries(
    Q, WEIGHTS, STARTS, LENS, at, first, tokens, seqs, q_t, q_h, w_t, w_h, FORM: tl.constexpr
):
    """Queries as columns, each one's factor, each token's sequence and its number of visible entries.

    FORM: the kernel's constants of tokens.
    """
    TOKENS: tl.constexpr = FORM[0]
    HEADS: tl.constexpr = FORM[1]
    BLOCK_H: tl.constexpr = FORM[2]
    D: tl.constexpr = FORM[3]
    BLOCK_D: tl.constexpr = FORM[4]
    M: tl.constexpr = FORM[5]
    WEIGHTED: tl.constexpr = FORM[6]
    BY_HALF: tl.constexpr = FORM[7]
    DECODE: tl.constexpr = FORM[8]
    dd = tl.arange(0, BLOCK_D)
    nn = tl.arange(0, TOKENS * BLOCK_H)
    head = nn % BLOCK_H
    own = at + nn // BLOCK_H
    named = (head < HEADS) & (own < tokens)
    q = tl.load(
        Q + (own.to(tl.int64) * q_t + head * q_h)[None, :] + dd[:, None],
        mask=named[None, :] & (dd < D)[:, None],
        other=0.0,
    )
    factors = tl.full([TOKENS * BLOCK_H], 1.0, tl.float32)
    if WEIGHTED:
        factors = tl.load(WEIGHTS + own.to(tl.int64) * w_t + head * w_h, mask=named, other=0.0)
        factors = factors.to(tl.float32)
    if BY_HALF:
        unit = power_below(tl.max(tl.abs(q.to(tl.float32)), 0))
        q = (q.to(tl.float32) / unit[None, :]).to(tl.float16)
        factors *= unit
    tt = tl.arange(0, TOKENS)
    of_token = tt * 0
    seen = tt * 0
    for i in tl.static_range(TOKENS):
        one = tl.minimum(at + i, tokens - 1)
        seq, count = _seen(STARTS, LENS, first + one, seqs, DECODE)
        of_token = tl.where(tt == i, seq, of_token)
        seen = tl.where((tt == i) & (at + i < tokens), count // M, seen)
    return q, factors, of_token, seen


@triton.jit
def _write(OUT, BEST, s, factors, by, start, here, at, width, FORM: tl.constexpr):
    """Write a tile's scores, of its products (ENTRIES, heads); `here`: entries that each token sees.

    FORM: the kernel's constants of tiles.
    """
    TOKENS: tl.constexpr = FORM[0]
    HEADS: tl.constexpr = FORM[1]
    BLOCK_H: tl.constexpr = FORM[2]
    ENTRIES: tl.constexpr = FORM[3]
    RELU: tl.constexpr = FORM[4]
    FACTORS: tl.constexpr = FORM[5]
    BY_HEAD: tl.constexpr = FORM[6]
    POOL: tl.constexpr = FORM[7]
    GROUP: tl.constexpr = FORM[8]
    e = start + tl.arange(0, ENTRIES)
    c = start // POOL + tl.arange(0, ENTRIES // POOL)
    if RELU:
        s = tl.maximum(s, 0.0)
    if FACTORS:
        s *= factors[None, :]
    if BY_HEAD:
        nn = tl.arange(0, TOKENS * BLOCK_H)
        tt = tl.arange(0, TOKENS)
        here = tl.sum(tl.where((nn // BLOCK_H)[:, None] == tt[None, :], here[None, :], 0), 1)
        row = (at + nn // BLOCK_H).to(tl.int64) * HEADS + nn % BLOCK_H
        there = (nn % BLOCK_H < HEADS)[None, :]
        s *= by[:, None]
    else:
        row = at.to(tl.int64) + tl.arange(0, TOKENS)
        there = (row >= 0)[None, :]
        s = tl.sum(tl.reshape(s, [ENTRIES, TOKENS, BLOCK_H]), 2) * by[:, None]
    s = tl.where(s == s, s, float("-inf"))
    inside = there & (e[:, None] < here[None, :])
    if POOL > 1:
        s = tl.where(inside, s, float("-inf"))
        s = tl.max(tl.reshape(s, [ENTRIES // POOL, POOL, s.shape[1]]), 1)
        inside = there & (c[:, None] * POOL < here[None, :])
    tl.store(OUT + row[None, :] * width + c[:, None], s, mask=inside)
    if GROUP > 1:
        s = tl.where(inside, s, float("-inf"))
        s = tl.max(tl.reshape(s, [ENTRIES // GROUP, GROUP, TOKENS]), 1)
        g = start // GROUP + tl.arange(0, ENTRIES // GROUP)
        to = BEST + row[None, :] * (width // GROUP) + g[:, None]
        tl.store(to, s, mask=g[:, None] * GROUP < here[None, :])


@triton.jit(do_not_specialize=["table_s", "width", "first", "tokens", "seqs"])
def index_scores_kernel(
    Q, KEYS, SCALES, WEIGHTS, TABLE, STARTS, LENS, OUT, BEST, scale,
    q_t, q_h, w_t, w_h, page, scale_page, table_s, width, first, tokens, seqs,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, PAGE_SIZE: tl.constexpr, DECODE: tl.constexpr, TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr, TILES: tl.constexpr, RELU: tl.constexpr, WEIGHTED: tl.constexpr,
    BY_HEAD: tl.constexpr, SCALED: tl.constexpr, POOL: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Score TILES tiles of ENTRIES for TOKENS neighbouring tokens, which mostly share a sequence.

    Writes each score, or the best of POOL neighbours; GROUP > 1: to BEST those of as many. Scales are
    positive: they may come after the activation and the sum over heads. HALVES = 2: while the second
    half of a tile's products is computed, the first one is summed. Grid: (runs of TILES, tiles of
    TOKENS); `first`: the step's token that the tensors begin with.
    """
    IN_PAGE: tl.constexpr = PAGE_SIZE % ENTRIES == 0
    HALF: tl.constexpr = TOKENS // HALVES
    # e4m3 becomes float16 in one instruction and bfloat16 in several (`decode`); two e4m3 are multiplied.
    BY_HALF: tl.constexpr = KEYS.dtype.element_ty.is_fp8() and Q.dtype.element_ty == tl.bfloat16
    OF_TOKENS: tl.constexpr = (HALF, HEADS, BLOCK_H, D, BLOCK_D, M, WEIGHTED, BY_HALF, DECODE)
    OF_TILES: tl.constexpr = (
        HALF,
        HEADS,
        BLOCK_H,
        ENTRIES,
        RELU,
        WEIGHTED or BY_HALF,
        BY_HEAD,
        POOL,
        GROUP,
    )
    dd = tl.arange(0, BLOCK_D)
    ee = tl.arange(0, ENTRIES)
    at = tl.program_id(1) * TOKENS
    begin = tl.program_id(0) * ENTRIES * TILES
    q, factors, of_token, seen = _queries(
        Q, WEIGHTS, STARTS, LENS, at, first, tokens, seqs, q_t, q_h, w_t, w_h, OF_TOKENS
    )
    low = tl.min(of_token, 0)
    high = tl.max(of_token, 0)
    if HALVES == 2:
        q2, factors2, of_token2, seen2 = _queries(
            Q, WEIGHTS, STARTS, LENS, at + HALF, first, tokens, seqs, q_t, q_h, w_t, w_h, OF_TOKENS
        )
        high = tl.max(of_token2, 0)
    for seq in range(low, high + 1):
        here = tl.where(of_token == seq, seen, 0)
        most = tl.max(here, 0)
        if HALVES == 2:
            here2 = tl.where(of_token2 == seq, seen2, 0)
            most = tl.maximum(most, tl.max(here2, 0))
            late = tl.zeros([ENTRIES, HALF * BLOCK_H], tl.float32)
            late_by = tl.zeros([ENTRIES], tl.float32)
        end = tl.minimum(begin + ENTRIES * TILES, most)
        BLOCKS = TABLE + (tl.full([], 0, tl.int64) + seq) * table_s
        # The next tile's blocks are loaded a step ahead: keys that wait for a load of their own step
        # are not put in flight early (Triton 3.6).
        if IN_PAGE:
            block = tl.load(BLOCKS + begin // PAGE_SIZE, mask=begin < end, other=0)
        else:
            block = tl.load(BLOCKS + (begin + ee) // PAGE_SIZE, mask=begin + ee < end, other=0)
        for start in tl.range(begin, end, ENTRIES, num_stages=STAGES):
            e = start + ee
            page_at = block.to(tl.int64)
            by = tl.full([ENTRIES], 1.0, tl.float32) * scale
            if (
                IN_PAGE
            ):  # one address and short offsets; what lies behind the end is no entry's score
                later = start + ENTRIES
                block = tl.load(BLOCKS + later // PAGE_SIZE, mask=later < end, other=0)
                ROWS = KEYS + page_at * page + (start % PAGE_SIZE) * D
                if D == BLOCK_D:
                    keys = tl.load(ROWS + (ee[:, None] * D + dd[None, :]))
                else:
                    keys = tl.load(
                        ROWS + (ee[:, None] * D + dd[None, :]), mask=(dd < D)[None, :], other=0.0
                    )
                if SCALED:
                    by *= tl.load(SCALES + page_at * scale_page + start % PAGE_SIZE + ee)
            else:
                later = e + ENTRIES
                block = tl.load(BLOCKS + later // PAGE_SIZE, mask=later < end, other=0)
                inside = (e < end)[:, None]
                if D < BLOCK_D:
                    inside = inside & (dd < D)[None, :]
                row = page_at * page + (e % PAGE_SIZE) * D
                keys = tl.load(KEYS + row[:, None] + dd[None, :], mask=inside, other=0.0)
                if SCALED:
                    places = page_at * scale_page + e % PAGE_SIZE
                    by *= tl.load(SCALES + places, mask=e < end, other=0.0)
            keys = keys.to(q.dtype)
            s = tl.dot(keys, q, input_precision="ieee")
            if HALVES == 2:
                # The second half of the tile before; the first step has none.
                then, sees = start - ENTRIES, tl.where(start > begin, here2, -(1 << 30))
                _write(OUT, BEST, late, factors2, late_by, then, sees, at + HALF, width, OF_TILES)
                late = tl.dot(keys, q2, input_precision="ieee")
                late_by = by
            _write(OUT, BEST, s, factors, by, start, here, at, width, OF_TILES)
        if HALVES == 2:
            last = begin + (tl.cdiv(end - begin, ENTRIES) - 1) * ENTRIES
            sees2 = tl.where(end > begin, here2, -(1 << 30))
            _write(OUT, BEST, late, factors2, late_by, last, sees2, at + HALF, width, OF_TILES)


@triton.jit
def _ranked(
    SCORES, HELD, IDS, start, high, seen, there, FIRST: tl.constexpr, LAST: tl.constexpr,
    POOL: tl.constexpr, BLOCK_POOL: tl.constexpr, WITHIN: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Return BLOCK candidates and their scores, NaN for none; LISTED > 0: of groups of so many."""
    c = start + tl.arange(0, BLOCK)
    ok = c < high
    there_too = c < (high + 15) // 16 * 16  # scores have room for whole vectors
    if LISTED > 0:
        c = tl.load(IDS + c // LISTED, mask=ok, other=-1) * LISTED + c % LISTED
        ok = (c >= 0) & (c < there)
        there_too = ok
    if BLOCK_POOL == 1 and WITHIN == 0:
        s = tl.load(SCORES + c, mask=there_too, other=0.0)
    else:
        e = c[:, None] * POOL + tl.arange(0, BLOCK_POOL)[None, :]
        inside = ok[:, None] & (tl.arange(0, BLOCK_POOL) < POOL)[None, :] & (e < seen)
        if WITHIN > 0:
            inside = inside & (tl.load(HELD + e // WITHIN, mask=inside, other=0) != 0)
        s = tl.max(tl.load(SCORES + e, mask=inside, other=float("-inf")), 1)
        ok = tl.max(inside.to(tl.int32), 1) > 0
    if FIRST + LAST > 0:
        s = tl.where((c < FIRST) | (c >= there - LAST), float("inf"), s)
    return c, tl.where(ok, s, float("nan"))


@triton.jit
def _score_of(rank):
    """Return the score that is at a place in the order of all scores."""
    low = rank.to(tl.uint32)
    bits = tl.where((low >> 31) != 0, low ^ 0x80000000, low ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reaching(s, pivot):
    """1.0 for each score that reaches a pivot, else 0.0; LLVM takes four instructions."""
    if on_nvidia():
        ones = tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [s, pivot], tl.float32, True, 1
        )
    else:
        ones = tl.where(s >= pivot, 1.0, 0.0)
    return ones


@triton.jit
def _list(OUT, c, chosen, over, BLOCK: tl.constexpr):
    """Write the chosen candidates behind the `over` before them; return how many there are then."""
    ones = tl.reshape(chosen.to(tl.int32), [BLOCK // 4, 4])  # sums by four, then of fours
    fours = tl.sum(ones, 1)
    places = tl.cumsum(ones, 1) + (tl.cumsum(fours, 0) - fours + (over - 1))[:, None]
    tl.store(OUT + tl.reshape(places, [BLOCK]), c, mask=chosen)
    return over + tl.sum(fours, 0)


@triton.jit(
    do_not_specialize=["first", "seqs", "budget", "ids_n", "out_n", "width", "each", "parts"]
)
def index_select_kernel(
    SCORES, STARTS, LENS, BUDGETS, HELD, IDS, OUT,
    held_t, held_c, first, seqs, budget, ids_n, out_n, width, each, parts,
    CHOICES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, M: tl.constexpr,
    POOLED: tl.constexpr, POOL: tl.constexpr, BLOCK_POOL: tl.constexpr, WITHIN: tl.constexpr,
    BLOCK: tl.constexpr, LIST: tl.constexpr, ONCE: tl.constexpr, LISTED: tl.constexpr,
    SHARES: tl.constexpr, TAIL: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """List the best of a part's candidates, ascending, -1 behind them; of equal scores the smaller ids.

    Grid: (tokens * choices, parts), of 16 * `each` candidates; a row has 16 * `width` scores. LISTED > 0:
    candidates are in the groups of so many that `ids_n` ids of an earlier pass name. POOLED: entries of a
    score; POOL: scores of a candidate. ONCE: a part is one BLOCK, all of it in registers. LIST:
    candidates that are listed at a time: the loop keeps the code small. SHARES: BUDGETS has each token's
    budget.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = row // CHOICES
    _, tokens = _seen(STARTS, LENS, first + token, seqs, DECODE)
    seen = tl.cdiv(tokens // M, POOLED)
    there = tl.cdiv(seen, POOL)
    SCORES += row.to(tl.int64) * width * 16
    HELD += token.to(tl.int64) * held_t + (row % CHOICES) * held_c
    OUT += (row.to(tl.int64) * parts + part) * out_n
    IDS += row.to(tl.int64) * ids_n
    each *= 16  # so the compiler knows that it, and a row, are whole vectors
    low = part * each
    high = tl.minimum(low + each, ids_n * LISTED if LISTED > 0 else there)
    left = budget
    if SHARES:
        left = tl.load(BUDGETS + token).to(tl.int32)
    # Ranks order all scores: the least one that is chosen lies in [least, top), which shrinks; `count`
    # candidates reach least, `above` reach top. Most often it is within a factor of 16 of the best score.
    least = tl.full([], 0x007FFFFF, tl.int64)  # of -inf
    top = tl.full([], 0xFF800001, tl.int64)  # behind inf
    count = left + 1
    wanted = least
    if ONCE:
        _, s = _ranked(
            SCORES, HELD, IDS, low, high, seen, there, FIRST, LAST, POOL, BLOCK_POOL, WITHIN, BLOCK,
            LISTED,
        )  # fmt: skip
        count = high - low
        if LISTED > 0 or WITHIN > 0:
            count = tl.sum(tl.where(s == s, 1.0, 0.0), 0).to(tl.int32)
        best = tl.max(tl.where(s == s, s, float("-inf")), 0) + 0.0
        bits = best.to(tl.uint32, bitcast=True)
        best_rank = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        top = best_rank.to(tl.int64) + 1
        wanted = tl.maximum((least + top) // 2, top - (1 << 25))
    above = 0
    turn = 0
    while (top - least > 1) & (count > left):
        pivot = _score_of(wanted)
        reached = 0.0
        if ONCE:
            reached = tl.sum(_reaching(s, pivot), 0)
        else:
            for start in range(low, high, BLOCK):
                _, some = _ranked(
                    SCORES, HELD, IDS, start, high, seen, there, FIRST, LAST, POOL, BLOCK_POOL,
                    WITHIN, BLOCK, LISTED,
                )  # fmt: skip
                reached += tl.sum(_reaching(some, pivot), 0)
        reach = tl.cast(reached, tl.int32)
        first_try = wanted == least
        if (reach >= left) | first_try:
            least = wanted
            count = reach
        else:
            top = wanted
            above = reach
        # Mostly as far as the counts say, every third time half way.
        turn += 1
        share = (count - left + 0.5) / (count - above + 1.0)
        share = tl.where(turn % 3 == 0, 0.5, share)
        wanted = least + ((top - least).to(tl.float32) * share).to(tl.int64)
        wanted = tl.minimum(tl.maximum(wanted, least + 1), top - 1)
    pivot = _score_of(least)
    total = 0
    equal = 0
    for start in range(low, high, LIST):
        c, some = _ranked(
            SCORES, HELD, IDS, start, high, seen, there, FIRST, LAST, POOL, BLOCK_POOL, WITHIN,
            LIST, LISTED,
        )  # fmt: skip
        chosen = some >= pivot
        if count > left:  # the first ones of the least score
            same = (some == pivot).to(tl.int32)
            last = left - above - equal
            chosen = (some > pivot) | ((same > 0) & (tl.cumsum(same, 0) <= last))
            equal += tl.sum(same, 0)
        total = _list(OUT, c, chosen, total, LIST)
    if TAIL:
        cut = tokens % M > 0
        tl.store(OUT + total, tokens // M, mask=cut)
        total += cut.to(tl.int32)
    for start in range(total, out_n, 256):
        rest = start + tl.arange(0, 256)
        tl.store(OUT + rest, -1, mask=rest < out_n)
