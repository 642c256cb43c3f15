"""Tile sizes, as data: what fits a TPU core's VMEM and fills its matrix unit."""

from __future__ import annotations

ROWS = 128
"""Query rows (token, head of a group) of a block: one pass of a 128 x 128 matrix unit."""
BLOCKS = 4
"""Blocks of a prefill tile, for which keys are read once."""
WRITTEN = 16
"""Tokens that one DMA writes back, of a tile that has so many."""
KEYS = 512
"""Keys that a step of the kernel takes: long enough to hide a page's DMA behind the products."""
VMEM_BYTES = 32 << 20
"""What the kernel may take of a core's VMEM, which is 64 MiB or more on every generation served."""
DENSE_PAGE = 128
"""Keys of a page where keys are given whole and are cut into pages first."""
CHUNK = 64
"""Tokens of a chunk of a recurrence: its products within are chunk x chunk, between them one state."""


def block_tokens(gqa_ratio: int) -> int:
    """Return the query tokens of a block of a prefill tile."""
    return max(1, ROWS // gqa_ratio)


def tile_tokens(gqa_ratio: int, tokens: int) -> int:
    """Return the query tokens of a prefill tile, of a step of so many: whole blocks, or less than one."""
    each = block_tokens(gqa_ratio)
    return tokens if tokens < each else min(BLOCKS, tokens // each) * each


def pages_per_step(block_size: int) -> int:
    """Return how many pages make a step."""
    return max(1, KEYS // block_size)
