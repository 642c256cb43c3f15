"""What can the machine do at best?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def copy(work: Any) -> Callable[[], object]:
    """Move as many bytes as the step must, half of them read and half written."""
    source = torch.zeros(max(work.cost.bytes // 2, 1), dtype=torch.uint8, device=work.device)
    goal = torch.empty_like(source)
    return lambda: goal.copy_(source)


def read(work: Any) -> Callable[[], object]:
    """Read as many bytes as the step must."""
    source = torch.ones(max(work.cost.bytes // 4, 1), device=work.device)
    return lambda: source.sum()


def e4m3_products(work: Any) -> Callable[[], object]:
    """Multiply e4m3 matrices of as many operations as the step costs at least."""
    side = 8192 if work.device.type == "cuda" else 64
    width = max(16, -(-work.cost.flops // (2 * side * side)) // 16 * 16)
    a, b = (torch.ones(n, side, device=work.device).to(torch.float8_e4m3fn) for n in (side, width))
    one = torch.ones((), device=work.device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def copy_of_store(work: Any) -> Callable[[], object]:
    """Move what rotating and storing must: fused projections, queries, and the cache's bytes."""
    new = (work.query, work.key, work.value)
    moved = sum(t.numel() * t.element_size() for t in (*new, work.query))
    moved += sum(t.numel() for t in new[1:]) * work.cache.key.element_size()
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=work.device)
    goal = torch.empty_like(source)
    return lambda: goal.copy_(source)
