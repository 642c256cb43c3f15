"""Runs a whole model over a scheduler's steps: tokens in, the next token of each sequence out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from polyattn import Batch, LayerSpec
from polyattn.errors import SettingsError
from polyattn.tools.replay.check import Checker
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.step import GroupMemory, ModelStep
from polyattn.tools.replay.prompts import prompt_tokens
from polyattn.tools.replay.scheduler import Running, Scheduled
from polyattn.tools.replay.trace import Request


def check_lengths(specs: Iterable[LayerSpec], requests: Iterable[Request]) -> None:
    """Refuse requests beyond the length of a model's frequencies. Dynamic NTK and LongRoPE change them
    there, and cached keys would have to rotate again. Raises `SettingsError`.
    """
    ropes = {spec.rope for spec in specs if spec.rope is not None}
    limits = [(rope.original_length, rope.scaling) for rope in ropes if rope.by_length]
    if not limits:
        return
    limit, scaling = min((length or 0, scaling) for length, scaling in limits)
    longest = max((request.prompt + request.output for request in requests), default=0)
    if longest > limit:
        raise SettingsError(
            f"a request of {longest} tokens: rope_scaling={scaling!r} changes its frequencies "
            f"beyond {limit} tokens, and cached keys would have to be rotated again; keep requests "
            "within them (--scale, --max-tokens)"
        )


class ModelRunner:
    """A model whose weights are loaded, over the memories of its groups.

    The next token is always the likeliest one; a sequence ends by its request's length alone.
    `tokens` holds each sequence's prompt and what was generated. Raises `SettingsError`.
    """

    def __init__(
        self,
        model: Decoder,
        memories: Sequence[GroupMemory],
        sequences: Iterable[Running],
        checker: Checker,
        seed: int,
    ):
        sequences = list(sequences)
        check_lengths((m.spec for m in memories), (s.request for s in sequences))
        self.model, self.memories, self.checker = model, memories, checker
        self.device = memories[0].device
        model.bind(memories)
        self.tokens = {
            sequence: prompt_tokens(sequence.request, index, model.vocabulary, seed)
            for index, sequence in enumerate(sequences)
        }

    @torch.no_grad()
    def step(self, plan: Sequence[Scheduled], batches: Sequence[Batch]) -> float:
        """Run one step, a batch for each memory; returns the seconds that the model took."""
        clock = self.memories[0]
        started = clock.clock()
        pieces = [slice(item.start, item.start + item.count) for item in plan]
        known = [self.tokens[item.sequence] for item in plan]
        tokens = [token for ids, at in zip(known, pieces, strict=True) for token in ids[at]]
        positions = [p for at in pieces for p in range(at.start, at.stop)]
        step = ModelStep(
            self._tensor(positions),
            {m.group: b for m, b in zip(self.memories, batches, strict=True)},
            {m.group: m.planned(b) for m, b in zip(self.memories, batches, strict=True)},
            self.checker,
            clock,
        )
        hidden = self.model(self._tensor(tokens), step)
        ends = torch.tensor([item.count for item in plan]).cumsum(0) - 1
        generating = [i for i, item in enumerate(plan) if item.generates]
        if generating:
            logits = self.model.logits(hidden[ends[generating].to(self.device)])
            for index, token in zip(generating, logits.argmax(-1).tolist(), strict=True):
                known[index].append(token)
        return clock.clock() - started - step.checking

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each request's prompt, in the requests' order."""
        return [ids[: running.request.prompt] for running, ids in self.tokens.items()]

    def outputs(self) -> list[list[int]]:
        """Return the token ids that each request generated, in the requests' order."""
        return [ids[running.request.prompt :] for running, ids in self.tokens.items()]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
