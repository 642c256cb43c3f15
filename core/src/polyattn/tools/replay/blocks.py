"""Which requests use which cache block? Counts users, and evicts unused blocks when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from polyattn.errors import CacheError


class BlockAllocator:
    """Hands out the blocks of one paged cache.

    A block that `keep` marks stays after its last user until its room is needed. Then the longest
    unused one goes first, and `evicted` is called.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[int], None] = lambda block: None):
        self.num_blocks, self._evicted = num_blocks, evicted
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, kept ones without a user included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.num_free

    def users(self, block: int) -> int:
        """Return how many hold a block."""
        return self._users[block]

    def allocate(self) -> int:
        """Return a block with one user. Raises `CacheError` when none is left."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._kept.remove(block)
            self._evicted(block)
        else:
            raise CacheError(f"all {self.num_blocks} cache blocks are in use")
        self._users[block] = 1
        return block

    def keep(self, block: int) -> None:
        """Keep a used block's content beyond its last user."""
        self._kept.add(block)

    def share(self, block: int) -> None:
        """Add a user to a used or retained block."""
        if not self._users[block] and block not in self._kept:
            raise CacheError(f"block {block} holds nothing that could be shared")
        self._idle.pop(block, None)
        self._users[block] += 1

    def release(self, block: int) -> None:
        """Take one user away."""
        if self._users[block] <= 0:
            raise CacheError(f"block {block} is released more often than it was taken")
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._kept:
                self._idle[block] = None
            else:
                self._free.append(block)
