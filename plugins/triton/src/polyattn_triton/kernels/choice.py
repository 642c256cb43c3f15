"""Where are the chosen keys? A choice becomes a block table and a length a row, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(STARTS, LENS, token, seqs, DECODE: tl.constexpr):
    """A token's sequence, its position in it and the sequence's length: `token_places` of one.

    `DECODE`: each sequence has one token.
    """
    seq = token
    if DECODE:
        length = tl.load(LENS + token)
        position = length - 1
    else:
        low = 0
        high = seqs - 1
        while low < high:  # the first sequence whose tokens end behind this one
            middle = (low + high) // 2
            if tl.load(STARTS + middle + 1) > token:
                high = middle
            else:
                low = middle + 1
        seq = low
        length = tl.load(LENS + seq)
        position = length - tl.load(STARTS + seq + 1) + token
    return seq, position, length


@triton.jit(do_not_specialize=["table_s", "first", "seqs", "budget", "pages", "width"])
def chosen_pages_kernel(
    IDS, TABLE, STARTS, LENS, HEADS, OUT, OUT_LENS,
    by_block, by_run, by_head, table_s, first, seqs, budget, pages, width,
    ROWS: tl.constexpr, SCOPES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    PHYSICAL: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Write a row's pages, the complete ones first, and how many entries it attends to.

    Grid: (tokens, ROWS); a token has ROWS rows, of SCOPES choices of `budget` ids. A group of GROUP
    entries has as many pages of SIZE as fit. `pages`: of a row of OUT; `width`: of the block table.
    """
    token = tl.program_id(0)
    row = tl.program_id(1)
    seq, position, length = place_of(STARTS, LENS, first + token, seqs, DECODE)
    if CAUSAL:
        length = tl.minimum(length, position + 1)
    visible = tl.maximum(length, 0) // M
    head = tl.load(HEADS + row) * by_head
    k = tl.arange(0, BLOCK)
    scope = row if SCOPES > 1 else 0
    inside = k < budget
    ids = tl.load(IDS + (token * SCOPES + scope).to(tl.int64) * budget + k, mask=inside, other=-1)
    ids = ids.to(tl.int64)
    if PHYSICAL:
        counts = (ids >= 0).to(tl.int32)
    else:
        counts = tl.where(ids >= 0, tl.minimum(visible - ids * GROUP, GROUP), 0)
        counts = tl.maximum(counts, 0).to(tl.int32)
    # Complete groups, then the incomplete one, then what names nothing.
    whole = (counts == GROUP).to(tl.int32)
    part = ((counts > 0) & (counts < GROUP)).to(tl.int32)
    counts = tl.where(part * tl.cumsum(part, 0) > 1, 0, counts)  # pages hold it once
    part = tl.minimum(part, counts)
    none = (inside & (counts == 0)).to(tl.int32)
    of_whole = tl.sum(whole, 0)
    place = tl.where(part != 0, of_whole + tl.cumsum(part, 0), tl.cumsum(whole, 0))
    place = tl.where(none != 0, of_whole + tl.sum(part, 0) + tl.cumsum(none, 0), place) - 1
    row = (token * ROWS + row).to(tl.int64)
    tl.store(OUT_LENS + row, tl.sum(counts, 0))
    OUT += row * pages
    TABLE += seq.to(tl.int64) * table_s
    for at in range(0, GROUP, SIZE):
        entries = ids * GROUP + at
        block = entries // BLOCK_SIZE
        if not PHYSICAL:
            block = tl.load(TABLE + tl.minimum(block, width - 1), mask=counts > 0, other=0)
        page = block.to(tl.int64) * by_block + entries % BLOCK_SIZE // SIZE * by_run
        page = tl.where(counts > 0, page, 0) + head
        tl.store(OUT + place * (GROUP // SIZE) + at // SIZE, page.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["table_s", "first", "seqs", "budget", "width"])
def chosen_places_kernel(
    IDS, TABLE, STARTS, LENS, OUT, table_s, first, seqs, budget, width,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Write the places in the cache of a token's chosen entries, -1 for hidden ones.

    Grid: (tokens, blocks of entries). `budget`: a token's ids, of GROUP entries each.
    """
    token = tl.program_id(0)
    seq, position, length = place_of(STARTS, LENS, first + token, seqs, DECODE)
    if CAUSAL:
        length = tl.minimum(length, position + 1)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < budget * GROUP
    ids = tl.load(IDS + token.to(tl.int64) * budget + k // GROUP, mask=inside, other=-1)
    entries = ids.to(tl.int64) * GROUP + k % GROUP
    seen = (ids >= 0) & (entries < tl.maximum(length, 0) // M)
    column = tl.minimum(entries // BLOCK_SIZE, width - 1)
    block = tl.load(TABLE + seq.to(tl.int64) * table_s + column, mask=seen, other=0)
    places = tl.where(seen, block * BLOCK_SIZE + (entries % BLOCK_SIZE).to(tl.int32), -1)
    tl.store(OUT + token.to(tl.int64) * budget * GROUP + k, places, mask=inside)
