"""How does TRITON_STORE write rows of bytes? One program a row, by a format's generated function."""

from __future__ import annotations

import triton
import triton.language as tl
from polyattn.kernel import KVCache, StorePlan
from torch import Tensor

from polyattn_triton.functions.row_writers import Writer
from polyattn_triton.kernels.rounding import scale_of
from polyattn_triton.launch import Launcher


@triton.jit
def write_rows_kernel(
    KEY, VALUE, K, V, SLOTS, K_SCALE, V_SCALE, K_TABLE, V_TABLE, k_scale, v_scale,
    key_t, key_h, value_t, value_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, SCALES: tl.constexpr,
    WRITE_K: tl.constexpr, WRITE_V: tl.constexpr,
):  # fmt: skip
    """Store a token's key and value of one head at its slot. Grid: (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(SLOTS + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        WRITE_K(
            KEY + token * key_t + head * key_h,
            K + block * k_b + offset * k_t + head * k_h,
            scale_of(k_scale, K_SCALE, head, HEADS, SCALES),
            K_TABLE,
        )
        if not LATENT:
            WRITE_V(
                VALUE + token * value_t + head * value_h,
                V + block * v_b + offset * v_t + head * v_h,
                scale_of(v_scale, V_SCALE, head, HEADS, SCALES),
                V_TABLE,
            )


_write_rows = Launcher(write_rows_kernel)
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""Of a launch: a product and a sum are two roundings, as torch's are."""


def store_rows(
    plan: StorePlan,
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    scales: tuple[Tensor, Tensor],
    numbers: tuple[float, float],
    by: int,
    writers: tuple[Writer, Writer],
    tables: tuple[Tensor, Tensor],
) -> None:
    """Write a step's keys and values; `scales` or `numbers`: the divisors, in the form of `by`."""
    tokens, heads, _ = key.shape
    k, v = cache.key.stride(), cache.value.stride()
    _write_rows(
        (tokens, heads, 1),
        (key, value, cache.key, cache.value, plan.slots, *scales, *tables),
        numbers,
        (
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            k[0], k[1], k[2], v[0], v[1], v[2],
        ),
        (),
        (
            heads, cache.block_size, cache.value_in_key, by, writers[0].write, writers[1].write,
        ),
        OPTIONS,
    )  # fmt: skip
