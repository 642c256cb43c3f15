"""How does TRITON_STORE rotate? Bias, norm, rotation, scale and pages of a step in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from polyattn.kernel import KVCache, LayerParams, NewTokens, Rotation, StorePlan
from torch import Tensor

from polyattn_triton.kernels.rounding import limit_of, rounded, scale_of
from polyattn_triton.kernels.tiles import in_elements
from polyattn_triton.launch import Launcher

OVER = ("head", "token")
"""Values of `NormSpec.over`, in the order of the kernel's."""
TILE = 2048
"""Elements of a tile of query heads; a tile of keys, which has its values beside it, is half of that."""
FEW = 512
"""Tokens up to which a tile has twice the warps: what waits for memory then is the launch, not the bytes
(H200, 256 tokens: 7.7 us, 8.0 with half of them; 8,192: 57.7 and 53.3).
"""


@triton.jit
def _pairs(
    X, heads, keep, stride, start, HEADS: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    NEOX: tl.constexpr,
):  # fmt: skip
    """Return both elements of each pair, float32 (heads, PP) each. Elements of a head are neighbours."""
    if NEOX:
        pair = tl.arange(0, PP)
        at = X + heads[:, None] * stride + (start + pair)[None, :]
        mask = keep[:, None] & (pair < P)[None, :]
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + P, mask=mask, other=0.0)
    else:
        element = tl.arange(0, 2 * PP)
        at = X + heads[:, None] * stride + (start + element)[None, :]
        mask = keep[:, None] & (element < 2 * P)[None, :]
        both = tl.load(at, mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, (HEADS, PP, 2)))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _put_pairs(
    X, first, second, heads, keep, stride, start, P: tl.constexpr, PP: tl.constexpr,
    NEOX: tl.constexpr,
):  # fmt: skip
    """Write pairs where `_pairs` reads them."""
    kind = X.dtype.element_ty
    if NEOX:
        pair = tl.arange(0, PP)
        at = X + heads[:, None] * stride + (start + pair)[None, :]
        mask = keep[:, None] & (pair < P)[None, :]
        tl.store(at, first.to(kind), mask=mask)
        tl.store(at + P, second.to(kind), mask=mask)
    else:
        element = tl.arange(0, 2 * PP)
        at = X + heads[:, None] * stride + (start + element)[None, :]
        mask = keep[:, None] & (element < 2 * P)[None, :]
        tl.store(at, tl.interleave(first, second).to(kind), mask=mask)


@triton.jit
def _turned(first, second, TURNS, token, P: tl.constexpr, PP: tl.constexpr):
    """Turn pairs (heads, PP) by the token's angles."""
    pair = tl.arange(0, PP)
    cos = tl.load(TURNS + token * (2 * P) + pair, mask=pair < P, other=0.0)[None, :]
    sin = tl.load(TURNS + token * (2 * P) + P + pair, mask=pair < P, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _squares(
    X,
    BIAS,
    heads,
    stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Return the sums of squares of heads, biased, float32 (heads,)."""
    element = tl.arange(0, DP)[None, :]
    mask = (heads < HEADS)[:, None] & (element < D)
    x = tl.load(X + heads[:, None] * stride + element, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(BIAS + heads[:, None] * D + element, mask=mask, other=0.0)
    return tl.sum(x * x, 1)


@triton.jit
def _over_root(
    X,
    BIAS,
    heads,
    stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BIASED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return one over the root mean square of each head, (heads, 1), or of all of the token's."""
    if NORM == 1:
        mean = _squares(X, BIAS, heads, stride, HEADS, D, DP, BIASED) / D
    else:
        sums = tl.zeros((TILE_HEADS,), tl.float32)
        for first in range(0, HEADS, TILE_HEADS):  # each of a token's tiles adds all of them up
            part = first + tl.arange(0, TILE_HEADS)
            sums += _squares(X, BIAS, part, stride, HEADS, D, DP, BIASED)
        mean = tl.zeros((TILE_HEADS,), tl.float32) + tl.sum(sums, 0) / (HEADS * D)
    return tl.rsqrt(mean + eps)[:, None]


@triton.jit
def _query_tile(
    source, goal, TURNS, QUERY_SCALE, BIAS, WEIGHT, token, first, stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, START: tl.constexpr,
    REST: tl.constexpr, TILE_HEADS: tl.constexpr, NEOX: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr, NORM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Norm and turn a token's query heads from `first` on."""
    heads = (first + tl.arange(0, TILE_HEADS)).to(tl.int64)
    keep = heads < HEADS
    scale = 1.0
    if SCALED:
        scale = tl.load(QUERY_SCALE + token)
    if NORM > 0:
        over = _over_root(source, BIAS, heads, stride, eps, HEADS, D, DP, TILE_HEADS, BIASED, NORM)
        of_head: tl.constexpr = D if NORM == 2 else 0
    if P > 0:
        a, b = _pairs(source, heads, keep, stride, START, TILE_HEADS, P, PP, NEOX)
        if BIASED:
            c, d = _pairs(BIAS, heads, keep, D, START, TILE_HEADS, P, PP, NEOX)
            a += c
            b += d
        if NORM > 0:
            c, d = _pairs(WEIGHT, heads, keep, of_head, START, TILE_HEADS, P, PP, NEOX)
            a *= over * c
            b *= over * d
        a, b = _turned(a, b, TURNS, token, P, PP)
        _put_pairs(goal, a * scale, b * scale, heads, keep, D, START, P, PP, NEOX)
    if REST > 0:
        rest = tl.arange(0, REST)
        element = tl.where(rest < START, rest, rest + 2 * P)[None, :]
        mask = keep[:, None] & (element < D)
        x = tl.load(source + heads[:, None] * stride + element, mask=mask).to(tl.float32)
        if BIASED:
            x += tl.load(BIAS + heads[:, None] * D + element, mask=mask)
        if NORM > 0:
            x *= over * tl.load(WEIGHT + heads[:, None] * of_head + element, mask=mask)
        at = goal + heads[:, None] * D + element
        tl.store(at, (x * scale).to(goal.dtype.element_ty), mask=mask)


@triton.jit
def _key_tile(
    source, goal, kept, TURNS, BIAS, WEIGHT, K_SCALE, token, first, stride, goal_h, is_stored, number,
    limit, eps,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, START: tl.constexpr,
    REST: tl.constexpr, TILE_HEADS: tl.constexpr, NEOX: tl.constexpr, BIASED: tl.constexpr,
    KEEP: tl.constexpr, QUANTIZED: tl.constexpr, INTEGER: tl.constexpr, SCALES: tl.constexpr,
    NORM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Norm and turn a token's keys from head `first` on, and store them where it has a slot."""
    heads = (first + tl.arange(0, TILE_HEADS)).to(tl.int64)
    keep = heads < HEADS
    if NORM > 0:
        over = _over_root(source, BIAS, heads, stride, eps, HEADS, D, DP, TILE_HEADS, BIASED, NORM)
        of_head: tl.constexpr = D if NORM == 2 else 0
    k_scale = scale_of(number, K_SCALE, heads[:, None], HEADS, SCALES)
    stored = keep & is_stored
    if P > 0:
        a, b = _pairs(source, heads, keep, stride, START, TILE_HEADS, P, PP, NEOX)
        if BIASED:
            c, d = _pairs(BIAS, heads, keep, D, START, TILE_HEADS, P, PP, NEOX)
            a += c
            b += d
        if NORM > 0:
            c, d = _pairs(WEIGHT, heads, keep, of_head, START, TILE_HEADS, P, PP, NEOX)
            a *= over * c
            b *= over * d
        a, b = _turned(a, b, TURNS, token, P, PP)
        if KEEP:
            _put_pairs(kept, a, b, heads, keep, D, START, P, PP, NEOX)
        if QUANTIZED:
            a = rounded(a, k_scale, limit, INTEGER)
            b = rounded(b, k_scale, limit, INTEGER)
        _put_pairs(goal, a, b, heads, stored, goal_h, START, P, PP, NEOX)
    if REST > 0:
        rest = tl.arange(0, REST)
        element = tl.where(rest < START, rest, rest + 2 * P)[None, :]
        mask = keep[:, None] & (element < D)
        x = tl.load(source + heads[:, None] * stride + element, mask=mask).to(tl.float32)
        if BIASED:
            x += tl.load(BIAS + heads[:, None] * D + element, mask=mask)
        if NORM > 0:
            x *= over * tl.load(WEIGHT + heads[:, None] * of_head + element, mask=mask)
        if KEEP:
            at = kept + heads[:, None] * D + element
            tl.store(at, x.to(kept.dtype.element_ty), mask=mask)
        if QUANTIZED:
            x = rounded(x, k_scale, limit, INTEGER)
        at = goal + heads[:, None] * goal_h + element
        tl.store(at, x.to(goal.dtype.element_ty), mask=stored[:, None] & (element < D))


@triton.jit
def _value_tile(
    source, goal, kept, BIAS, V_SCALE, first, stride, goal_h, is_stored, number, limit,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE_HEADS: tl.constexpr,
    BIASED: tl.constexpr, KEEP: tl.constexpr, QUANTIZED: tl.constexpr, INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Store a token's values from head `first` on. Only a value with a bias stays beside the cache."""
    heads = (first + tl.arange(0, TILE_HEADS)).to(tl.int64)
    keep = heads < HEADS
    v_scale = scale_of(number, V_SCALE, heads[:, None], HEADS, SCALES)
    element = tl.arange(0, DP)[None, :]
    mask = keep[:, None] & (element < D)
    y = tl.load(source + heads[:, None] * stride + element, mask=mask).to(tl.float32)
    if BIASED:
        y += tl.load(BIAS + heads[:, None] * D + element, mask=mask)
        if KEEP:
            at = kept + heads[:, None] * D + element
            tl.store(at, y.to(kept.dtype.element_ty), mask=mask)
    if QUANTIZED:
        y = rounded(y, v_scale, limit, INTEGER)
    at = goal + heads[:, None] * goal_h + element
    tl.store(at, y.to(goal.dtype.element_ty), mask=mask & is_stored)


@triton.jit
def rotate_store_kernel(
    QUERY, KEY, VALUE, OUT, KEY_OUT, VALUE_OUT, K, V, SLOTS, TURNS, QUERY_SCALE, BIAS, Q_NORM, K_NORM,
    K_SCALE, V_SCALE, k_scale, v_scale, limit, eps,
    query_t, query_h, key_t, key_h, value_t, value_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DQ: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    Q_START: tl.constexpr, K_START: tl.constexpr, Q_REST: tl.constexpr, K_REST: tl.constexpr,
    VP: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr, NEOX: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, KEEP: tl.constexpr, QUANTIZED: tl.constexpr,
    INTEGER: tl.constexpr, LATENT: tl.constexpr, SCALES: tl.constexpr, NORM: tl.constexpr,
    DP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Norm and turn a token's query heads, or norm, turn and store its keys and store its values.

    P pairs of a head turn, from element `Q_START` or `K_START` on; the rest passes, in tiles of `Q_REST`
    and `K_REST`. `NORM`: 0 for none, 1 of each head, 2 of the token's heads as one row. Grid: (tokens,
    tiles of query heads and then of KV heads).
    """
    query_t, query_h, key_t, key_h = in_elements((query_t, query_h, key_t, key_h), UNIT)
    value_t, value_h, k_b, k_t = in_elements((value_t, value_h, k_b, k_t), UNIT)
    k_h, v_b, v_t, v_h = in_elements((k_h, v_b, v_t, v_h), UNIT)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (HEADS + Q_TILE - 1) // Q_TILE
    if tile < Q_TILES:
        _query_tile(
            QUERY + token * query_t, OUT + token * (HEADS * DQ), TURNS, QUERY_SCALE, BIAS, Q_NORM,
            token, tile * Q_TILE, query_h, eps, HEADS, DQ, P, PP, Q_START, Q_REST, Q_TILE, NEOX, SCALED,
            BIASED, NORM, DP,
        )  # fmt: skip
    else:
        first = (tile - Q_TILES) * K_TILE
        slot = tl.load(SLOTS + token)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        _key_tile(
            KEY + token * key_t, K + block * k_b + offset * k_t, KEY_OUT + token * (KV_HEADS * D),
            TURNS, BIAS + HEADS * DQ, K_NORM, K_SCALE, token, first, key_h, k_h, slot >= 0, k_scale,
            limit, eps, KV_HEADS, D, P, PP, K_START, K_REST, K_TILE, NEOX, BIASED, KEEP, QUANTIZED,
            INTEGER, SCALES, NORM, DP,
        )  # fmt: skip
        if not LATENT:
            _value_tile(
                VALUE + token * value_t, V + block * v_b + offset * v_t,
                VALUE_OUT + token * (KV_HEADS * DV), BIAS + HEADS * DQ + KV_HEADS * D, V_SCALE, first,
                value_h, v_h, slot >= 0, v_scale, limit, KV_HEADS, DV, VP, K_TILE, BIASED, KEEP,
                QUANTIZED, INTEGER, SCALES,
            )  # fmt: skip


_rotate_store = Launcher(rotate_store_kernel)


def heads_at_once(heads: int, size: int, elements: int) -> int:
    """Return how many heads a tile of about so many elements has."""
    whole = triton.next_power_of_2(heads)
    return int(min(whole, max(1, elements // triton.next_power_of_2(size))))


def padded(size: int) -> int:
    """Return the tile that holds `size` elements, 0 for none."""
    return int(triton.next_power_of_2(size)) if size else 0


def rotate_constants(
    heads: int, kv_heads: int, sizes: tuple[int, int, int], block_size: int, turned: int,
    last: bool, neox: bool, scaled: bool, biased: bool, keep: bool, quantized: bool, integer: bool,
    latent: bool, scales: int = 0, norm: str | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `rotate_store_kernel`'s constants, in its order.

    `sizes`: of a head of Q, K and V; the first two are one where there is a `norm`, `NormSpec.over`.
    """
    dq, d, dv = sizes
    return (
        heads, kv_heads, dq, d, dv, block_size, turned // 2, padded(turned // 2),
        dq - turned if last else 0, d - turned if last else 0, padded(dq - turned),
        padded(d - turned), padded(dv), heads_at_once(heads, dq, TILE),
        heads_at_once(kv_heads, d, TILE // 2), neox, scaled, biased, keep, quantized, integer,
        latent, scales, 0 if norm is None else 1 + OVER.index(norm), padded(d),
    )  # fmt: skip


def rotate_and_store(
    plan: StorePlan,
    rotation: Rotation | None,
    new: NewTokens,
    cache: KVCache,
    params: LayerParams,
    keep: bool,
    scales: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`StoreBackend.run_rotated` in one launch; what is kept of a value without a bias is itself.

    `scales`: whether the layer's are numbers, or which tensors (`variants.SCALES`).
    """
    query, key, value = (_neighbours(x) for x in (new.query, new.key, new.value))
    tokens, heads, dq = query.shape
    out = torch.empty((tokens, heads, dq), dtype=query.dtype, device=query.device)
    biased = new.bias is not None
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device) if keep else None
    value_out = value if keep else None
    if keep and biased:
        value_out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if tokens == 0:
        return out, key_out, value_out
    kv_heads, d, dv, dtype = key.shape[1], key.shape[2], value.shape[2], cache.key.dtype
    turned = 0 if rotation is None else rotation.size
    scale, norms = None if rotation is None else rotation.query_scale, new.norms
    q_norm = k_norm = out
    if norms is not None:
        assert norms.key is not None
        q_norm, k_norm = norms.query, norms.key
    constants = rotate_constants(
        heads, kv_heads, (dq, d, dv), cache.block_size, turned,
        rotation is not None and rotation.last, rotation is None or rotation.pairing == "neox",
        scale is not None, biased, keep, dtype != query.dtype, dtype == torch.int8,
        cache.value_in_key, scales, None if norms is None else norms.over,
    )  # fmt: skip
    pair = (params.k_scale, params.v_scale)
    # What isn't read needs something to stand in its place.
    numbers, tensors = ((1.0, 1.0), pair) if scales else (pair, (out, out))
    q_tile, k_tile = constants[13], constants[14]
    # An argument that a constant marks as absent is never read, but needs a placeholder.
    turns = out if rotation is None else rotation.turns
    k, v = cache.key.stride(), cache.value.stride()
    _rotate_store(
        (tokens, triton.cdiv(heads, q_tile) + triton.cdiv(kv_heads, k_tile), 1),
        (
            query, key, value, out, out if key_out is None else key_out,
            out if value_out is None else value_out, cache.key, cache.value, plan.slots, turns,
            out if scale is None else scale, out if new.bias is None else new.bias, q_norm, k_norm,
            *tensors,
        ),
        (*numbers, limit_of(dtype, query.dtype), 0.0 if norms is None else norms.eps),
        (
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), k[0], k[1], k[2], v[0], v[1], v[2],
        ),
        (),
        constants,
        {"num_warps": (8 if tokens <= FEW else 4) if q_tile * dq >= 512 else 1},
    )  # fmt: skip
    return out, key_out, value_out


def _neighbours(x: Tensor | None) -> Tensor:
    """Return the tensor with the elements of a head side by side."""
    assert x is not None
    return x if x.stride(2) == 1 else x.contiguous()
