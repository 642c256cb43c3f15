from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import Batch
from polyattn.errors import CacheError, SettingsError, TraceError
from polyattn.families.attention.reference import visible
from polyattn.families.attention.roofline import step_cost, visible_pairs
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.replay.blocks import BlockAllocator
from polyattn.tools.replay.pool import Pool
from polyattn.tools.replay.scheduler import Scheduler
from polyattn.tools.replay.trace import Request, read_trace, sampled


def run(requests: list[Request], blocks: int, size: int = 4, budget: int = 16, seqs: int = 8):  # type: ignore[no-untyped-def]
    pools = [Pool(size, blocks), Pool(2 * size, blocks)]
    scheduler = Scheduler(requests, pools, budget, seqs)
    generated, shared = 0, 0
    while plan := scheduler.step():
        assert sum(item.count for item in plan) <= budget
        held = [b for item in scheduler.running for b in item.held[0].blocks]
        if not requests[0].hash_ids:
            assert len(held) == len(set(held)), "a block belongs to one sequence"
        for item in plan:
            for pool, held_ in zip(pools, item.sequence.held, strict=True):
                assert len(held_.blocks) * pool.block_size >= item.start + item.count
            if item.start == item.sequence.shared:
                shared += item.sequence.shared
        kinds = [item.count == 1 and item.start > 0 for item in plan]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        generated += scheduler.finish(plan)
    assert all(pool.allocator.num_used == 0 for pool in pools), "every block came back"
    return scheduler, generated, shared


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12)), min_size=1, max_size=12))
def test_every_request_is_served(lengths: list[tuple[int, int]]) -> None:
    _, generated, _ = run([Request(*pair) for pair in lengths], blocks=20)
    assert generated == sum(output for _, output in lengths)


def test_a_full_cache_preempts_and_recovers() -> None:
    scheduler, generated, _ = run([Request(20, 30)] * 4, blocks=14)
    assert generated == 120 and scheduler.preemptions > 0


def test_equal_prefixes_are_shared() -> None:
    requests = [Request(40, 2, (1, 2, 3, 4, 5), 8) for _ in range(3)]
    _, generated, shared = run(requests, blocks=64, seqs=1)
    assert generated == 6
    assert shared == 2 * 39  # all but the last token, whose output is what the request is after


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(
        CacheError, match="request 1 needs 101 tokens, 26 blocks of 4, and the cache holds 10"
    ):
        run([Request(4, 1), Request(100, 1)], blocks=10)


def test_allocator_evicts_the_longest_unused() -> None:
    evicted: list[int] = []
    blocks = BlockAllocator(2, evicted.append)
    first, second = blocks.allocate(), blocks.allocate()
    blocks.keep(first)
    blocks.keep(second)
    blocks.release(first)
    blocks.release(second)
    assert blocks.num_free == 2 and not blocks.num_used
    blocks.share(first)
    blocks.release(first)  # used again: now the second is the older one
    assert blocks.allocate() == second and evicted == [second]
    with pytest.raises(CacheError, match="more often"):
        blocks.release(first)
    blocks.release(second)
    with pytest.raises(CacheError, match="nothing that could be shared"):
        blocks.share(second)


def test_samples_of_one_prompt_compute_it_once() -> None:
    """64 samples: every prompt token once, and for each but the first sample its last one again."""
    (request,) = read_one('{"input_length": 41, "output_length": 3, "samples": 64}')
    requests = sampled([request])
    assert len(requests) == 64 == len(sampled([Request(41, 3)], 64))
    scheduler, generated, shared = run(requests, blocks=256, seqs=64, budget=64)
    assert generated == 64 * 3 and shared == 63 * 40 and not scheduler.preemptions


def read_one(line: str) -> list[Request]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder, "t.jsonl")
        path.write_text(line)
        return read_trace(path)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "A,B\n1,2\n", "line 1: the header"),
        ("t.csv", "ContextTokens,GeneratedTokens\n5,6\n5,x\n", "line 3: '5,x'"),
        ("t.csv", "ContextTokens,GeneratedTokens\n0,6\n", "line 2: 0 prompt"),
        ("t.csv", "ContextTokens,GeneratedTokens\n", "holds no request"),
        ("t.jsonl", '{"input_length": 3, "output_length": 4}\n{"inp', "line 2: not JSON"),
        ("t.jsonl", '{"input_length": 3}', "line 1: output_length=None"),
        ("t.jsonl", '{"input_length": 3, "output_length": 4, "hash_ids": "x"}', "hash_ids"),
        ("t.jsonl", "[]", "must be a JSON object"),
        ("t.jsonl", '{"input_length": 3, "output_length": 4, "samples": 0}', "samples=0"),
    ],
)
def test_bad_traces_name_the_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        ("8q1s2k", [(1, 2048)] * 8),
        ("q2k", [(2048, 2048)]),
        ("2q2k_3q1s1k", [(2048, 2048)] * 2 + [(1, 1024)] * 3),
        ("q100s300", [(100, 300)]),
    ],
)
def test_batch_grammar(text: str, expect: list[tuple[int, int]]) -> None:
    assert parse_batch(text) == expect


@pytest.mark.parametrize("text", ["", "8", "q", "q5s3", "0q1s2", "q1k_", "q1m"])
def test_bad_batches_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="batch"):
        parse_batch(text)


@given(
    queries=st.integers(0, 30),
    keys=st.integers(0, 60),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 50),
    right=st.none() | st.integers(0, 50),
    sinks=st.integers(0, 70),
    chunk=st.none() | st.integers(1, 50),
)
def test_counted_operations_are_those_the_mask_leaves(
    queries: int, keys: int, causal: bool, window: int | None, right: int | None, sinks: int,
    chunk: int | None,
) -> None:  # fmt: skip
    """And the keys that are read are those that some query sees."""
    spec = LayerSpec(
        num_heads=1, head_size=8, causal=causal, sliding_window=window, chunk_size=chunk,
        window_right=None if causal else right, sink_tokens=sinks if window else 0, dtype="float32",
    )  # fmt: skip
    seen = visible(spec, queries, keys)
    pairs, read = int(seen.sum()), int(seen.any(0).sum())
    assert visible_pairs(spec, queries, keys) == pairs
    # 4 bytes a number: 8 of a key and 8 of a value, and as many of a query and its output.
    cost = step_cost(spec, Batch.from_lens([queries], [keys]))
    assert (cost.flops, cost.bytes) == (2 * pairs * 16, 4 * 16 * (read + queries))
