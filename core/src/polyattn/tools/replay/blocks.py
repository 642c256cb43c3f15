"""A block allocator with reference counts and a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from polyattn.errors import CacheError


class BlockAllocator:
    """Hands out the blocks of one paged cache.

    A block whose content has a name (`publish`) outlives its last user until the room is needed;
    then the one unused longest goes first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._by_name: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, named ones without a user included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Return a block with one user. Raises `CacheError` when none is left."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._by_name[self._names.pop(block)]
        else:
            raise CacheError(f"all {self.num_blocks} cache blocks are in use")
        self._users[block] = 1
        return block

    def find(self, name: Hashable) -> int | None:
        """Return the block of that content, or None; doesn't take it."""
        return self._by_name.get(name)

    def share(self, block: int) -> None:
        """Add a user to a block that `find` returned."""
        self._idle.pop(block, None)
        self._users[block] += 1

    def publish(self, block: int, name: Hashable) -> None:
        """Name a block's content, once it is written; the first block of a name keeps it."""
        if name not in self._by_name and block not in self._names:
            self._by_name[name] = block
            self._names[block] = name

    def release(self, block: int) -> None:
        """Take one user away."""
        if self._users[block] <= 0:
            raise CacheError(f"block {block} is released more often than it was taken")
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._names:
                self._idle[block] = None
            else:
                self._free.append(block)
