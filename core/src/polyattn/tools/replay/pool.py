"""How does one group of layers share a cache? By prefix, bounded by its window where it has one."""

from __future__ import annotations

from dataclasses import dataclass, field

from polyattn.spec.cache_window import CacheWindow
from polyattn.tools.replay.blocks import BlockAllocator
from polyattn.tools.replay.prefix_tree import Match, PrefixTree, Tokens


@dataclass
class Held:
    """A sequence's blocks in one pool, as its row of the block table lists them.

    `gone` blocks have left the window and were given back; they lay behind the first `head` ones.
    `copies`: (source, target) of blocks whose tokens are to be copied before the next step.
    """

    head: int = 0
    blocks: list[int] = field(default_factory=list)
    gone: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)

    def whole(self, count: int) -> list[int | None]:
        """Return the sequence's first `count` blocks, None for those that have gone."""
        gone: list[int | None] = [None] * self.gone
        return [*self.blocks[: self.head], *gone, *self.blocks[self.head :]][:count]


class Pool:
    """The blocks of the layers that share one block size and one kind of content."""

    def __init__(self, block_size: int, num_blocks: int, window: CacheWindow | None = None):
        self.block_size, self.window = block_size, window
        self.head = window.head if window else 0
        self.tree = PrefixTree(block_size)
        self.allocator = BlockAllocator(num_blocks, self.tree.remove)

    def most_blocks(self, tokens: int, queries: int) -> int:
        """Return how many blocks a sequence of `tokens` holds at most, `queries` tokens a step."""
        whole = -(-tokens // self.block_size)
        if self.window is None:
            return whole
        return min(whole, self.window.most_blocks(min(queries, tokens)))

    def usable(self, match: Match, limit: int) -> int:
        """Return how many of a prompt's first `limit` tokens need not be computed."""
        size = self.block_size
        count = min(limit, len(match.blocks) * size + match.tail)
        while count:
            gone = self._gone(count)
            needed = (i for i in reversed(range(-(-count // size))) if i not in gone)
            missing = next((i for i in needed if match.block(i) is None), None)
            if missing is None:
                break
            count = missing * size
        return count

    def take(self, match: Match, tokens: int) -> Held | None:
        """Share the blocks of a prompt's first `tokens` tokens, as `usable` returned; None without room.

        Full blocks are shared. A partly used one is copied, and the sequence writes to the copy.
        """
        full, part = divmod(tokens, self.block_size)
        gone = self._gone(tokens)
        held = Held(self.head, gone=len(gone))
        for index in range(full):
            block = match.blocks[index]
            if index not in gone and block is not None:
                self.allocator.share(block)
                held.blocks.append(block)
        if part:
            if not self.allocator.num_free:
                self.release(held)
                return None
            source = match.block(full)
            assert source is not None
            held.blocks.append(self.allocator.allocate())
            held.copies.append((source, held.blocks[-1]))
        return held

    def _gone(self, position: int) -> range:
        return range(0) if self.window is None else self.window.gone(position)

    def whole(self, computed: int, prompt: int) -> int:
        """Return how many leading tokens of a prompt others may find: full blocks, at its end all."""
        return prompt if computed >= prompt else computed - computed % self.block_size

    def stops(self, match: Match, limit: int) -> set[int]:
        """Return where chunks of a prompt's first `limit` tokens should end: keys are kept anywhere."""
        return set()

    def trim(self, held: Held, position: int) -> None:
        """Give back what no query from `position` on sees."""
        count = len(self._gone(position)) - held.gone
        if count > 0:
            left = slice(self.head, self.head + count)
            for block in held.blocks[left]:
                self.allocator.release(block)
            del held.blocks[left]
            held.gone += count

    def missing(self, held: Held, tokens: int) -> int:
        """Return how many blocks a sequence lacks for its first `tokens` tokens."""
        return max(0, -(-tokens // self.block_size) - len(held.blocks) - held.gone)

    def grow(self, held: Held, count: int) -> None:
        """Hand out `count` more blocks."""
        held.blocks += [self.allocator.allocate() for _ in range(count)]

    def publish(self, held: Held, tokens: Tokens) -> None:
        """Let later prompts find the blocks that hold these leading tokens of one.

        Where another sequence computed the same full block first, that one is used from now on.
        """
        whole = held.whole(-(-len(tokens) // self.block_size))
        match = self.tree.insert(tokens, whole)
        for index, block in enumerate(whole):
            there = match.blocks[index] if index < len(match.blocks) else None
            if block is None:
                continue
            if block in self.tree:
                self.allocator.keep(block)
            elif there is not None:
                self.allocator.share(there)
                self.allocator.release(block)
                held.blocks[index if index < held.head else index - held.gone] = there

    def release(self, held: Held) -> None:
        """Give all blocks back, the last ones first: they are the leaves, which go first."""
        for block in reversed(held.blocks):
            self.allocator.release(block)
        held.blocks, held.gone, held.copies = [], 0, []
