"""Which tokens has a request? A trace has lengths alone, so they are drawn, equal where it says so."""

from __future__ import annotations

import random

from polyattn.tools.replay.trace import Request


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
