"""How do sequences share recurrent states? By snapshots at block boundaries, copied when they go on.

A state stands for all tokens before it, and the next one is written over it. So a prefix can be reused
only where its state was copied. Chunks of a prompt that others may share end at block boundaries. Two of
its chunks end at places of its own, as in SGLang's radix cache for Mamba: at its last boundary, for equal
prompts, and where it parts from what is known, for later ones.
"""

from __future__ import annotations

from polyattn.tools.replay.pool import Held, Pool
from polyattn.tools.replay.prefix_tree import Match, Tokens


class StatePool(Pool):
    """The state slots of all recurrent layers: one a sequence, the others hold snapshots.

    A snapshot is a slot that the tree knows, in the place of the last block of its prefix. A sequence
    that continues from one takes another slot and a copy, also the sequence that computed it.
    """

    def most_blocks(self, tokens: int, queries: int) -> int:
        """Return 2: a sequence's slot, and the snapshot that it goes on from."""
        return 2

    def whole(self, computed: int, prompt: int) -> int:
        """Return the tokens that the state of `computed` ones stands for, 0 between boundaries."""
        return 0 if computed > prompt or computed % self.block_size else computed

    def stops(self, match: Match, limit: int) -> set[int]:
        """Return where chunks of a prompt's first `limit` tokens should end."""
        last = limit - limit % self.block_size
        return {last, min(last, len(match.blocks) * self.block_size)} - {0}

    def usable(self, match: Match, limit: int) -> int:
        """Return how many leading tokens have a snapshot at their end, `limit` at most."""
        count = min(limit // self.block_size, len(match.blocks))
        while count and match.blocks[count - 1] is None:
            count -= 1
        return count * self.block_size

    def take(self, match: Match, tokens: int) -> Held | None:
        """Share the snapshot of the first `tokens` tokens, as `usable` returned."""
        held = Held()
        if tokens:
            block = match.blocks[tokens // self.block_size - 1]
            assert block is not None
            self.allocator.share(block)
            held.blocks.append(block)
        return held

    def missing(self, held: Held, tokens: int) -> int:
        """Return 1 where the next step needs a slot to write to: none is held, or a snapshot."""
        return int(not held.blocks or held.blocks[0] in self.tree)

    def grow(self, held: Held, count: int) -> None:
        """Give a slot, and leave the snapshot that it begins with to others."""
        if count:
            blocks, held.blocks = held.blocks, [self.allocator.allocate()]
            for snapshot in blocks:
                held.copies.append((snapshot, held.blocks[0]))
                self.allocator.release(snapshot)

    def publish(self, held: Held, tokens: Tokens) -> None:
        """Make the slot the snapshot of these leading tokens, where there is none."""
        gone: list[int | None] = [None] * (len(tokens) // self.block_size - 1)
        self.tree.insert(tokens, [*gone, held.blocks[0]])
        if held.blocks[0] in self.tree:
            self.allocator.keep(held.blocks[0])
