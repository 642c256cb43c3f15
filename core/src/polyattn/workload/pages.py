"""A workload's cache: keys of earlier steps, and NaN or numbers everywhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache, quantize
from polyattn.runtime.cache.rows import decoded, encoded
from polyattn.runtime.cache.scales import Scale
from polyattn.spec.row_format import RowFormat

PIECE = 32 << 20
"""Random elements that fill a cache, again and again."""
ENCODED = 1 << 20
"""Likewise, bytes of rows, which are encoded by torch's operators."""


def poison(cache: KVCache) -> None:
    """Fill a cache with NaN and Inf (int8: with its largest values; rows: with set bits)."""
    for stored in (cache.key, cache.value):
        if stored.dtype == torch.uint8:  # NaN where a scale is a float
            stored.fill_(0xFF)
        elif stored.dtype == torch.int8:
            stored.fill_(127)
        elif stored.dtype.itemsize == 1:  # 0x7F is NaN in both OCP formats, 0x80 in FNUZ
            fnuz = stored.dtype == torch.float8_e4m3fnuz
            stored.view(torch.uint8).fill_(0x80 if fnuz else 0x7F)
        else:
            stored.fill_(torch.nan)
            stored[:, ::2] = torch.inf


def fill(cache: KVCache, generator: torch.Generator | None = None) -> None:
    """Fill a cache with numbers that its dtype holds, a piece of them again and again.

    Without a generator, the device draws them.
    """
    form = cache.format
    pair = (form.head_size, form.v_head_size)
    for index, stored in enumerate((cache.key, cache.value)):
        piece = stored[: max(1, PIECE // max(stored[0].numel(), 1))]
        if form.rows is not None:
            few = piece[: max(1, ENCODED // max(stored[0].numel(), 1))]
            size = pair[0] if cache.value_in_key else pair[index]
            numbers = encoded(
                torch.randn(
                    *few.shape[:3], size, generator=generator, dtype=torch.float32, device="cpu"
                ),
                form.rows[index],
            )
            piece = few
        else:
            device = stored.device if generator is None else "cpu"
            numbers = torch.randn(
                piece.shape, generator=generator, device=device, dtype=torch.float32
            )
            if stored.dtype == torch.int8:
                numbers = (numbers * 32).clamp_(-127, 127)
        numbers = numbers.to(stored.dtype).to(stored.device)
        for part in stored.split(len(piece)):
            part.copy_(numbers[: len(part)])


def copied(cache: KVCache) -> KVCache:
    """Return a copy of a cache's content."""
    key = cache.key.clone()
    value = key[..., : cache.value.shape[3]] if cache.value_in_key else cache.value.clone()
    return KVCache(key, value, cache.format if cache.format.rows else None)


def put(cache: KVCache, key: Tensor, value: Tensor, slots: Tensor, scales: Sequence[Scale]) -> None:
    """Write rows to their slots; -1 skips. A store in which no backend's has a part."""
    stored_rows = slots >= 0
    at = slots[stored_rows] // cache.block_size, slots[stored_rows] % cache.block_size
    formats = cache.format.rows or (None, None)
    pairs = [(cache.key, key, scales[0], formats[0])]
    if not cache.value_in_key:
        pairs.append((cache.value, value, scales[1], formats[1]))
    for stored, new, scale, format in pairs:
        rows = quantize(new[stored_rows], stored.dtype, scale, format)
        if stored.dtype.itemsize == 1:
            stored.view(torch.uint8)[at] = rows.view(torch.uint8)
        else:
            stored[at] = rows


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers: a NaN equals itself."""
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def unchanged(what: str, now: Tensor | None, before: Tensor | None) -> None:
    """Assert that an input was left alone."""
    if now is not None and before is not None:
        assert torch.equal(bits(now), bits(before)), f"{what} was written to; it is an input"


def alike(rows: Tensor, right: Tensor, format: RowFormat, size: int) -> Tensor:
    """Return which rows of bytes are right, bool (...): bit for bit, but for numbers of several codes.

    Of a row's NaNs any bits do, and of zeros, whose extremes have either sign.
    """
    read, wanted = (decoded(each, format, size, turn=False) for each in (rows, right))
    same = ((read == wanted) | (read.isnan() & wanted.isnan())).all(-1)
    several = wanted.isnan().any(-1) | (wanted == 0).all(-1)
    return (rows == right).all(-1) | (same & several)


def same_cache(now: KVCache, held: KVCache, slots: Tensor | None) -> None:
    """Assert that a cache has the right content; quantised numbers may differ in the last bit."""
    written = torch.zeros(now.key.shape[:2], dtype=torch.bool, device=now.key.device)
    if slots is not None and now.key.dtype.itemsize == 1:
        written.view(-1)[slots[slots >= 0]] = True
    form = now.format
    for index, name in enumerate(("key",) if now.value_in_key else ("key", "value")):
        actual, right = getattr(now, name), getattr(held, name)
        if torch.equal(bits(actual), bits(right)):
            continue
        wrong = (bits(actual) != bits(right)) & ~written[..., None, None]
        assert not wrong.any(), (
            f"the cache's {name}s changed where the step stores nothing, or wrong"
        )
        if written.any():
            new, old = actual[written], right[written]
            if form.rows is not None:
                near = alike(new, old, form.rows[index], (form.head_size, form.v_head_size)[index])
            else:
                new, old = new.float(), old.float()
                step = old.abs() * 0.25 + (1.0 if actual.dtype == torch.int8 else 0.02)
                near = ((new - old).abs() <= step) | (new.isnan() & old.isnan())
            assert bool(near.all()), f"a quantised {name} is stored wrong"


def spoiled(tensor: Tensor, how: str) -> Tensor:
    """Return other contents for a tensor of this shape: other `numbers`, `nan`, or infinities (`inf`)."""
    if tensor.dtype == torch.uint8 and how != "numbers":
        return torch.full_like(tensor, 0xFF)  # as `poison` does
    if how == "nan":
        return torch.full_like(tensor, torch.nan)
    if how == "inf":
        infinite = torch.full_like(tensor, torch.inf)
        infinite[..., ::2] = -torch.inf
        return infinite
    return torch.full_like(tensor, 3.0) - tensor
