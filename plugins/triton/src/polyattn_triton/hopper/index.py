"""Scores of prompts over e4m3 index keys, for Hopper, in Gluon: what `kernels.index` computes.

Triton waits for a product at once, unless a loop returns it. Here a program's tokens are two halves:
while the tensor cores multiply a tile of keys by one half's queries, the other half's products are
summed. Sums are stored from where they are, without a way through shared memory.

Gluon has no interpreter: CI compiles this ahead of time, and a GPU checks its values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from polyattn_triton.hopper.names import async_load, barrier
from polyattn_triton.kernels.choice import place_of


@gluon.constexpr_function
def by_rows(width):
    """The layout in which 128 threads move rows of so many bytes, 16 at a time."""
    return gl.BlockedLayout([1, 16], [512 // width, width // 16], [4, 1], [1, 0])


@gluon.constexpr_function
def by_score(half):
    """The layout (64, half, 4) in which a thread has the four sums of a score, which four threads had."""
    registers = [[0, 0, 1], [0, 0, 2]] + ([[0, 2, 0]] if half == 4 else [])
    lanes = [[8, 0, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, half, 4])


@gluon.jit
def _queries(to, Q, WEIGHTS, at, tokens, q_t, q_h, w_t, w_h, ACC: gl.constexpr, FORM: gl.constexpr):
    """Put a half's queries into shared memory. Return each column's factor.

    FORM: the kernel's constants of queries.
    """
    HEADS: gl.constexpr = FORM[0]
    BLOCK_H: gl.constexpr = FORM[1]
    D: gl.constexpr = FORM[2]
    WEIGHTED: gl.constexpr = FORM[3]
    COLUMNS: gl.constexpr = to.shape[0]
    WIDE: gl.constexpr = by_rows(D)
    nn = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, WIDE))
    dd = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    own = at + nn // BLOCK_H
    there = (nn % BLOCK_H < HEADS) & (own < tokens)
    rows = own.to(gl.int64) * q_t + nn % BLOCK_H * q_h
    to.store(gl.load(Q + rows[:, None] + dd[None, :], mask=there[:, None], other=0.0))
    nn = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ACC))
    own = at + nn // BLOCK_H
    there = (nn % BLOCK_H < HEADS) & (own < tokens)
    factors = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(0, ACC))
    if WEIGHTED:
        places = own.to(gl.int64) * w_t + nn % BLOCK_H * w_h
        factors = gl.load(WEIGHTS + places, mask=there, other=0.0).to(gl.float32)
    return factors


@gluon.jit
def _seen(
    STARTS, LENS, at, first, tokens, seqs, M: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return each token's sequence and how many entries it sees, and the first and last sequence."""
    tt = gl.arange(0, HALF, layout=LAYOUT)
    of_token = tt * 0
    seen = tt * 0
    low = seqs
    high = 0
    for i in gl.static_range(HALF):
        token = gl.minimum(at + i, tokens - 1)
        seq, position, length = place_of(STARTS, LENS, first + token, seqs, False)
        count = gl.maximum(gl.minimum(position + 1, length), 0) // M
        of_token = gl.where(tt == i, seq, of_token)
        seen = gl.where((tt == i) & (at + i < tokens), count, seen)
        low = gl.minimum(low, seq)
        high = gl.maximum(high, seq)
    return of_token, seen, low, high


@gluon.jit
def _copy_keys(to, KEYS, block, page, key, end, PAGE_SIZE: gl.constexpr):
    """Copy a tile of keys, without waiting."""
    D: gl.constexpr = to.shape[1]
    WIDE: gl.constexpr = by_rows(D)
    ee = gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, WIDE))
    dd = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    if key < end:
        ROWS = KEYS + block.to(gl.int64) * page + key % PAGE_SIZE * D
        async_load(to, ROWS + (ee[:, None] * D + dd[None, :]))


@gluon.jit
def _copy_scales(to, SCALES, block, page, key, end, PAGE_SIZE: gl.constexpr, SCALED: gl.constexpr):
    """Copy the tile's scales, too: then all of it is on its way."""
    if SCALED:
        ee = gl.arange(0, to.shape[0], layout=gl.BlockedLayout([1], [32], [4], [0]))
        if key < end:
            AT = SCALES + block.to(gl.int64) * page + key % PAGE_SIZE
            async_load(to, AT + ee)
    async_copy.commit_group()


@gluon.jit
def _write(OUT, BEST, s, factors, by, start, here, at, width, FORM: gl.constexpr):
    """Write a half's scores of a tile, of its products, as `kernels.index`.

    FORM: the kernel's constants of scores.
    """
    HALF: gl.constexpr = FORM[0]
    RELU: gl.constexpr = FORM[1]
    WEIGHTED: gl.constexpr = FORM[2]
    GROUP: gl.constexpr = FORM[3]
    ENTRIES: gl.constexpr = s.shape[0]
    FOUR: gl.constexpr = by_score(HALF)
    OWN: gl.constexpr = gl.SliceLayout(2, FOUR)
    if RELU:
        s = gl.maximum(s, 0.0)
    if WEIGHTED:
        s = s * factors[None, :]
    # A thread's own columns, pairs of every eight, are summed first.
    s = s.reshape([ENTRIES, HALF, s.shape[1] // HALF // 8, 4, 2]).permute((0, 1, 3, 2, 4))
    s = gl.sum(s.reshape([ENTRIES, HALF, 4, s.shape[3] * 2]), 3)
    s = gl.sum(gl.convert_layout(s, FOUR), 2) * by[:, None]
    s = gl.where(s == s, s, float("-inf"))
    ee = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, OWN))
    row = (at + gl.arange(0, HALF, layout=gl.SliceLayout(0, OWN))).to(gl.int64)
    inside = ee[:, None] < (here - start)[None, :]
    gl.store(OUT + start + (row[None, :] * width + ee[:, None]), s, mask=inside)
    if GROUP > 1:
        s = gl.where(inside, s, float("-inf"))
        s = gl.max(s.reshape([ENTRIES // GROUP, GROUP, HALF]), 1)
        BEST_OF: gl.constexpr = s.type.layout
        g = start // GROUP + gl.arange(0, ENTRIES // GROUP, layout=gl.SliceLayout(1, BEST_OF))
        row = (at + gl.arange(0, HALF, layout=gl.SliceLayout(0, BEST_OF))).to(gl.int64)
        here = gl.convert_layout(here, gl.SliceLayout(0, BEST_OF))
        to = BEST + row[None, :] * (width // GROUP) + g[:, None]
        gl.store(to, s, mask=g[:, None] * GROUP < here[None, :])


@gluon.jit(do_not_specialize=["table_s", "width", "first", "tokens", "seqs", "tiles"])
def prompt_scores_kernel(
    Q, KEYS, SCALES, WEIGHTS, TABLE, STARTS, LENS, OUT, BEST, scale,
    q_t, q_h, w_t, w_h, page, scale_page, table_s, width, first, tokens, seqs,
    tiles,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, D: gl.constexpr, M: gl.constexpr,
    PAGE_SIZE: gl.constexpr, ENTRIES: gl.constexpr, COLUMNS: gl.constexpr,
    RELU: gl.constexpr, WEIGHTED: gl.constexpr, SCALED: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Score `tiles` tiles of ENTRIES for two halves of neighbouring tokens, of COLUMNS heads each.

    Grid: (runs of tiles, tiles of tokens). A page has whole tiles.
    """
    HALF: gl.constexpr = COLUMNS // BLOCK_H
    OF_QUERIES: gl.constexpr = (HEADS, BLOCK_H, D, WEIGHTED)
    OF_SCORES: gl.constexpr = (HALF, RELU, WEIGHTED, GROUP)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=D, element_bitwidth=8, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    at = gl.program_id(1) * (2 * HALF)
    begin = gl.program_id(0) * tiles * ENTRIES
    q_smem = gl.allocate_shared_memory(Q.dtype.element_ty, [2, COLUMNS, D], ROWS)
    k_smem = gl.allocate_shared_memory(KEYS.dtype.element_ty, [STAGES, ENTRIES, D], ROWS)
    by_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ENTRIES], PLAIN)
    q = q_smem.index(0).permute((1, 0))
    q2 = q_smem.index(1).permute((1, 0))
    factors = _queries(q_smem.index(0), Q, WEIGHTS, at, tokens, q_t, q_h, w_t, w_h, ACC, OF_QUERIES)
    factors2 = _queries(
        q_smem.index(1), Q, WEIGHTS, at + HALF, tokens, q_t, q_h, w_t, w_h, ACC, OF_QUERIES
    )
    OWN: gl.constexpr = gl.SliceLayout(2, by_score(HALF))
    TOKENS: gl.constexpr = gl.SliceLayout(0, OWN)
    of_token, seen, low, high = _seen(STARTS, LENS, at, first, tokens, seqs, M, HALF, TOKENS)
    of_token2, seen2, _low2, high = _seen(
        STARTS, LENS, at + HALF, first, tokens, seqs, M, HALF, TOKENS
    )
    s = gl.zeros([ENTRIES, COLUMNS], gl.float32, ACC)
    fence_async_shared()
    for seq in range(low, high + 1):
        here = gl.where(of_token == seq, seen, 0)
        here2 = gl.where(of_token2 == seq, seen2, 0)
        end = gl.minimum(begin + ENTRIES * tiles, gl.maximum(gl.max(here, 0), gl.max(here2, 0)))
        if begin < end:
            BLOCKS = TABLE + table_s.to(gl.int64) * seq
            block = gl.load(BLOCKS + begin // PAGE_SIZE)
            barrier()  # the previous sequence's data has been read
            for stage in gl.static_range(STAGES - 1):
                key = begin + stage * ENTRIES
                _copy_keys(k_smem.index(stage), KEYS, block, page, key, end, PAGE_SIZE)
                _copy_scales(
                    by_smem.index(stage), SCALES, block, scale_page, key, end, PAGE_SIZE, SCALED
                )
                key += ENTRIES
                block = gl.load(BLOCKS + key // PAGE_SIZE, mask=key < end, other=0)
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            barrier()
            run = warpgroup_mma(k_smem.index(0), q, s, use_acc=False, is_async=True)
            s2 = gl.zeros([ENTRIES, COLUMNS], gl.float32, ACC)
            for start in range(begin, end, ENTRIES):
                n = (start - begin) // ENTRIES
                by = gl.full([ENTRIES], 1.0, gl.float32, gl.SliceLayout(1, OWN)) * scale
                if SCALED:
                    by = by * by_smem.index(n % STAGES).load(gl.SliceLayout(1, OWN))
                s = warpgroup_mma_wait(0, deps=[run])
                run2 = warpgroup_mma(k_smem.index(n % STAGES), q2, s2, use_acc=False, is_async=True)
                # A branch follows each product: without one ptxas spreads it over the sums.
                key = start + (STAGES - 1) * ENTRIES
                free = (n + STAGES - 1) % STAGES
                _copy_keys(k_smem.index(free), KEYS, block, page, key, end, PAGE_SIZE)
                _write(OUT, BEST, s, factors, by, start, here, at, width, OF_SCORES)
                async_copy.wait_group(STAGES - 3)
                fence_async_shared()
                s2 = warpgroup_mma_wait(0, deps=[run2])
                barrier()
                later = (n + 1) % STAGES  # behind the last tile the product is unused
                run = warpgroup_mma(k_smem.index(later), q, s, use_acc=False, is_async=True)
                _copy_scales(
                    by_smem.index(free), SCALES, block, scale_page, key, end, PAGE_SIZE, SCALED
                )
                key += ENTRIES
                block = gl.load(BLOCKS + key // PAGE_SIZE, mask=key < end, other=0)
                _write(OUT, BEST, s2, factors2, by, start, here2, at + HALF, width, OF_SCORES)
            warpgroup_mma_wait(0, deps=[run])
            async_copy.wait_group(0)
