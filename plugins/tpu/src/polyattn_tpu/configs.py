"""Tile sizes, as data: what fits a TPU core's VMEM and fills its matrix unit."""

from __future__ import annotations

ROWS = 128
"""Query rows (token, head of a group) of a prefill tile: one pass of a 128 x 128 matrix unit."""
KEYS = 512
"""Keys that a step of the kernel takes: long enough to hide a page's DMA behind the products."""
DENSE_PAGE = 128
"""Keys of a page where keys are given whole and are cut into pages first."""
CHUNK = 64
"""Tokens of a chunk of a recurrence: its products within are chunk x chunk, between them one state."""


def tile_tokens(gqa_ratio: int) -> int:
    """Return the query tokens of a prefill tile."""
    return max(1, ROWS // gqa_ratio)


def pages_per_step(block_size: int) -> int:
    """Return how many pages make a step."""
    return max(1, KEYS // block_size)
