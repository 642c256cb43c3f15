"""A fake of xFormers' masks: they keep the lengths, and refuse what the real ones refuse."""

from __future__ import annotations

from typing import Any

from polyattn_fakes import bind


class BlockDiagonalMask:
    """No mask inside a block."""

    causal, window = False, None

    def __init__(self, queries: list[int], keys: list[int], window: int | None = None):
        self.queries, self.keys, self.window = queries, keys, window

    @classmethod
    def from_seqlens(cls, *args: Any, **kwargs: Any) -> BlockDiagonalMask:
        """Lengths of the queries and of the keys."""
        a = bind("xformers", "BlockDiagonalMask.from_seqlens", args, kwargs)
        return cls(list(a["q_seqlen"]), list(a["kv_seqlen"]))


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal, the last query beside the last key."""

    causal = True

    def __init__(self, queries: list[int], keys: list[int], window: int | None = None):
        for index, (query, key) in enumerate(zip(queries, keys, strict=True)):
            if key < query:
                raise ValueError(f"Block #{index} has num_keys={key} and num_queries={query}")
        super().__init__(queries, keys, window)

    def make_local_attention_from_bottomright(self, *args: Any, **kwargs: Any) -> BlockDiagonalMask:
        """The window counts the query's own key."""
        name = "BlockDiagonalMask.make_local_attention_from_bottomright"
        return type(self)(
            self.queries, self.keys, bind("xformers", name, args, kwargs)["window_size"]
        )
