"""The use of a group's cache: blocks that steps read, distinct ones, and a sequence's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyattn.tools.replay.pool import Pool
from polyattn.tools.replay.scheduler import Scheduled


@dataclass
class Usage:
    """What one group's cache was used for: `block_bytes` of all its layers that ran.

    `unshared`: the reason why decodes over shared blocks aren't split here, or None.
    Blocks that each sequence reads, and distinct ones. `decode_blocks` counts the most blocks of a
    sequence in a row that decodes, `prefill_blocks` in any other.
    """

    pool: Pool
    block_bytes: int
    unshared: str | None = None
    read: int = 0
    distinct: int = 0
    copied: int = 0
    decode_blocks: int = 0
    prefill_blocks: int = 0

    def count(self, plan: Sequence[Scheduled], index: int) -> None:
        """Account for a step."""
        rows = [item.sequence.held[index].blocks for item in plan]
        self.read += sum(map(len, rows))
        self.distinct += len({block for row in rows for block in row})
        for item, row in zip(plan, rows, strict=True):
            if item.count == 1 and item.start > 0:
                self.decode_blocks = max(self.decode_blocks, len(row))
            else:
                self.prefill_blocks = max(self.prefill_blocks, len(row))

    @property
    def shared_bytes(self) -> int:
        """Bytes of blocks that were some other sequence's of the same step, too."""
        return (self.read - self.distinct) * self.block_bytes

    def to_dict(self) -> dict[str, int | str | None]:
        """Return the group's cache as JSON values."""
        window = self.pool.window
        return {
            "block_size": self.pool.block_size,
            "blocks": self.pool.allocator.num_blocks,
            "block_bytes": self.block_bytes,
            "unshared": self.unshared,
            "window": None if window is None else window.window or window.chunk,
            "sinks": 0 if window is None else window.sinks,
            "decode_blocks": self.decode_blocks,
            "prefill_blocks": self.prefill_blocks,
        }
