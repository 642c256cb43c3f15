"""Continuous batching: which requests run next, within a token budget and the cache's room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from polyattn.errors import CacheError
from polyattn.tools.replay.pool import Held, Pool
from polyattn.tools.replay.prefix_tree import Tokens, count_alike
from polyattn.tools.replay.prompts import PromptNames
from polyattn.tools.replay.trace import Request


@dataclass(eq=False)
class Running:
    """A request in flight. `computed` tokens are in the cache, `held` is what it has of each pool.

    `names` stand for the prompt's tokens where others may share them; the first `published` can be
    found. Its chunks end at `stops`, so that a recurrence's state is kept there.
    """

    request: Request
    computed: int = 0
    shared: int = 0
    generated: int = 0
    held: list[Held] = field(default_factory=list)
    published: int = 0
    names: Tokens | None = None
    stops: set[int] = field(default_factory=set)

    @property
    def known(self) -> int:
        """Tokens whose keys can be computed: the prompt and generated tokens."""
        return self.request.prompt + self.generated

    @property
    def done(self) -> bool:
        """Whether the request has all its output tokens."""
        return self.generated >= self.request.output


@dataclass(frozen=True)
class Scheduled:
    """A sequence's share of a step: `count` new tokens after `start` cached ones."""

    sequence: Running
    start: int
    count: int

    @property
    def generates(self) -> bool:
        """Whether the step brings the sequence's next token: all that is known is computed then."""
        return self.start + self.count == self.sequence.known


class Scheduler:
    """Decodes first, then prefill in chunks, in order of arrival.

    When the cache is full, the request that came last gives its blocks back and starts over.
    """

    def __init__(
        self, requests: Sequence[Request], pools: Sequence[Pool], budget: int, max_seqs: int
    ):
        self.pools, self.budget, self.max_seqs = list(pools), budget, max_seqs
        self.waiting = deque(Running(request) for request in requests)
        self.running: list[Running] = []
        self.names = PromptNames() if self.pools else None
        self.boundary = max((pool.block_size for pool in self.pools), default=1)
        self.preemptions = 0
        for index, request in enumerate(requests):
            self._check_fits(index, request)

    def _check_fits(self, index: int, request: Request) -> None:
        tokens = request.prompt + request.output
        for pool in self.pools:
            need = pool.most_blocks(tokens, self.budget)
            if need > pool.allocator.num_blocks:
                raise CacheError(
                    f"request {index} needs {tokens} tokens, {need} blocks of {pool.block_size}, and "
                    f"the cache holds {pool.allocator.num_blocks}; raise --cache-gb, or lower "
                    "--scale, --max-tokens or --layers"
                )

    def step(self, now: float = inf) -> list[Scheduled]:
        """Return the next step at the time `now`, decodes first; empty when there is nothing to do."""
        budget, preempted = self.budget, self.preemptions
        plan: list[Scheduled] = []
        decodes = [s for s in self.running if s.known - s.computed == 1 and s.computed > 0]
        prefills = [s for s in self.running if s not in decodes]
        for sequence in decodes:
            if budget and sequence in self.running and self._grow(sequence, sequence.known):
                plan.append(Scheduled(sequence, sequence.computed, 1))
                budget -= 1
        for sequence in prefills:
            budget -= self._chunk(sequence, budget, plan)
        if self.preemptions == preempted:  # one that just gave way doesn't come straight back
            self._admit(now, budget, plan)
        # A preemption may have taken the blocks of one that was planned before.
        plan = [item for item in plan if item.sequence in self.running]
        return sorted(plan, key=lambda item: item.count != 1 or item.start == 0)

    def _admit(self, now: float, budget: int, plan: list[Scheduled]) -> None:
        """Start those that wait, in order; one whose prefix is just being computed lets others pass."""
        for sequence in list(islice(self.waiting, self.max_seqs)):
            if not budget or len(self.running) >= self.max_seqs or sequence.request.arrival > now:
                return
            if not self._share_prefix(sequence):
                continue
            self.running.append(sequence)
            used = self._chunk(sequence, budget, plan, may_preempt=False)
            if not used:
                self.running.pop()
                self._drop(sequence)
                return
            self.waiting.remove(sequence)
            budget -= used

    def finish(self, plan: Sequence[Scheduled]) -> int:
        """Account for a step that ran; returns how many tokens it generated."""
        generated = 0
        for item in plan:
            sequence = item.sequence
            generates = item.generates
            sequence.computed += item.count
            self._publish(sequence)
            if generates:
                sequence.generated += 1
                generated += 1
            if sequence.done:
                self.running.remove(sequence)
                self._drop(sequence)
        return generated

    def _chunk(
        self, sequence: Running, budget: int, plan: list[Scheduled], may_preempt: bool = True
    ) -> int:
        count = self._whole_chunk(sequence, min(budget, sequence.known - sequence.computed))
        if count <= 0 or sequence not in self.running:
            return 0
        if not self._grow(sequence, sequence.computed + count, may_preempt):
            return 0
        plan.append(Scheduled(sequence, sequence.computed, count))
        return count

    def _whole_chunk(self, sequence: Running, count: int) -> int:
        """Return how many of the next `count` tokens to compute: to a stop, else to a boundary."""
        start, end = sequence.computed, sequence.computed + count
        left = [stop for stop in sequence.stops if stop > start]
        if left and min(left) > end:
            floor = end - end % self.boundary
            return (floor if floor > start else end) - start
        return min(left, default=end) - start

    def _grow(self, sequence: Running, tokens: int, may_preempt: bool = True) -> bool:
        """Give a sequence the blocks for its first `tokens` tokens, all pools or none."""
        sequence.held = sequence.held or [Held(pool.head) for pool in self.pools]
        for pool, held in zip(self.pools, sequence.held, strict=True):
            pool.trim(held, sequence.computed)
        while True:
            pairs = list(zip(self.pools, sequence.held, strict=True))
            missing = [pool.missing(held, tokens) for pool, held in pairs]
            if all(
                m <= pool.allocator.num_free for m, pool in zip(missing, self.pools, strict=True)
            ):
                break
            if not may_preempt or self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        for (pool, held), count in zip(pairs, missing, strict=True):
            pool.grow(held, count)
        return True

    def _preempt(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self._drop(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _drop(self, sequence: Running) -> None:
        for pool, held in zip(self.pools, sequence.held, strict=False):
            pool.release(held)
        sequence.held, sequence.published, sequence.stops = [], 0, set()
        sequence.computed = sequence.shared = 0

    def _share_prefix(self, sequence: Running) -> bool:
        """Take the cached blocks of a prompt's leading tokens. Returns False if waiting is better."""
        if self.names is None:
            return True
        if sequence.names is None:
            sequence.names = self.names.of(sequence.request)
        names = sequence.names
        if names is None:
            return True
        # At least one token is left to compute, because the request needs its output.
        limit = min(sequence.request.prompt, sequence.known - 1)
        matches = [pool.tree.match(names) for pool in self.pools]
        length, before = limit, -1
        while length != before:  # what one pool lacks, none can use
            before = length
            for pool, match in zip(self.pools, matches, strict=True):
                length = min(length, pool.usable(match, length))
        if self._comes(names[:limit], length):
            return False
        held: list[Held] = []
        for pool, match in zip(self.pools, matches, strict=True):
            share = pool.take(match, length)
            if share is None:  # then there is none for the sequence's next token either
                for earlier, earlier_share in zip(self.pools, held, strict=False):
                    earlier.release(earlier_share)
                return True
            held.append(share)
        sequence.held, sequence.computed, sequence.shared = held, length, length
        pairs = zip(self.pools, matches, strict=True)
        sequence.stops = {stop for pool, match in pairs for stop in pool.stops(match, limit)}
        return True

    def _comes(self, names: Tokens, length: int) -> bool:
        """Whether a running prefill computes a block or more of what is not cached yet.

        One whose states are kept stops where the two part; what lies behind it has no state there.
        """
        least = length + self.boundary
        for other in self.running if len(names) >= least else ():
            if other.names is None or other.computed >= other.request.prompt:
                continue
            alike = count_alike(other.names, names)
            end = alike - alike % self.boundary
            if alike < least or (other.stops and other.computed >= end):
                continue
            if other.stops:
                other.stops.add(end)
            return True
        return False

    def _publish(self, sequence: Running) -> None:
        """Publish a prompt's cached blocks to later requests: full ones, and at its end all of them."""
        prompt = sequence.request.prompt
        if sequence.names is None or not self.pools or sequence.published == prompt:
            return
        for pool, held in zip(self.pools, sequence.held, strict=True):
            count = pool.whole(sequence.computed, prompt)
            if count > sequence.published:
                pool.publish(held, sequence.names[:count])
        sequence.published = min(sequence.computed, prompt)
