"""Rounds queries to e4m3 by the largest value of a request and KV head, in Triton's kernels.

Decodes take one launch: a token's scale is its own. Rows of several tokens take two: the largest values
meet in atomic maxima, whose order changes nothing, then all is divided. Torch's operators, six launches
that write what they read, stay as the definition, and run where the tensors are no GPU's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST = 1e-12
"""The largest value that counts for a query of zeros."""
ELEMENTS = 8192
"""Of the query that a program holds."""


@triton.jit
def largest_kernel(
    Q, SEQ_OF, FOUND, tokens, q_t, q_h,
    HEADS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Raise FOUND, int32 bits (sequences, HEADS), to the largest value of a tile of tokens.

    Grid: (tiles of tokens, KV heads). What isn't negative is in order as its bits are.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    x = _load(Q, token, head, tokens, q_t, q_h, EACH, SIZE, BLOCK_E, BLOCK_D)
    largest = tl.max(tl.max(tl.abs(x), 2), 1).to(tl.int32, bitcast=True)
    first = tl.program_id(0) * BLOCK_T
    seq = tl.load(SEQ_OF + tl.minimum(token, tokens - 1))
    one = tl.load(SEQ_OF + first)
    if one == tl.load(SEQ_OF + tl.minimum(first + BLOCK_T, tokens) - 1):
        tl.atomic_max(FOUND + one * HEADS + head, tl.max(largest, 0))
    else:
        tl.atomic_max(FOUND + seq * HEADS + head, largest, mask=token < tokens)


@triton.jit
def round_kernel(
    Q, SEQ_OF, FOUND, OUT, SCALES, tokens, q_t, q_h, largest, least,
    HEADS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Divide a tile of tokens by its sequences' scales; OUT is contiguous. Grid as above.

    `SINGLE`: every sequence has one token, whose largest value this program takes. Whatever has a token
    of a sequence writes its scale: all of them the same.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    x = _load(Q, token, head, tokens, q_t, q_h, EACH, SIZE, BLOCK_E, BLOCK_D)
    there = token < tokens
    if SINGLE:
        seq = token
        most = tl.max(tl.max(tl.abs(x), 2), 1)
    else:
        seq = tl.load(SEQ_OF + token, mask=there, other=0)
        most = tl.load(FOUND + seq * HEADS + head, mask=there, other=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(most, least), tl.zeros_like(most) + largest)
    tl.store(SCALES + seq * HEADS + head, scale, mask=there)
    e = tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    at = (token.to(tl.int64)[:, None] * HEADS * EACH + head * EACH + e[None, :])[:, :, None] * SIZE
    ok = (there[:, None] & (e < EACH)[None, :])[:, :, None] & (d < SIZE)[None, None, :]
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None, None], x.shape))
    tl.store(OUT + at + d[None, None, :], x.to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def _load(
    Q, token, head, tokens, q_t, q_h, EACH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64)[:, None] * q_t + (head * EACH + e)[None, :] * q_h
    ok = (token < tokens)[:, None, None] & (e < EACH)[None, :, None] & (d < SIZE)[None, None, :]
    return tl.load(Q + at[:, :, None] + d[None, None, :], mask=ok, other=0.0).to(tl.float32)


def tiles_of(query: Tensor, kv_heads: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the kernels' grid and sizes for a query (tokens, heads, size)."""
    tokens, heads, size = query.shape
    each = heads // kv_heads
    wide, deep = triton.next_power_of_2(each), triton.next_power_of_2(size)
    rows = max(1, min(ELEMENTS // (wide * deep), triton.next_power_of_2(tokens)))
    sizes = {
        "HEADS": kv_heads,
        "EACH": each,
        "SIZE": size,
        "BLOCK_T": rows,
        "BLOCK_E": wide,
        "BLOCK_D": deep,
    }
    return (triton.cdiv(tokens, rows), kv_heads), sizes


def rounded_query(
    query: Tensor, kv_heads: int, num_seqs: int, seq_of: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round a query (tokens, heads, size) to e4m3 by the largest value of its sequence and KV head.

    `seq_of` int64 (tokens,): each token's sequence; None where every sequence has one token. Returns it,
    contiguous, with its scales, float32 (num_seqs, kv_heads); a sequence without tokens has any.
    """
    if query.device.type != "cuda":
        return by_torch(query, kv_heads, num_seqs, seq_of)
    with torch.cuda.device_of(query):
        return by_kernels(query, kv_heads, num_seqs, seq_of, torch.float8_e4m3fn)


def by_kernels(
    query: Tensor, kv_heads: int, num_seqs: int, seq_of: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`rounded_query` by the kernels, into `dtype`."""
    grid, sizes = tiles_of(query, kv_heads)
    out = torch.empty(query.shape, dtype=dtype, device=query.device)
    scales = torch.empty(num_seqs, kv_heads, dtype=torch.float32, device=query.device)
    result: Tensor = scales
    of = scales  # not read if every sequence has one token
    where = (query.shape[0], query.stride(0), query.stride(1))
    if seq_of is not None:
        result, of = torch.zeros_like(scales, dtype=torch.int32), seq_of
        largest_kernel[grid](query, of, result, *where, **sizes)
    round_kernel[grid](
        query, of, result, out, scales, *where, LARGEST, LEAST, **sizes, SINGLE=seq_of is None
    )
    return out, scales


def by_torch(
    query: Tensor, kv_heads: int, num_seqs: int, seq_of: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`rounded_query` by torch's operators."""
    groups = query.unflatten(1, (kv_heads, -1))
    largest = groups.abs().amax((2, 3)).float()
    if seq_of is not None:
        by_seq = largest.new_zeros(num_seqs, kv_heads)
        largest = by_seq.scatter_reduce_(0, seq_of[:, None].expand_as(largest), largest, "amax")
    # By a tensor: by a number torch's operator on a GPU multiplies by the reciprocal. For half of the
    # largest values that scale is an ulp off, and another e4m3 number comes of a quotient that is a tie.
    scale = largest.clamp_min(LEAST) / largest.new_full((), LARGEST)
    each = scale if seq_of is None else scale[seq_of]
    rounded = (groups / each[:, :, None, None]).to(torch.float8_e4m3fn).flatten(1, 2)
    return rounded, scale
