"""Which cache blocks does a layer still need? `CacheWindow`: a window's memory is bounded by the window.

No later query sees a block that a sliding window or a chunk has left, except the sink tokens
(StreamingLLM, Xiao et al., arXiv 2309.17453). An engine gives those blocks back and leaves them out of
the sequence's row of the block table. The sequence is then shorter by their tokens. A window is
relative, so the results are the same. A step over a million tokens costs what its window does, on every
backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from operator import index
from typing import SupportsIndex

from polyattn.errors import SpecError, integer
from polyattn.spec.fields import LARGEST_WINDOW, LONGEST
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class CacheWindow:
    """The tokens of a sequence that a layer's cache keeps.

    Blocks leave the cache `step` at a time, so that chunks begin at a block.

    Attributes:
        block_size: tokens of a block.
        window: a query sees itself and the `window - 1` tokens before it; None: all.
        sinks: first tokens that stay.
        chunk: a query sees only its own chunk, of `chunk` tokens; None: no chunks.

    Raises:
        SpecError: a number isn't one of a window.

    Examples:
        >>> CacheWindow(block_size=16, window=1024, sinks=4).step
        1

    """

    block_size: int
    window: int | None
    sinks: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        integer("CacheWindow.block_size", self.block_size, 1)
        integer("CacheWindow.sinks", self.sinks, 0, LONGEST)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                integer(
                    f"CacheWindow.{name}", getattr(self, name), 1, LONGEST, "; use None for none"
                )
        if self.window is None and self.chunk is None:
            raise SpecError(
                "CacheWindow.window=None without a chunk keeps everything; set window, chunk or both"
            )

    @classmethod
    def of(cls, spec: LayerSpec, block_size: int) -> CacheWindow | None:
        """Return the keys that a layer's cache may drop.

        A cache keeps everything if the removed tokens would change the others. Sink tokens under ALiBi
        or chunks do so, because their places count, and so do rotations that depend on the whole
        length. A variant's functions, and a step's mask, may read any key's place.

        Args:
            spec: the layer.
            block_size: tokens of a block.

        Returns:
            The window, or None if the cache keeps everything.

        Raises:
            SpecError: the spec has no such cache.

        """
        integer("block_size", block_size, 1)
        window, chunk = (
            None if size == LONGEST else size for size in (spec.sliding_window, spec.chunk_size)
        )
        nothing = window is None and chunk is None
        keeps_all = nothing or spec.sink_tokens == LONGEST or spec.has_functions
        if keeps_all or not (spec.cached and spec.causal and spec.role is Role.DECODER):
            return None
        if spec.sink_tokens and (spec.alibi or chunk is not None):
            return None
        rope = spec.rope
        by_length = rope is not None and rope.by_length
        if rope is not None and rope.positions == "absolute" and by_length:
            return None
        return cls(block_size, window, spec.sink_tokens if window is not None else 0, chunk)

    @property
    def head(self) -> int:
        """Leading blocks that stay: the sink tokens'."""
        return -(-self.sinks // self.block_size)

    @property
    def step(self) -> int:
        """Blocks that leave at a time."""
        return lcm(self.block_size, self.chunk or 1) // self.block_size

    def gone(self, position: int) -> range:
        """Return the blocks that no query at a position or later sees.

        Args:
            position: the position, 0 or more, in tokens.

        Returns:
            The blocks' numbers in their sequence.

        Raises:
            SpecError: the position is no integer, or negative.

        """
        if isinstance(position, SupportsIndex) and not isinstance(position, bool):
            position = index(position)  # NumPy's integers, too
        integer("position", position, 0, LARGEST_WINDOW)
        first = 0 if self.window is None else max(0, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        count = first // self.block_size - self.head
        return range(self.head, self.head + max(0, count - count % self.step))

    def most_blocks(self, queries: int = 1) -> int:
        """Return the most blocks that a sequence holds in a step.

        Args:
            queries: the sequence's query tokens in the step.

        Raises:
            SpecError: `queries` isn't a positive integer.

        """
        integer("queries", queries, 1, LONGEST)
        seen = min(n for n in (self.window, self.chunk) if n is not None)
        spread = -(-(seen + queries - 2) // self.block_size) + 1
        return self.head + spread + self.step - 1
