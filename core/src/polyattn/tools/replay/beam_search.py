"""How does a whole model search with beams? Hypotheses are rows of one decode, over shared blocks.

A beam that goes on from another's hypothesis takes over that one's row of the block table: what
TensorRT-LLM's `cache_indirection` says by the token (`polyattn.beam_batch`), by the block. Full blocks
are shared, the context's by all beams of a sequence; the one that is written to is copied first where
others hold it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyattn import Batch
from polyattn.errors import SettingsError
from polyattn.tools.replay.blocks import BlockAllocator
from polyattn.tools.replay.check import Checker
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.step import GroupMemory, ModelStep


@dataclass(frozen=True)
class Hypothesis:
    """What a search found: the tokens after the prompt, and their logarithmic probability over length."""

    tokens: tuple[int, ...]
    score: float


@dataclass
class Beam:
    """A hypothesis that goes on: its tokens, the sum of their logarithms, its blocks in each memory."""

    tokens: list[int]
    total: float
    blocks: list[list[int]]


@dataclass
class Search:
    """A prompt's beams, the `most` tokens that they get, and what has ended, the best first."""

    prompt: list[int]
    most: int
    beams: list[Beam]
    ended: list[Hypothesis] = field(default_factory=list)


class BeamSearch:
    """Beam search over the memories of a model whose weights are loaded (Graves, 2012).

    - `beams`: hypotheses that go on at a time, and are returned; `max_tokens`: the most generated.
    - `end`: the token that ends a hypothesis, None for none.
    - `length_penalty`: scores are sums of logarithms over the generated tokens' number to this power.
    - `check_tokens`: tokens of each layer and step that are checked beside the float64 reference.

    Candidates, scores and when to stop are transformers' (`generate(num_beams=…)`). `copied` counts
    blocks that were copied before they were written to, `most_blocks` those held at most in each memory,
    `widest` the rows of the largest decode, `steps` and `seconds` the model's. Raises `SettingsError`
    for a model with recurrent layers, and `CacheError` where blocks run out.
    """

    def __init__(
        self,
        model: Decoder,
        memories: Sequence[GroupMemory],
        beams: int,
        max_tokens: int,
        end: int | None = None,
        length_penalty: float = 1.0,
        check_tokens: int = 0,
    ):
        for memory in memories:
            if memory.spec.kind.is_recurrent:
                raise SettingsError(
                    f"beams share blocks of keys, and {memory.spec} keeps a state; serve it without "
                    "beams"
                )
        for name, value in (("beams", beams), ("max_tokens", max_tokens)):
            if type(value) is not int or value < 1:
                raise SettingsError(f"{name}={value!r} must be a positive integer")
        if 2 * beams > model.vocabulary:
            raise SettingsError(
                f"beams={beams}: twice as many candidates are looked at, and there are "
                f"{model.vocabulary} tokens"
            )
        self.model, self.memories, self.beams, self.max_tokens = model, memories, beams, max_tokens
        self.end, self.length_penalty = end, length_penalty
        self.checker = Checker(check_tokens, 0)
        self.device = memories[0].device
        self.pools = [BlockAllocator(_blocks_of(memory)) for memory in memories]
        self.copied = self.widest = self.steps = 0
        self.most_blocks, self.seconds = [0] * len(self.pools), 0.0
        model.bind(memories)

    @torch.no_grad()
    def run(
        self, prompts: Sequence[Sequence[int]], most: Sequence[int] | None = None
    ) -> list[list[Hypothesis]]:
        """Return each prompt's hypotheses, the best first. `most`: each one's `max_tokens`."""
        searches = [
            Search(list(prompt), count, [Beam([], 0.0, [[] for _ in self.pools])])
            for prompt, count in zip(prompts, most or [self.max_tokens] * len(prompts), strict=True)
        ]
        active = searches
        while active:
            beams = [(search, beam) for search in active for beam in search.beams]
            self.widest = max(self.widest, len(beams))
            scores = torch.log_softmax(self._logits(beams), dim=-1).cpu()
            at = 0
            for search in active:
                self._advance(search, scores[at : (at := at + len(search.beams))])
            active = [search for search in active if search.beams]
        return [search.ended for search in searches]

    def most_held(self, index: int, prompt: int, most: int) -> int:
        """Return how many blocks of the `index`-th memory a search holds at most."""
        form = self.memories[index].group.cache_format
        assert form is not None
        shared = prompt // form.block_size
        return shared + self.beams * (-(-(prompt + most) // form.block_size) - shared)

    def _logits(self, beams: list[tuple[Search, Beam]]) -> Tensor:
        """Run a step: each row's tokens that are not cached yet; returns float32 (rows, vocabulary)."""
        clock, tokens, counts, lens = self.memories[0], [], [], []
        started = clock.clock()
        for search, beam in beams:
            new = [beam.tokens[-1]] if beam.tokens else search.prompt
            tokens += new
            counts.append(len(new))
            lens.append(len(search.prompt) + len(beam.tokens))
        batches = {}
        for index, memory in enumerate(self.memories):
            batches[memory.group] = self._batch(index, [beam for _, beam in beams], counts, lens)
        places = [p for count, n in zip(counts, lens, strict=True) for p in range(n - count, n)]
        positions, ids = (torch.tensor(x, device=self.device) for x in (places, tokens))
        plans = {m.group: m.planned(batches[m.group]) for m in self.memories}
        step = ModelStep(positions, batches, plans, self.checker, self.memories[0])
        hidden = self.model(ids, step)
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = self.model.logits(hidden[ends.to(self.device)])
        self.seconds += clock.clock() - started - step.checking
        self.steps += 1
        return logits

    def _batch(self, index: int, beams: list[Beam], counts: list[int], lens: list[int]) -> Batch:
        """Return the step's rows over a memory's blocks, all that is written to being each row's own."""
        memory, pool = self.memories[index], self.pools[index]
        form = memory.group.cache_format
        assert form is not None
        size, sources, targets = form.block_size, [], []
        for beam, count, length in zip(beams, counts, lens, strict=True):
            held = beam.blocks[index]
            first = (length - count) // size  # the first block that is written to
            if first < len(held) and pool.users(held[first]) > 1:
                sources.append(held[first])
                pool.release(held[first])
                held[first] = pool.allocate()
                targets.append(held[first])
            held += [pool.allocate() for _ in range(-(-length // size) - len(held))]
        self.most_blocks[index] = max(self.most_blocks[index], pool.num_used)
        if sources:
            self.copied += len(sources)
            memory.copy_blocks(*(torch.tensor(x, device=self.device) for x in (sources, targets)))
        table = np.zeros((len(beams), max(len(beam.blocks[index]) for beam in beams)), np.int32)
        for row, beam in zip(table, beams, strict=True):
            row[: len(beam.blocks[index])] = beam.blocks[index]
        on_device = torch.from_numpy(table).to(self.device)
        return Batch.from_lens(counts, lens, on_device, size, host_block_table=table)

    def _advance(self, search: Search, scores: Tensor) -> None:
        """Take the best candidates of a prompt's beams; those that end do, the others go on."""
        totals = scores + torch.tensor([beam.total for beam in search.beams])[:, None]
        best, places = totals.flatten().topk(2 * self.beams)
        goes_on: list[Beam] = []
        length = len(search.beams[0].tokens) + 1
        for rank, (total, place) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            parent, token = search.beams[place // scores.shape[1]], place % scores.shape[1]
            tokens = [*parent.tokens, token]
            if token == self.end or length == search.most:
                if rank < self.beams:  # what ends further behind is nobody's
                    score = total / length**self.length_penalty
                    search.ended.append(Hypothesis(tuple(tokens), score))
            elif len(goes_on) < self.beams:
                goes_on.append(Beam(tokens, total, self._shared(parent)))
        search.ended.sort(key=lambda beam: -beam.score)
        del search.ended[self.beams :]
        for beam in search.beams:
            self._release(beam)
        search.beams = goes_on
        # Transformers' own rule: whether the best could still beat the worst, as long as it is now.
        full = bool(goes_on) and len(search.ended) == self.beams
        if full and goes_on[0].total / length**self.length_penalty <= search.ended[-1].score:
            for beam in goes_on:
                self._release(beam)
            search.beams = []

    def _shared(self, parent: Beam) -> list[list[int]]:
        for pool, held in zip(self.pools, parent.blocks, strict=True):
            for block in held:
                pool.share(block)
        return [list(held) for held in parent.blocks]

    def _release(self, beam: Beam) -> None:
        for pool, held in zip(self.pools, beam.blocks, strict=True):
            for block in held:
                pool.release(block)


def _blocks_of(memory: GroupMemory) -> int:
    return next(iter(memory.caches.values())).num_blocks
