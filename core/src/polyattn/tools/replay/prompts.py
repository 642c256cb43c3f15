"""Which tokens has a request? A trace has only lengths, so tokens are drawn, alike where it says so."""

from __future__ import annotations

import random

import numpy as np

from polyattn.tools.replay.prefix_tree import Tokens
from polyattn.tools.replay.trace import MOST_TOKENS, Request


class PromptNames:
    """Numbers that stand for prompts' tokens: equal where `prompt_tokens` makes equal ones.

    Only where the trace says so: tokens that are drawn for one request alone are equal to none.
    """

    def __init__(self) -> None:
        self._blocks: dict[int | object, int] = {}

    def of(self, request: Request) -> Tokens | None:
        """Return int64 (prompt tokens,); None where the request shares with none."""
        if not request.hash_ids:
            return None
        count = -(-request.prompt // request.hash_block)
        ids: list[int | object] = [*request.hash_ids[:count]]
        ids += (object() for _ in range(count - len(ids)))
        first = np.array([self._blocks.setdefault(i, len(self._blocks)) for i in ids], np.int64)
        offsets = np.arange(request.hash_block, dtype=np.int64)
        return (first[:, None] * (MOST_TOKENS + 1) + offsets).reshape(-1)[: request.prompt]


def prompt_tokens(request: Request, index: int, vocabulary: int, seed: int) -> list[int]:
    """Return the prompt of the request that came `index`-th, by the seed alone.

    Requests whose `hash_ids` are equal up to a block have equal tokens up to its end.
    """
    tokens: list[int] = []
    while len(tokens) < request.prompt:
        block = len(tokens) // request.hash_block
        hashed = block < len(request.hash_ids)
        name = f"hash {request.hash_ids[block]}" if hashed else f"request {index}, block {block}"
        draw = random.Random(f"{seed}/{name}")
        tokens += (draw.randrange(vocabulary) for _ in range(request.hash_block))
    return tokens[: request.prompt]
