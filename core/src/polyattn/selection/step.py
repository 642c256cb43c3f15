"""A step's rows, and the tiles that kernels make of them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from polyattn.selection.pieces import Ints, ones
from polyattn.spec.layer import LayerSpec


class Step:
    """Rows of a step over heads, but for those without tokens.

    `seen`: keys that a token sees before its own at most, None where that is no limit. `tokens`: of all
    rows. `most`: of one row.
    """

    def __init__(
        self, spec: LayerSpec, queries: Ints, lens: Ints, seen: int | None, tokens: int, most: int
    ):
        self.spec, self.queries, self.lens = spec, queries, lens
        self.seen, self.tokens, self.most = seen, tokens, most
        self._tiles: dict[tuple[int, int, int, bool], tuple[Ints, Ints, Ints]] = {}

    @property
    def narrow(self) -> bool:
        """Whether the cache's elements aren't queries'."""
        return self.spec.stored_dtype != self.spec.dtype

    @cached_property
    def near(self) -> Ints:
        """The keys of each row that any of its tokens sees, or a little more."""
        return self.lens if self.seen is None else np.minimum(self.lens, self.seen + self.queries)

    @cached_property
    def fresh(self) -> bool:
        """Whether each row sees only its own keys."""
        return self.queries.tobytes() == self.lens.tobytes()

    def each(self, group: int, high: int) -> Ints:
        """Return each row's tiles of a KV head."""
        if self.most * group <= high:
            return ones(len(self.lens))
        return (self.queries * group + (high - 1)) // high

    def tiles(
        self, group: int, high: int, block: int, from_first: bool = False
    ) -> tuple[Ints, Ints, Ints]:
        """Return each row's tiles of a KV head, their first, and the blocks that each goes through.

        Rows are in turn, of each the last tile first. `from_first`: blocks begin where a tile's window
        does, else where a cache's do.
        """
        form = group, high, block, from_first and self.seen is not None
        known = self._tiles.get(form)
        if known is None:
            known = self._tiles[form] = self._tile(*form)
        return known

    def _tile(self, group: int, high: int, block: int, from_first: bool) -> tuple[Ints, Ints, Ints]:
        lens, area = self.lens, group * block
        if self.seen is None and self.most * group <= high:
            return ones(len(lens)), np.arange(len(lens)), (lens + (block - 1)) // block
        rows, last = self.queries * group, lens * group + (area - 1)
        each = (rows + (high - 1)) // high
        ends = each.cumsum()
        line = (last - rows + ends * high).repeat(each)
        line -= np.arange(0, len(line) * high, high)
        first, tops = ends - each, last // area
        blocks = line // area if self.spec.causal else tops.repeat(each)
        blocks[first] = tops  # whose last rows may be none
        if self.seen is not None:  # keys that a tile's first token doesn't see
            hidden = np.maximum(line - (area - 1 + self.seen * group + high), 0)
            if from_first:
                ends_at = np.minimum((line - (area - group)) // group, lens.repeat(each))
                blocks = (ends_at - hidden // group + (block - 1)) // block
            else:
                blocks -= hidden // area
            blocks = np.maximum(blocks, 1)
        return each, first, blocks
