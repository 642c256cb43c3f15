"""How does TRITON_STORE write four bits? Blocks of 16 scaled and rounded as `cache.nvfp4` does it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from polyattn.kernel import KVCache, StorePlan
from torch import Tensor

from polyattn_triton.kernels.rounding import scale_of
from polyattn_triton.launch import Launcher

BLOCK = tl.constexpr(16)
"""Elements that share a scale."""
ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2^23: float32's last place is 1 there, so a sum is rounded to integers, halves to even."""


@triton.jit
def _e4m3(x):
    """The code of the nearest e4m3, saturated, of numbers of 0 or more; halves to even."""
    x = tl.minimum(x, 448.0)
    small = ((x * 512.0 + ROUNDS) - ROUNDS).to(tl.int32)  # below 2^-6 the step is 2^-9
    bits = x.to(tl.int32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(x < 0.015625, small, large)


@triton.jit
def _value(code):
    """The number of an e4m3 code of 0 or more: its exponent and mantissa at float16's bits."""
    half = (code << 7).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def _e2m1(x):
    """The code of the nearest e2m1; of two as near the one with an even mantissa."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _write_rows(
    NEW, OUT, SCALE, number, new_h, out_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Round a token's heads and write their rows of bytes."""
    block = tl.arange(0, BLOCKS)
    head = (block // (D // BLOCK)).to(tl.int64)
    within = block % (D // BLOCK)
    ok = head < HEADS
    at = head * new_h + within * BLOCK
    x = tl.load(NEW + at[:, None] + tl.arange(0, BLOCK)[None, :], mask=ok[:, None], other=0.0).to(
        tl.float32
    )
    scale = scale_of(number, SCALE, head, HEADS, SCALES) + tl.zeros([BLOCKS], tl.float32)
    x = tl.div_rn(x, scale[:, None])
    bad = tl.max((x != x).to(tl.int32), 1) > 0
    largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
    code = _e4m3(tl.div_rn(largest, 6.0))
    unit = _value(code)
    ratio = tl.div_rn(x, tl.where(unit == 0.0, 1.0, unit)[:, None])
    ratio = tl.where(
        (unit == 0.0)[:, None], 0.0, ratio
    )  # a block whose scale rounds to 0 holds zeros
    low, high = tl.split(tl.reshape(_e2m1(ratio), (BLOCKS, BLOCK // 2, 2)))
    row = OUT + head * out_h
    pair = tl.arange(0, BLOCK // 2)
    tl.store(
        row[:, None] + (within * (BLOCK // 2))[:, None] + pair[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=ok[:, None],
    )
    tl.store(row + D // 2 + within, tl.where(bad, 127, code).to(tl.uint8), mask=ok)


@triton.jit
def write_four_kernel(
    KEY, VALUE, K, V, SLOTS, K_SCALE, V_SCALE, k_scale, v_scale,
    key_t, key_h, value_t, value_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_BLOCKS: tl.constexpr,
    V_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values at its slot. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        _write_rows(
            KEY + token * key_t, K + block * k_b + offset * k_t, K_SCALE, k_scale, key_h, k_h,
            HEADS, D, K_BLOCKS, SCALES,
        )  # fmt: skip
        _write_rows(
            VALUE + token * value_t, V + block * v_b + offset * v_t, V_SCALE, v_scale, value_h, v_h,
            HEADS, DV, V_BLOCKS, SCALES,
        )  # fmt: skip


_write_four = Launcher(write_four_kernel)


def four_bit_constants(
    heads: int, size: int, v_size: int, block_size: int, scales: int
) -> tuple[Any, ...]:
    """Return `write_four_kernel`'s constants, in its order."""
    blocks = [int(triton.next_power_of_2(heads * n // 16)) for n in (size, v_size)]
    return (heads, size, v_size, *blocks, block_size, scales)


def store_four_bits(
    plan: StorePlan,
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    scales: tuple[Tensor, Tensor],
    numbers: tuple[float, float],
    by: int,
) -> None:
    """Write a step's keys and values; `scales` or `numbers`: the divisors, in the form of `by`."""
    tokens, heads, size = key.shape
    pages = cache.value
    if (
        cache.value_in_key
    ):  # a latent's row holds both: it is written as the key's, the second time too
        value, pages, scales, numbers = key, cache.key, (scales[0],) * 2, (numbers[0],) * 2
    constants = four_bit_constants(heads, size, value.shape[2], cache.block_size, by)
    k, v = cache.key.stride(), pages.stride()
    _write_four(
        (tokens, 1, 1),
        (key, value, cache.key, pages, plan.slots, *scales),
        numbers,
        (
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            k[0], k[1], k[2], v[0], v[1], v[2],
        ),
        (),
        constants,
        {"num_warps": 4 if heads * size >= 512 else 1},
    )  # fmt: skip
