"""The number of parts of a captured step's keys for FlashAttention: as many as fill the chip."""

from __future__ import annotations

import torch

MAX_SPLITS = 32


def capturing() -> bool:
    """Return whether a graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def captured_splits(num_sms: int, programs: int) -> int:
    """Return the splits of each of so many `programs`: of the step's shape alone, as its graph is."""
    return min(MAX_SPLITS, max(1, num_sms // max(1, programs)))
