"""Continuous batching: who runs in the next step, within a token budget and the cache's room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, lcm

from polyattn.errors import CacheError
from polyattn.tools.replay.blocks import BlockAllocator
from polyattn.tools.replay.trace import Request


@dataclass
class Pool:
    """The blocks of the layers that share one block size and one kind of content."""

    block_size: int
    allocator: BlockAllocator


@dataclass(eq=False)
class Running:
    """A request in flight. `computed` tokens are in the cache; `blocks` has a list for each pool."""

    request: Request
    computed: int = 0
    shared: int = 0
    generated: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Tokens whose keys can be computed: the prompt and what was generated."""
        return self.request.prompt + self.generated

    @property
    def done(self) -> bool:
        """Whether every output token was made."""
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
        self,
        requests: Sequence[Request],
        pools: Sequence[Pool],
        budget: int,
        max_seqs: int,
        share_prefixes: bool = True,
    ):
        self.pools, self.budget, self.max_seqs = list(pools), budget, max_seqs
        self.waiting = deque(Running(request) for request in requests)
        self.running: list[Running] = []
        self.share_prefixes = share_prefixes
        self.preemptions = 0
        for index, request in enumerate(requests):
            self._check_fits(index, request)

    def _check_fits(self, index: int, request: Request) -> None:
        need = request.prompt + request.output
        for pool in self.pools:
            room = pool.allocator.num_blocks * pool.block_size
            if need > room:
                raise CacheError(
                    f"request {index} needs {need} tokens and the cache holds {room}; raise "
                    "--cache-gb, or lower --scale, --max-tokens or --layers"
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
        while (
            budget
            and self.waiting
            and self.waiting[0].request.arrival <= now
            and len(self.running) < self.max_seqs
            and self.preemptions == preempted  # one that just gave way doesn't come straight back
        ):
            sequence = self.waiting[0]
            self._share_prefix(sequence)
            self.running.append(sequence)
            used = self._chunk(sequence, budget, plan, may_preempt=False)
            if not used:
                self.running.pop()
                self._drop(sequence)
                break
            self.waiting.popleft()
            budget -= used
        # A preemption may have taken the blocks of one that was planned before.
        plan = [item for item in plan if item.sequence in self.running]
        return sorted(plan, key=lambda item: item.count != 1 or item.start == 0)

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
        count = min(budget, sequence.known - sequence.computed)
        if count <= 0 or sequence not in self.running:
            return 0
        if not self._grow(sequence, sequence.computed + count, may_preempt):
            return 0
        plan.append(Scheduled(sequence, sequence.computed, count))
        return count

    def _grow(self, sequence: Running, tokens: int, may_preempt: bool = True) -> bool:
        """Give a sequence the blocks for its first `tokens` tokens, all pools or none."""
        sequence.blocks = sequence.blocks or [[] for _ in self.pools]
        sequence.published = sequence.published or [0] * len(self.pools)
        while True:
            missing = [
                max(0, -(-tokens // pool.block_size) - len(blocks))
                for pool, blocks in zip(self.pools, sequence.blocks, strict=True)
            ]
            short = any(
                m > pool.allocator.num_free for m, pool in zip(missing, self.pools, strict=True)
            )
            if not short:
                break
            if not may_preempt or self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        for pool, blocks, count in zip(self.pools, sequence.blocks, missing, strict=True):
            blocks += [pool.allocator.allocate() for _ in range(count)]
        return True

    def _preempt(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self._drop(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _drop(self, sequence: Running) -> None:
        for pool, blocks in zip(self.pools, sequence.blocks, strict=False):
            for block in reversed(blocks):
                pool.allocator.release(block)
        sequence.blocks, sequence.published = [], []
        sequence.computed = sequence.shared = 0

    def _name(self, sequence: Running, block: int, size: int) -> tuple[int, int] | None:
        """Return what names the content of a cache block: the prefix up to its last token."""
        request = sequence.request
        last = ((block + 1) * size - 1) // request.hash_block
        whole = (last + 1) * request.hash_block <= request.prompt
        return (request.hash_ids[last], block) if whole and last < len(request.hash_ids) else None

    def _share_prefix(self, sequence: Running) -> None:
        """Take the cached blocks of the longest prefix that every pool still has."""
        if not (self.share_prefixes and sequence.request.hash_ids and self.pools):
            return
        # At least one token is left to compute: its output is what the request is after.
        length = sequence.request.prompt - 1
        for pool in self.pools:
            count = 0
            while (count + 1) * pool.block_size <= length:
                name = self._name(sequence, count, pool.block_size)
                if name is None or pool.allocator.find(name) is None:
                    break
                count += 1
            length = min(length, count * pool.block_size)
        length -= length % lcm(*(pool.block_size for pool in self.pools))
        sequence.blocks, sequence.published = [], []
        for pool in self.pools:
            blocks = []
            for index in range(length // pool.block_size):
                found = pool.allocator.find(self._name(sequence, index, pool.block_size))
                assert found is not None
                pool.allocator.share(found)
                blocks.append(found)
            sequence.blocks.append(blocks)
            sequence.published.append(len(blocks))
        sequence.computed = sequence.shared = length

    def _publish(self, sequence: Running) -> None:
        """Name the blocks that are now full of prompt, so that later requests find them."""
        if not (self.share_prefixes and sequence.request.hash_ids):
            return
        for index, pool in enumerate(self.pools):
            full = min(sequence.computed, sequence.request.prompt) // pool.block_size
            for block in range(sequence.published[index], full):
                name = self._name(sequence, block, pool.block_size)
                if name is not None:
                    pool.allocator.publish(sequence.blocks[index][block], name)
            sequence.published[index] = max(sequence.published[index], full)
