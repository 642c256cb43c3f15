"""Which blocks hold a prompt's leading tokens? A radix tree of token runs, as SGLang's RadixAttention.

An edge is a run of tokens and the blocks that hold them (Zheng et al., arXiv 2312.07104). Runs part
between blocks, so that each block has one place; inside a block a prompt is matched token by token: a
sequence that continues differently copies what agrees. The last run of a prompt may end inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Match:
    """What is cached of a prompt: its leading full blocks, then `tail` tokens of the block `source`.

    None stands for a block whose content is gone, where a window was all that later tokens needed.
    """

    blocks: list[int | None]
    source: int | None = None
    tail: int = 0

    def block(self, index: int) -> int | None:
        """Return the block that holds the prompt's `index`-th one, in part or in full."""
        return self.blocks[index] if index < len(self.blocks) else self.source


@dataclass(eq=False)
class _Run:
    tokens: Tokens
    blocks: list[int | None]
    parent: _Run | None
    children: dict[int, list[_Run]] = field(default_factory=dict)

    def closest(self, tokens: Tokens) -> tuple[_Run | None, int]:
        """Return the child that begins most alike, and in how many tokens."""
        best: tuple[_Run | None, int] = (None, 0)
        for child in self.children.get(int(tokens[0]), ()) if len(tokens) else ():
            alike = count_alike(child.tokens, tokens)
            if alike > best[1]:
                best = child, alike
        return best


class PrefixTree:
    """An index of prompts' blocks of `block_size` tokens; holds no user of any block."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._root = _Run(np.empty(0, np.int64), [], None)
        self._runs: dict[int, _Run] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._runs

    def match(self, tokens: Tokens) -> Match:
        """Return the cached leading tokens of a prompt, int64 (tokens,)."""
        size, run, blocks = self.block_size, self._root, list[int | None]()
        while True:
            rest = tokens[len(blocks) * size :]
            child, alike = run.closest(rest)
            if child is None:
                return Match(blocks)
            whole = alike // size
            blocks += child.blocks[:whole]
            if whole < len(child.blocks):
                tail = alike % size
                source = child.blocks[whole] if tail else None
                return Match(blocks, source, tail if source is not None else 0)
            run = child

    def insert(self, tokens: Tokens, blocks: list[int | None]) -> Match:
        """Add a prompt's leading tokens and the blocks that hold them, None where they are gone.

        Where the same tokens are there already their block stays. Returns what the tree holds of the
        prompt now; the last block may be held in part.
        """
        size, run, at = self.block_size, self._root, 0
        while at * size < len(tokens):
            rest = tokens[at * size :]
            child, alike = run.closest(rest)
            whole = alike // size
            if child is None or not (whole or alike == len(rest)):
                self._append(run, rest, blocks[at:])
                break
            if alike < len(rest) and whole < len(child.blocks):
                child = self._split(child, whole)
            self._fill(child, blocks[at : at + whole])
            if alike == len(rest):
                break  # a partial block at its end is the beginning of one that is there
            run, at = child, at + whole
        return self.match(tokens)

    def remove(self, block: int) -> None:
        """Forget a block that another user took."""
        run: _Run | None = self._runs.pop(block)
        assert run is not None
        run.blocks[run.blocks.index(block)] = None
        while run is not None and run.parent is not None and not run.children:
            while run.blocks and run.blocks[-1] is None:
                run.blocks.pop()
            if run.blocks:
                run.tokens = run.tokens[: len(run.blocks) * self.block_size]
                return
            siblings = run.parent.children[int(run.tokens[0])]
            siblings.remove(run)
            if not siblings:
                del run.parent.children[int(run.tokens[0])]
            run = run.parent

    def _split(self, run: _Run, count: int) -> _Run:
        """Part a run behind `count` blocks; returns the first part."""
        assert run.parent is not None
        cut = count * self.block_size
        upper = _Run(run.tokens[:cut], run.blocks[:count], run.parent)
        siblings = run.parent.children[int(run.tokens[0])]
        siblings[siblings.index(run)] = upper
        run.tokens, run.blocks, run.parent = run.tokens[cut:], run.blocks[count:], upper
        upper.children[int(run.tokens[0])] = [run]
        self._runs.update((block, upper) for block in upper.blocks if block is not None)
        return upper

    def _fill(self, run: _Run, blocks: list[int | None]) -> None:
        """Put blocks where a run's are gone."""
        for index, block in enumerate(blocks):
            if run.blocks[index] is None and block is not None:
                run.blocks[index] = block
                self._runs[block] = run

    def _append(self, run: _Run, tokens: Tokens, blocks: list[int | None]) -> None:
        """Append tokens to a run: in place if nothing else follows it, or else as a new run."""
        while blocks and blocks[-1] is None:  # nothing would lead to what holds nothing
            blocks = blocks[:-1]
        if not blocks:
            return
        tokens = tokens[: len(blocks) * self.block_size].copy()
        if run.parent is None or run.children:
            child = _Run(tokens, list(blocks), run)
            run.children.setdefault(int(tokens[0]), []).append(child)
            run = child
        else:
            run.tokens = np.concatenate([run.tokens, tokens])
            run.blocks += blocks
        self._runs.update((block, run) for block in blocks if block is not None)


def count_alike(one: Tokens, other: Tokens) -> int:
    """Return in how many leading tokens two prompts agree."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count
