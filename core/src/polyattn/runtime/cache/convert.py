"""How are blocks of one cache copied into a cache of another format, layout or block size?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn.errors import CacheError, integer, shown
from polyattn.runtime.cache.kv_cache import LARGEST_PAGE, KVCache, quantize, raw, storage_dtype
from polyattn.runtime.cache.rows import decoded
from polyattn.runtime.cache.scales import Scale, dequantized, of_heads
from polyattn.runtime.parameters import positive
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.row_format import RowFormat

AT_ONCE = 1 << 22
"""Elements that are converted at a time: 16 MiB of float32."""


def convert_blocks(
    source: KVCache,
    target: KVCache,
    source_blocks: Sequence[int] | Tensor,
    target_blocks: Sequence[int] | Tensor,
    *,
    num_tokens: int | None = None,
    source_scales: tuple[Scale, Scale] = (1.0, 1.0),
    target_scales: tuple[Scale, Scale] = (1.0, 1.0),
) -> None:
    """Write tokens of one cache into another, whatever their formats, layouts, block sizes and devices.

    Bytes are copied as they are where both formats and scales are equal. Otherwise a token is read in
    float32, on the target's device, and written as the layer's store writes it.

    Args:
        source: the cache to read.
        target: the cache to write.
        source_blocks: (n,), ids of blocks in the order of their tokens.
        target_blocks: (m,), ids of blocks for these tokens.
        num_tokens: how many tokens to write, which both lists just hold; None: whole blocks.
        source_scales: (k_scale, v_scale) of the layer that reads `source`, as `Attention` takes them;
            a cache that isn't quantised has none but 1.
        target_scales: of the layer that reads `target`.

    Raises:
        CacheError: the caches or blocks don't fit one another, or blocks of one cache are both read and
            written; nothing is written then.

    Examples:
        >>> group = LayerGroup(LayerSpec(num_heads=2, head_size=64, dtype="float32", block_size=16))
        >>> theirs, ours = group.allocate_cache(4), group.allocate_cache(8)
        >>> convert_blocks(theirs, ours, [0, 1], [7, 3])

    """
    _check_caches(source, target)
    one, other = source.format, target.format
    from_ids = _ids("source_blocks", source_blocks, source)
    to_ids = _ids("target_blocks", target_blocks, target)
    if len(to_ids.unique()) < len(to_ids):
        raise CacheError(f"target_blocks={shown(to_ids.tolist())} names a block twice")
    if source.key.data_ptr() == target.key.data_ptr() and set(from_ids.tolist()) & set(
        to_ids.tolist()
    ):
        raise CacheError(
            "source and target are one cache, and blocks are both read and written; name other blocks"
        )
    tokens = _tokens(num_tokens, (source, from_ids), (target, to_ids))
    source_scales = _scales("source_scales", source_scales, one)
    target_scales = _scales("target_scales", target_scales, other)
    both = math.lcm(source.block_size, target.block_size)  # pieces end at blocks of both
    formats = (one.rows or (None, None), other.rows or (None, None))
    parts = [(source.key, target.key), (source.value, target.value)]
    for part, (old, new) in enumerate(parts[: 1 if one.value_in_key else 2]):
        size = one.v_head_size if part else one.head_size
        read, written = formats[0][part], formats[1][part]
        scales = (source_scales[part], target_scales[part])
        as_bytes = old.dtype == new.dtype and read == written and _equal(*scales)
        step = both * max(1, AT_ONCE // (both * size * one.num_kv_heads))
        for first in range(0, tokens, step):
            last = min(first + step, tokens)
            rows = raw(old)[from_ids[first // source.block_size : -(-last // source.block_size)]]
            rows = rows.flatten(0, 1)[: last - first].to(new.device)
            if not as_bytes:
                rows = _rewritten(rows.view(old.dtype), read, written, size, new.dtype, scales)
            at = to_ids[first // target.block_size :]
            full, rest = divmod(last - first, target.block_size)
            whole = raw(rows)[: last - first - rest]
            raw(new)[at[:full]] = whole.unflatten(0, (full, target.block_size))
            if rest:
                raw(new)[at[full], :rest] = raw(rows)[-rest:]


def _check_caches(source: KVCache, target: KVCache) -> None:
    for name, cache in (("source", source), ("target", target)):
        if not isinstance(cache, KVCache):
            raise CacheError(
                f"{name}={shown(cache)} must be a KVCache: convert_blocks(source, target, source_blocks, "
                "target_blocks)"
            )
    one, other = source.format, target.format
    for name in ("num_kv_heads", "head_size", "v_head_size", "value_in_key"):
        if getattr(one, name) != getattr(other, name):
            raise CacheError(
                f"source has {name}={getattr(one, name)!r}, target {getattr(other, name)!r}: they are "
                "caches of different layers"
            )


def _tokens(
    num_tokens: int | None, source: tuple[KVCache, Tensor], target: tuple[KVCache, Tensor]
) -> int:
    """Return how many tokens to write from and to a cache's blocks. Raises `CacheError`."""
    if num_tokens is not None:
        integer("num_tokens", num_tokens, 0, LARGEST_PAGE, "; None for whole blocks", CacheError)
    tokens = len(source[1]) * source[0].block_size if num_tokens is None else num_tokens
    for name, ids, size in (
        ("source_blocks", source[1], source[0].block_size),
        ("target_blocks", target[1], target[0].block_size),
    ):
        if len(ids) != -(-tokens // size) or (num_tokens is None and tokens % size):
            raise CacheError(
                f"{name} hold {len(ids) * size} tokens, {len(ids)} blocks of {size}; {tokens} are to be "
                "written: name a block for each, and num_tokens=… where the last one isn't full"
            )
    return tokens


def _ids(name: str, blocks: Sequence[int] | Tensor, cache: KVCache) -> Tensor:
    """Return ids of blocks as int64 (n,) on the cache's device."""
    wrong = CacheError(f"{name}={shown(blocks)} must be ids of blocks, (n,) integers")
    try:
        ids = torch.as_tensor(blocks, device=cache.key.device)
    except (TypeError, ValueError, RuntimeError):
        raise wrong from None
    whole = not (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool)
    if ids.dim() != 1 or (len(ids) and not whole):
        raise wrong
    ids = ids.long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < cache.num_blocks:
        raise CacheError(
            f"{name}={shown(ids.tolist())} must be ids from 0 to {cache.num_blocks - 1} of {cache}"
        )
    return ids


def _scales(name: str, scales: tuple[Scale, Scale], form: CacheFormat) -> tuple[Scale, Scale]:
    """Return (k_scale, v_scale), a tensor's numbers side by side. Raises `CacheError`."""
    if not isinstance(scales, Sequence) or len(scales) != 2:
        raise CacheError(f"{name}={shown(scales)} must be (k_scale, v_scale)")
    heads, quantised = form.num_kv_heads, storage_dtype(form.dtype).itemsize == 1
    for part, scale in enumerate(scales):
        if not isinstance(scale, Tensor):
            positive(f"{name}[{part}]", scale, quantised, CacheError)
        elif not quantised:
            raise CacheError(
                f"{name}[{part}] scales a quantised cache, and this one is {form.dtype}"
            )
        elif scale.shape not in ((), (1,), (heads,)) or not scale.is_floating_point():
            raise CacheError(
                f"{name}[{part}] is {scale.dtype} of shape {tuple(scale.shape)}; a scale is a number, or "
                f"a floating-point tensor () or ({heads},), one a KV head"
            )
    key, value = (s.reshape(-1) if isinstance(s, Tensor) else s for s in scales)
    return key, value


def _equal(one: Scale, other: Scale) -> bool:
    pair = (torch.as_tensor(s, dtype=torch.float32, device="cpu") for s in (one, other))
    return torch.equal(*pair)


def _rewritten(
    rows: Tensor,
    read: RowFormat | None,
    written: RowFormat | None,
    size: int,
    dtype: torch.dtype,
    scales: tuple[Scale, Scale],
) -> Tensor:
    """Return rows (tokens, heads, width) in another format; `size`: a row's elements."""
    if read is not None:
        factor = of_heads(scales[0], rows.shape[1])
        values = decoded(rows, read, size)
        values *= factor.to(rows.device) if isinstance(factor, Tensor) else factor
    else:
        values = dequantized(rows, scales[0], torch.float32)
    if dtype.itemsize > 1:
        return values.to(dtype)
    return quantize(values, dtype, scales[1], written)
