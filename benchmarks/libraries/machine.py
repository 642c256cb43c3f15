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


def copy_of_store(work: Any) -> Callable[[], object]:
    """Move what rotating and storing must: fused projections, queries, and the cache's bytes."""
    new = (work.query, work.key, work.value)
    moved = sum(t.numel() * t.element_size() for t in (*new, work.query))
    moved += sum(t.numel() for t in new[1:]) * work.cache.key.element_size()
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=work.device)
    goal = torch.empty_like(source)
    return lambda: goal.copy_(source)
