"""Is a format's `encode`, traced, what torch computes? Each shipped one, and what can't be traced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from polyattn import RowFormat
from polyattn.kernel import UntraceableError, encoded, sizes_of, trace_encode
from polyattn.runtime.cache.bits import root
from polyattn.runtime.functions.encoding import replayed
from polyattn.spec.row_format import known_formats
from torch import Tensor
from unseen_format import LOGS6

SHIPPED = list(known_formats().values())


@pytest.mark.parametrize("format", [*SHIPPED, LOGS6], ids=lambda f: f.name)
def test_traced_operations_write_the_bytes(format: RowFormat) -> None:
    """Of normal rows, zeros of either sign (which the sign of an extreme may follow), what saturates."""
    size = 128 if format.row_bytes(128) else sizes_of(format)[-1]
    trace = trace_encode(format, size)
    rows = torch.randn(10, size, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([1, 1, 1, 1, 1, 1e-38, 1e-20, 1e5, 1e30, 1e36])[:, None]
    rows[3], rows[4] = 0.0, -0.0
    for row in rows:
        assert torch.equal(replayed(trace, row), encoded(row, format))


@pytest.mark.parametrize("right", [False, True])
def test_a_number_lies_between_the_bounds_that_torch_says(right: bool) -> None:
    bounds = torch.tensor([-1.0, 0.0, 0.5])
    format = _of(lambda row: torch.bucketize(row, bounds, right=right).to(torch.uint8))
    row = torch.tensor([torch.nan, -torch.inf, -1.0, -0.0, 0.25, 0.5, torch.inf, -torch.nan])
    assert torch.equal(replayed(trace_encode(format, 8), row), encoded(row, format))


def _of(encode: Callable[[Tensor], Tensor]) -> RowFormat:
    return RowFormat(
        name="odd", encode=encode, decode=lambda row, d, size: row[d] * 1.0,
        row_bytes=lambda size: size,
    )  # fmt: skip


def _by_value(row: Tensor) -> Tensor:
    return (row * 2 if bool(row.max() > 1) else row).to(torch.uint8)


def _into_part(row: Tensor) -> Tensor:
    codes = row.round().to(torch.uint8)
    codes[:4] |= 1
    return codes


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (_by_value, "encode can't be traced by torch"),
        (_into_part, "operation 'bitwise_or' into part of a tensor"),
        (lambda row: row.cumsum(-1).to(torch.uint8), "operation 'cumsum'"),
        (lambda row: (row.double() / 3).to(torch.uint8), "operation 'div' in torch.float64"),
        (lambda row: row.sum(-1, keepdim=True).to(torch.uint8).expand(16), "whose order is torch's own"),
    ],
)  # fmt: skip
def test_what_cant_be_traced_is_told(encode: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(UntraceableError, match=message):
        trace_encode(_of(encode), 16)


def test_a_root_is_rounded_once() -> None:
    """NumPy's instruction is IEEE 754's; MKL's function, which `torch.sqrt` calls, may err."""
    x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(2)) * 8.0
    assert torch.equal(root(x), torch.from_numpy(np.sqrt(x.numpy())))


@pytest.mark.parametrize("last", [torch.int32, torch.float16])
def test_a_float64_is_for_roots_alone(last: torch.dtype) -> None:
    def encode(row: Tensor) -> Tensor:
        return row.double().sqrt().to(last).to(torch.uint8)

    format = RowFormat(
        name="wide", encode=encode, decode=lambda row, d, size: row[d], row_bytes=lambda size: size
    )
    with pytest.raises(UntraceableError, match="float64"):
        trace_encode(format, 32)
