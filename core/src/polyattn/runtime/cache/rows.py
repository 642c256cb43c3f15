"""What do a cache's rows of bytes hold? `RowFormat`'s functions, by torch's operators on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import SpecError, describe
from polyattn.registry.info import function_at
from polyattn.spec.row_format import LONGEST_HEAD, RowFormat

EXTREMES = (0.0, 1.0, -3.0, 2.0**-140, 65504.0, -1e30)
"""Elements that rows of a format are tried with: zeros, denormals, and what must saturate."""


def function_of(format: RowFormat, which: str) -> Callable[..., Any]:
    """Return a format's `encode`, `decode` or `turn`. Raises `SpecError` if it can't be loaded."""
    source = getattr(format, which)
    function: Callable[..., Any] = function_at(f"row format {format.name!r}", which, source)
    return function


class Bytes:
    """Rows as a `decode` reads them: item `i` is byte `i` as an integer."""

    def __init__(self, rows: Tensor):
        self.rows = rows

    def __getitem__(self, at: Any) -> Tensor:
        if isinstance(at, Tensor):
            return self.rows[..., at.expand(1) if at.dim() == 0 else at].int()
        return self.rows[..., at, None].int()


def encoded(row: Tensor, format: RowFormat) -> Tensor:
    """Return rows of elements as a row format's bytes.

    Args:
        row: (..., size), already divided by the layer's scale.
        format: the format; its `turn` is applied first where it has one.

    Returns:
        uint8 (..., row_bytes).

    Raises:
        SpecError: a function of the format can't be loaded.

    Examples:
        >>> from polyattn import row_formats
        >>> format = row_formats()["fp8_ds_mla"]
        >>> encoded(torch.randn(3, 576), format).shape
        torch.Size([3, 656])

    """
    row = row.float()
    if format.turn is not None:
        row = turned(row, format)
    rows: Tensor = function_of(format, "encode")(row)
    return rows


def decoded(
    rows: Tensor,
    format: RowFormat,
    size: int,
    dtype: torch.dtype = torch.float32,
    turn: bool = True,
) -> Tensor:
    """Return the elements that a row format's bytes stand for, without the layer's scale.

    Args:
        rows: uint8 (..., row_bytes).
        format: the format.
        size: elements of a row.
        dtype: of the result.
        turn: whether to turn the elements back, where the format turns them.

    Returns:
        (..., size) in `dtype`.

    Raises:
        SpecError: a function of the format can't be loaded.

    Examples:
        >>> from polyattn import row_formats
        >>> format = row_formats()["fp8_ds_mla"]
        >>> row = torch.full((1, 576), 2.0)
        >>> decoded(encoded(row, format), format, 576).unique()
        tensor([2.])

    """
    places = torch.arange(size, device=rows.device)
    values: Tensor = function_of(format, "decode")(Bytes(rows), places, size)
    values = values.float().expand(*rows.shape[:-1], size)
    if turn and format.turn is not None:
        values = turned(values, format, back=True)
    return values.to(dtype)


def turned(values: Tensor, format: RowFormat, back: bool = False) -> Tensor:
    """Return elements turned as a row format turns them before it encodes them, or turned back.

    Args:
        values: (..., size).
        format: a format with a `turn`.
        back: turn back instead.

    Returns:
        (..., size), float32, or float64 if the values are.

    Raises:
        SpecError: the format's `turn` can't be loaded.

    Examples:
        >>> from polyattn import row_formats
        >>> format = next(f for f in row_formats().values() if f.turn is not None)
        >>> values = torch.randn(2, 128)
        >>> bool(torch.allclose(turned(turned(values, format), format, back=True), values, atol=1e-5))
        True

    """
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    rows: Tensor = function_of(format, "turn")(values.to(wide), back)
    return rows


def sizes_of(format: RowFormat) -> list[int]:
    """Return the head sizes for which a format has rows.

    Args:
        format: the format.

    Returns:
        Ascending, `LONGEST_HEAD` at most.

    Examples:
        >>> from polyattn import row_formats
        >>> sizes_of(row_formats()["nvfp4"])[:3]
        [16, 32, 48]

    """
    return [size for size in range(1, LONGEST_HEAD + 1) if format.row_bytes(size)]


def check_format(format: RowFormat) -> None:
    """Check that a format's functions fit each other, on a few rows. Raises `SpecError`."""
    sizes = sizes_of(format)
    if not sizes:
        raise SpecError(
            f"row format {format.name!r}: row_bytes has no size of 1 to {LONGEST_HEAD} elements"
        )
    for size in {sizes[0], 128 if 128 in sizes else sizes[-1]}:
        row = torch.tensor(EXTREMES, dtype=torch.float32, device="cpu")[:, None].repeat(1, size)
        try:
            rows = encoded(row, format)
            back = decoded(rows, format, size)
        except Exception as error:
            raise SpecError(
                f"row format {format.name!r}: a function fails on rows of {size}: {describe(error)}"
            ) from error
        wanted = (len(row), format.width("size", size))
        if rows.dtype != torch.uint8 or rows.shape != wanted:
            raise SpecError(
                f"row format {format.name!r}: encode of float32 {tuple(row.shape)} returns {rows.dtype} "
                f"{tuple(rows.shape)}; it must return torch.uint8 {wanted}, as row_bytes says"
            )
        if not bool(back.isfinite().all()):
            raise SpecError(
                f"row format {format.name!r}: decode(encode(row)) of finite rows isn't finite; encode "
                "must saturate"
            )
        if bool(back[0].any()):
            raise SpecError(
                f"row format {format.name!r}: a row of zeros comes back as {float(back[0, 0])}; zeros "
                "must stay zeros"
            )
        alone = torch.cat([encoded(part[None], format) for part in row])
        if not torch.allclose(decoded(alone, format, size), back, rtol=0.5, atol=1e-30):
            raise SpecError(
                f"row format {format.name!r}: encode gives a row other numbers beside other rows; each "
                "row stands alone, so reduce over its last dimension only"
            )
        if format.turn is not None:
            _check_turn(format, size)
            continue
        if float(back.abs().max()) > format.largest:
            raise SpecError(
                f"row format {format.name!r}: largest={format.largest:g}, and decode returns "
                f"{float(back.abs().max()):g}; state the largest element that it returns"
            )
        if bool((back * row < 0).any()):
            raise SpecError(
                f"row format {format.name!r}: decode(encode(row)) of {float(row[(back * row < 0)][0]):g} "
                "has the other sign; encode must saturate"
            )


def _check_turn(format: RowFormat, size: int) -> None:
    """Check that a format's `turn` is orthogonal: kernels turn queries instead of keys."""
    one = torch.eye(size, dtype=torch.float64, device="cpu")
    matrix = turned(one, format)
    for what, result in (
        ("times its transpose", matrix @ matrix.T),
        ("turned back", turned(matrix, format, True)),
    ):
        if result.shape != one.shape or not torch.allclose(result, one, atol=1e-5):
            raise SpecError(
                f"row format {format.name!r}: turn of rows of {size}, {what}, isn't the identity; it "
                "must multiply by an orthogonal matrix, and with back=True by its transpose"
            )


@lru_cache(maxsize=256)
def exact_in(format: RowFormat, size: int, dtype: torch.dtype) -> bool:
    """Return whether a dtype holds the values of a format's rows exactly, tested on random rows."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(64, size, generator=generator, dtype=torch.float32, device="cpu")
    values = decoded(encoded(row, format), format, size)
    return torch.equal(values.to(dtype).float(), values)
