"""Which forms may queries, keys and values have? Heads, rows, or one fused tensor; a bias, a norm."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.parameters import Weight, check_shape
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec


def widths(spec: LayerSpec) -> tuple[int, int, int]:
    """Return the elements of a token's query, key and value: the parts of a fused tensor."""
    heads = spec.num_kv_heads
    return spec.num_heads * spec.head_size, heads * spec.head_size, heads * spec.v_head_size


def in_heads(
    spec: LayerSpec, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return views (num_tokens, heads, size) of rows (num_tokens, heads * size), or of a fused tensor.

    Raises `BatchError`.
    """
    parts = widths(spec)
    if key is None and value is None and query.shape[-1] == sum(parts) and query.dim() == 2:
        query, key, value = query.split(parts, dim=1)
    fused = f", or the fused {sum(parts)}"
    query = _heads("query", query, spec.num_heads, parts[0], fused)
    if key is None or value is None:
        return query, key, value
    return query, *keys_in_heads(spec, key, value)


def keys_in_heads(spec: LayerSpec, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values by head; each may come in rows. Raises `BatchError`."""
    (_, of_key, of_value), heads = widths(spec), spec.num_kv_heads
    return _heads("key", key, heads, of_key), _heads("value", value, heads, of_value)


def _heads(name: str, rows: Tensor, heads: int, width: int, fused: str = "") -> Tensor:
    if rows.dim() != 2:
        return rows
    if rows.shape[1] != width:
        raise BatchError(
            f"{name} has rows of {rows.shape[1]} elements; {heads} heads of {width // heads} are "
            f"{width}{fused}"
        )
    heads_of_rows: Tensor = rows.unflatten(1, (heads, width // heads))
    return heads_of_rows


def out_in_heads(spec: LayerSpec, out: Tensor) -> Tensor:
    """Return the view (num_tokens, num_heads, v_head_size) of rows to write. Raises `BatchError`."""
    width = spec.num_heads * spec.v_head_size
    if out.shape[1] != width or out.stride(1) != 1:
        raise BatchError(
            f"out has rows of {out.shape[1]} elements, {out.stride(1)} apart; {spec.num_heads} heads of "
            f"{spec.v_head_size} are {width}, side by side"
        )
    view: Tensor = out.unflatten(1, (spec.num_heads, spec.v_head_size))
    return view


def fused_bias(bias: Tensor | None, spec: LayerSpec, device: torch.device) -> Weight | None:
    """Return a layer's bias as its store reads it. Raises `SpecError`."""
    if bias is None:
        return None
    if spec.role is Role.CROSS:
        raise SpecError(
            "qkv_bias: cross-attention projects its keys apart from its queries; add the bias "
            "before the call"
        )
    check_shape("qkv_bias", bias, (sum(widths(spec)),))  # the query's, the key's, the value's
    return Weight("qkv_bias", bias, device, _precise(spec))


def norm_weights(
    spec: LayerSpec, weights: dict[str, Tensor | None], rotate: bool | None, device: torch.device
) -> dict[str, Weight]:
    """Return the weights `q_norm` and `k_norm` of a layer that norms, by name; none of one that doesn't.

    `rotate`: the layer's argument. Raises `SpecError`.
    """
    norm = spec.qk_norm
    passed = {name: weight for name, weight in weights.items() if weight is not None}
    if norm is None or (rotate is False and (spec.rope is not None or not passed)):
        for name in passed:
            if norm is None:
                raise SpecError(
                    f"{name} was given, and the spec has no qk_norm; select with one ({spec})"
                )
            raise SpecError(
                f"{name} was given with rotate=False: what comes rotated is normed; leave it out"
            )
        return {}
    if "q_norm" not in passed:
        raise SpecError(
            f"q_norm is missing: the spec norms queries and keys before they are rotated ({norm}); pass "
            "its weight, or where they come normed select with spec.replace(qk_norm=None)"
        )
    out = {}
    for name, weight in passed.items():
        heads = spec.num_heads if name == "q_norm" else spec.num_kv_heads
        check_shape(name, weight, (spec.head_size * (heads if norm.over == "token" else 1),))
        out[name] = Weight(name, weight, device, _precise(spec), norm.offset)
    return out


def _precise(spec: LayerSpec) -> torch.dtype:
    return torch.float64 if STORAGE_DTYPES[spec.dtype] is torch.float64 else torch.float32
