"""Chunked recurrences after a token that forgets nearly all: sums are large, their differences count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from polyattn_cpu.scans import delta_scan, gated_scan, low_rank_scan
from torch import Tensor

TOKENS = 40


def rates(*shape: int, at: int, generator: torch.Generator) -> Tensor:
    found = -0.02 * torch.rand(*shape, generator=generator)
    found.select(at, 5).fill_(-900.0)
    return found


def gated(dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k = (torch.randn(TOKENS, 1, 16, generator=dice) for _ in range(2))
    v, g = torch.randn(TOKENS, 2, 8, generator=dice), rates(TOKENS, 2, at=0, generator=dice)
    state = torch.randn(1, 16, 16, generator=dice).to(dtype)
    out = torch.empty(TOKENS, 2, 8, dtype=dtype)
    gated_scan(*(t.to(dtype) for t in (q, k, v, g)), state, out)
    return out


def delta(dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, TOKENS, 16, generator=dice) for _ in range(3))
    g, beta = rates(2, TOKENS, at=1, generator=dice), torch.rand(2, TOKENS, generator=dice)
    state = torch.randn(2, 16, 16, generator=dice)
    return delta_scan(*(t.to(dtype) for t in (q, k / 4, v, g, beta, state)))


def low_rank(dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k, v, a, b = (torch.randn(2, TOKENS, 16, generator=dice) for _ in range(5))
    g, state = rates(2, TOKENS, 16, at=1, generator=dice), torch.randn(2, 16, 16, generator=dice)
    return low_rank_scan(*(t.to(dtype) for t in (q, k, v, g, a / 8, b / 8, state)))


@pytest.mark.parametrize("scan", [gated, delta, low_rank])
def test_a_token_that_forgets_all_costs_no_precision_after_it(
    scan: Callable[[torch.dtype], Tensor],
) -> None:
    found, expected = scan(torch.float32).double(), scan(torch.float64)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 2e-6, float(error)
