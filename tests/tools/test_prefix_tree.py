"""The replay engine's caches against a naive model: every token that a step sees, read from memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import CacheWindow
from polyattn.tools.replay.memory import taken_copies
from polyattn.tools.replay.pool import Pool
from polyattn.tools.replay.prefix_tree import PrefixTree
from polyattn.tools.replay.prompts import prompt_tokens
from polyattn.tools.replay.scheduler import Running, Scheduled, Scheduler
from polyattn.tools.replay.state_pool import StatePool
from polyattn.tools.replay.trace import Request, sampled


@st.composite
def prompts(draw: st.DrawFn) -> list[np.ndarray]:
    """Few distinct tokens, so that prompts agree, part within blocks, and end within others."""
    lists = draw(st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=8))
    return [np.array(tokens, np.int64) for tokens in lists]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(given=prompts(), size=st.integers(1, 4))
def test_finds_the_longest_prefix_by_tokens(given: list[np.ndarray], size: int) -> None:
    """Of all prompts but the last, which is looked up; each token is in the block that is named."""
    tree, content, fresh = PrefixTree(size), dict[int, list[int]](), 0
    for tokens in given[:-1]:
        blocks: list[int | None] = list(range(fresh, fresh + -(-len(tokens) // size)))
        fresh += len(blocks)
        tree.insert(tokens, blocks)
        for index, block in enumerate(blocks):
            assert block is not None
            content[block] = tokens[index * size : (index + 1) * size].tolist()
    asked = given[-1].tolist()
    match = tree.match(given[-1])
    found = len(match.blocks) * size + match.tail
    held = [*match.blocks, *([match.source] if match.tail else [])]
    assert [token for block in held for token in content[block]][:found] == asked[:found]
    known = [tokens.tolist() for tokens in given[:-1]]
    assert found == max(
        (n for n in range(len(asked) + 1) if any(k[:n] == asked[:n] for k in known)), default=0
    )


@dataclass
class Memory:
    """What each block of a pool holds, token by token, as (prompt or request, position, token)."""

    pool: Pool
    slots: np.ndarray

    def check_users(self, running: list[Running], index: int) -> None:
        users = Counter(b for s in running if s.held for b in s.held[index].blocks)
        allocator = self.pool.allocator
        for block in range(allocator.num_blocks):
            assert allocator.users(block) == users[block], "none leaked, none freed while used"
        assert allocator.num_used == len(users)

    def write(self, item: Scheduled, index: int, tokens: list[int]) -> None:
        held, size = item.sequence.held[index], self.pool.block_size
        for position in range(item.start, item.start + item.count):
            block = held.blocks[position // size - held.gone]
            assert self.pool.allocator.users(block) == 1, "nobody else reads what is written"
            self.slots[block, position % size] = tokens[position]

    def check_seen(self, item: Scheduled, index: int, tokens: list[int]) -> None:
        """Every key that the step's queries see, at the place that the compact row gives it."""
        held, size, window = item.sequence.held[index], self.pool.block_size, self.pool.window
        first = 0
        if window is not None:
            first = max(0, item.start - (window.window or 0) + 1)
            assert len(held.blocks) <= window.most_blocks(item.count)
        for position in range(item.start + item.count):
            if window is not None and window.sinks <= position < first:
                continue
            at = position // size
            block = held.blocks[at if at < held.head else at - held.gone]
            assert self.slots[block, position % size] == tokens[position]


@dataclass
class States:
    """Which tokens each slot's state stands for: all that were written to it, in order."""

    pool: StatePool
    slots: np.ndarray

    def check_users(self, running: list[Running], index: int) -> None:
        users = Counter(b for s in running if s.held for b in s.held[index].blocks)
        allocator = self.pool.allocator
        assert all(allocator.users(slot) == users[slot] for slot in range(allocator.num_blocks))

    def check_seen(self, item: Scheduled, index: int, tokens: list[int]) -> None:
        (slot,) = item.sequence.held[index].blocks
        assert self.slots[slot] == tuple(tokens[: item.start + item.count])

    def write(self, item: Scheduled, index: int, tokens: list[int]) -> None:
        (slot,) = item.sequence.held[index].blocks
        assert self.pool.allocator.users(slot) == 1 and slot not in self.pool.tree, "its own"
        assert item.start == 0 or self.slots[slot] == tuple(tokens[: item.start])
        self.slots[slot] = tuple(tokens[: item.start + item.count])


def serve(requests: list[Request], pools: list[Pool], budget: int, seqs: int) -> Scheduler:
    """Serve requests over memories that are really written, copied and read."""
    scheduler = Scheduler(requests, pools, budget, seqs)
    memories = [
        States(p, np.full(p.allocator.num_blocks, None, object))
        if isinstance(p, StatePool)
        else Memory(p, np.full((p.allocator.num_blocks, p.block_size), -1))
        for p in pools
    ]
    tokens = {
        sequence: prompt_tokens(sequence.request, index, 1 << 30, seed=0)
        + [(index + 1) << 40 | at for at in range(sequence.request.output)]
        for index, sequence in enumerate(scheduler.waiting)
    }
    while plan := scheduler.step():
        for index, memory in enumerate(memories):
            memory.check_users(scheduler.running, index)
        for index, copies in taken_copies(plan).items():
            slots = memories[index].slots
            slots[list(copies)] = slots[list(copies.values())]
        for index, memory in enumerate(memories):
            for item in plan:
                memory.write(item, index, tokens[item.sequence])
            for item in plan:
                memory.check_seen(item, index, tokens[item.sequence])
        scheduler.finish(plan)
    for index, memory in enumerate(memories):
        memory.check_users([], index)
    assert not scheduler.waiting and not scheduler.running
    return scheduler


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Requests whose hash blocks agree often, whole prompts asked for several times."""
    hash_block = draw(st.integers(1, 9))
    made = []
    for _ in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(0, 1), max_size=5))
        prompt = draw(st.integers(1, 30))
        request = Request(prompt, draw(st.integers(1, 9)), tuple(ids), hash_block)
        made += sampled([request], draw(st.sampled_from([1, 1, 1, 2, 5])))
    return draw(st.permutations(made))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    requests=traces(),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    window=st.tuples(st.integers(1, 12), st.integers(0, 6)),
    budget=st.integers(1, 24),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 12),
    snapshots=st.integers(0, 4),
)
def test_every_step_reads_its_own_tokens(
    requests: list[Request],
    sizes: tuple[int, int],
    window: tuple[int, int],
    budget: int,
    seqs: int,
    spare: int,
    snapshots: int,
) -> None:
    """A full pool and a windowed one, with just the room that the longest request needs, or more.

    With `snapshots` there are recurrent states, too, and as many slots more than sequences.
    """
    kept = CacheWindow(sizes[1], window[0], window[1])
    pools = []
    for size, windowed in ((sizes[0], None), (sizes[1], kept)):
        need = max(
            Pool(size, 1, windowed).most_blocks(r.prompt + r.output, budget) for r in requests
        )
        pools.append(Pool(size, need + spare, windowed))
    full = pools[0]

    def evicted(block: int) -> None:
        run = full.tree._runs[block]
        assert not run.children and run.blocks[-1] == block, "leaves go first"
        full.tree.remove(block)

    full.allocator._evicted = evicted
    if snapshots:
        pools.append(StatePool(max(sizes), seqs + snapshots))
    serve(requests, pools, budget, seqs)


def test_what_was_used_last_stays() -> None:
    """Room for two prompts and a block: the third takes the place of the one unused longest."""
    hashes = {"a": 1, "b": 2, "c": 3}
    requests = [Request(4, 1, (hashes[name],), 4) for name in "abacab"]
    scheduler, shared = Scheduler(requests, [Pool(2, 5)], 8, 1), []
    while plan := scheduler.step():
        shared += [item.sequence.shared for item in plan]
        scheduler.finish(plan)
    assert shared == [0, 0, 3, 0, 3, 0]


def test_states_are_kept_where_prompts_part() -> None:
    """The first keeps its last boundary, the second the place where it parts, the third begins there."""
    requests = [Request(8, 1, ids, 4) for ids in ((1, 2), (1, 3), (1, 4), (1, 2))]
    pools = [Pool(2, 64), StatePool(2, 1 + 8)]
    scheduler, steps = Scheduler(requests, pools, 16, 1), []
    while plan := scheduler.step():
        steps += [(item.sequence.shared, item.start, item.count) for item in plan]
        scheduler.finish(plan)
    assert steps == [
        (0, 0, 6), (0, 6, 2),
        (0, 0, 4), (0, 4, 2), (0, 6, 2),
        (4, 4, 2), (4, 6, 2),
        (6, 6, 2),
    ]  # fmt: skip


def test_who_waits_for_a_running_prefix_finds_its_state() -> None:
    """The first stops where the second parts from it, so nothing of what they share is computed twice."""
    requests = [Request(40, 1, (1, 2), 16), Request(40, 1, (1, 3), 16)]
    scheduler, steps = Scheduler(requests, [StatePool(4, 2 + 4)], 8, 2), []
    while plan := scheduler.step():
        steps += [(item.sequence.request.hash_ids[1], item.start) for item in plan]
        scheduler.finish(plan)
    assert min(start for which, start in steps if which == 3) == 16


def test_a_window_keeps_no_more_than_its_bound() -> None:
    """Long generation: the same few blocks go round, the sinks' stay where they are."""
    kept = CacheWindow(4, window=10, sinks=3)
    pool = Pool(4, 8, kept)
    scheduler = Scheduler([Request(9, 400)], [pool], 9, 1)
    most, sinks = 0, set()
    while plan := scheduler.step():
        blocks = plan[0].sequence.held[0].blocks
        most, sinks = max(most, len(blocks)), sinks | {blocks[0]}
        scheduler.finish(plan)
    assert most == kept.most_blocks() == -(-(10 + 3) // 4) + 1 and len(sinks) == 1
    assert pool.allocator.num_used == 0


@pytest.mark.parametrize("samples", [1, 4, 16, 64])
def test_samples_share_every_full_block(samples: int) -> None:
    """n samples of a prompt of 5 blocks and 3 tokens: the prompt is there once, its end n times."""
    pool = Pool(8, 512)
    scheduler = Scheduler(sampled([Request(43, 2)], samples), [pool], 128, 64)
    most = 0
    while plan := scheduler.step():
        most = max(most, pool.allocator.num_used)
        scheduler.finish(plan)
    assert most == 5 + samples
