"""Into how many parts does FlashAttention split a captured step's keys? As many as fill the chip."""

from __future__ import annotations

MAX_SPLITS = 32


def captured_splits(num_sms: int, programs: int) -> int:
    """Return the splits of each of so many `programs`: of the step's shape alone, as its graph is."""
    return min(MAX_SPLITS, max(1, num_sms // max(1, programs)))
