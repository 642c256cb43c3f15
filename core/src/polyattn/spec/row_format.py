"""How are keys and values written as bytes? `RowFormat`: two functions, by a name that specs carry.

A row is one token's key, or value, of one KV head. Its scales or its norm lie within the row, so that a
row can be stored, shared, moved and read alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import SpecError, nearest, shown
from polyattn.spec.kinds import ITEM_BYTES, KV_CACHE_DTYPES
from polyattn.spec.variant import NAME

ANY_ROWS = "rows"
"""What a backend claims in `kv_cache_dtypes` that takes any format of rows whose `decode` it can read."""
LONGEST_HEAD = 1024
"""Elements of a head up to which an error looks for a size that a format can have."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A format of a cache's rows of bytes.

    A function may be named by its path, `"package.module:function"`; a plugin's must. Two formats, of
    keys and of values, are a name too: `kv_cache_dtype="int8_rows/int4"`. Pickled by name and version.

    Attributes:
        name: for `LayerSpec.kv_cache_dtype`; letters, digits, `_`, `-` and `.`.
        encode: `encode(row)`: float32 (..., size), already divided by the layer's scale, to uint8 (...,
            row_bytes). Each row by itself; finite elements stay finite (they saturate), zeros stay
            zeros. What uses float32 and fixed shapes alone is traced into stores, too.
        decode: `decode(row, d, size)`: element `d` (a tensor of them) of a row, float32. `row[i]` is
            byte `i`, an integer. Plain torch, element by element, so that core can trace it into
            kernels; `polyattn.runtime.cache.bits` reads bytes as numbers (`half`, `single`, `e4m3`).
        row_bytes: `row_bytes(size)`: bytes of a row of `size` elements, 0 if there is no such row.
        largest: no element that `decode` returns is larger; kernels compute in float16 if that holds
            it.
        turn: `turn(row, back)`: rows (..., size) times an orthogonal matrix, before `encode`; with
            `back` times its transpose, after `decode`. Kernels may turn queries and outputs instead.
        version: changes with the bytes' meaning.
        summary: for people.

    Raises:
        SpecError: a function, the name or a number isn't one.

    Examples:
        >>> halves = RowFormat(
        ...     name="halves",
        ...     encode=lambda row: row.half().contiguous().view(torch.uint8),
        ...     decode=lambda row, d, size: (row[2 * d] + 256 * row[2 * d + 1]).short().view(torch.half),
        ...     row_bytes=lambda size: 2 * size,
        ... )
        >>> halves.row_bytes(64)
        128

    """

    name: str
    encode: Callable[..., Any] | str
    decode: Callable[..., Any] | str
    row_bytes: Callable[[int], int]
    largest: float = float("inf")
    turn: Callable[..., Any] | str | None = None
    version: int = 1
    summary: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise SpecError(
                f"RowFormat.name={shown(self.name)} can't be a format's name; use letters, digits, '_', "
                "'-' and '.', 64 at most"
            )
        for field, count in (("encode", 1), ("decode", 3), ("row_bytes", 1), ("turn", 2)):
            value = getattr(self, field)
            if value is None and field == "turn":
                continue
            if isinstance(value, str) and field != "row_bytes" and all(value.partition(":")):
                continue
            if not callable(value):
                raise SpecError(
                    f"RowFormat.{field}={shown(value)} must be a function"
                    + (", or its path 'package.module:function'" if field != "row_bytes" else "")
                )
            if (number := len(inspect.signature(value).parameters)) != count:
                raise SpecError(
                    f"row format {self.name!r}: {field} takes {number} arguments; it must take {count}"
                )
        if type(self.version) is not int or self.version < 1:
            raise SpecError(f"RowFormat.version={shown(self.version)} must be a positive integer")

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, self.version)

    def width(self, field: str, size: int) -> int:
        """Return the bytes of a head's row.

        Args:
            field: the size's field, for errors.
            size: of the head, in elements.

        Raises:
            SpecError: the format has no rows of that size.

        """
        count = self.row_bytes(size)
        if type(count) is int and count > 0:
            return count
        near = [n for n in range(1, LONGEST_HEAD) if self.row_bytes(n)]
        close = sorted(near, key=lambda n: (abs(n - size), n))[:2]
        raise SpecError(
            f"{field}={size}: kv_cache_dtype={self.name!r} has no rows of that size; the nearest that it "
            f"has: {', '.join(map(str, sorted(close))) or 'none'}"
        )


def known_formats() -> Mapping[str, RowFormat]:
    """Return every row format: core's, the plugins' and those registered in this process."""
    # By its path: what is known lies above what a spec is.
    formats: Mapping[str, RowFormat] = importlib.import_module(
        "polyattn.registry.row_formats"
    ).row_formats()
    return formats


def row_format(name: str) -> RowFormat:
    """Return a row format by name. Raises `SpecError` with the existing names."""
    known = known_formats()
    if name not in known:
        names = [*KV_CACHE_DTYPES, *sorted(known)]
        if name in _ELEMENTS:
            raise SpecError(
                f"kv_cache_dtype={name!r}: a cache that isn't quantised has the layer's dtype; leave it "
                f"out, or set dtype={name!r}"
            )
        raise SpecError(
            f"kv_cache_dtype={name!r} is unknown{nearest(name, names)} ('KEYS/VALUES' names two "
            "formats of rows, and polyattn.register_row_format adds one)"
        )
    return known[name]


def is_rows(dtype: str) -> bool:
    """Return whether a `kv_cache_dtype`, or a cache's dtype, names rows of bytes."""
    return dtype not in _ELEMENTS


def rows_of(dtype: str) -> tuple[RowFormat, RowFormat]:
    """Return the formats of keys and of values. Raises `SpecError`."""
    key, _, value = dtype.partition("/")
    keys = row_format(key)
    return keys, row_format(value) if value else keys


_ELEMENTS = frozenset({*KV_CACHE_DTYPES, *ITEM_BYTES})


def check_widths(dtype: str, heads: int, size: int, v_size: int, latent: int | None) -> None:
    """Check that rows hold such heads; a latent's are both key and value. Raises `SpecError`."""
    key, value = rows_of(dtype)
    if latent is None:
        key.width("head_size", size)
        if heads > 1 or v_size >= size:  # else it may be a latent
            value.width("v_head_size", v_size)
        return
    if key != value:
        raise SpecError(
            f"kv_cache_dtype={dtype!r}: a latent is key and value in one row; name one format"
        )
    key.width("latent.rank + latent.rope_head_size", latent)


def row_widths(dtype: str, size: int, v_size: int) -> tuple[int, int]:
    """Return the bytes of a head's key of `size` elements, and of its value, of a cache's dtype."""
    if not is_rows(dtype):
        return size * ITEM_BYTES[dtype], v_size * ITEM_BYTES[dtype]
    key, value = rows_of(dtype)
    return key.width("head_size", size), value.width("v_head_size", v_size)


def _unpickled(name: str, version: int) -> RowFormat:
    format = row_format(name)
    if format.version != version:
        raise SpecError(
            f"row format {name!r} was pickled as version {version}, and here it is version "
            f"{format.version}: their bytes differ; use the same version in both processes"
        )
    return format
