"""Unified Attention against the float64 reference: every mask, every phase, padded or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.hpu.steps import Step, pad, step
from polyattn_hpu import metadata, unified
from polyattn_hpu.buckets import EXACT, SLICE, Bucket, Rounding, phase
from torch import Tensor
from torch._dynamo.testing import CompileCounter

MASKS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 3},
    {"sliding_window": 3, "sink_tokens": 2},
    {"chunk_size": 3},
    {"chunk_size": 6, "sliding_window": 3, "sink_tokens": 2},
    {"causal": False},
    {"causal": False, "sliding_window": 3},
    {"causal": False, "sliding_window": 3, "sink_tokens": 2},
    {"causal": False, "chunk_size": 5},
    {"logit_soft_cap": 1.5},
    {"alibi": True},
    {"alibi": True, "logit_soft_cap": 1.5, "sliding_window": 5},
    {"v_head_size": 5},
    {"num_heads": 5, "num_kv_heads": 1},
]


def agree(made: Step, fresh: bool, rounding: Rounding) -> None:
    output, lse = made.unified(fresh, rounding)
    expected, expected_lse = made.reference()
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-12)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Sequences that share prefixes of random length, in any order, some without queries."""
    size = draw(st.sampled_from([1, 2, 4, 5]))
    count = draw(st.integers(1, 6))
    ids = iter(draw(st.permutations(range(60 * count))))
    prefix = [next(ids) for _ in range(draw(st.integers(0, 4)))]
    queries, contexts, table = [], [], []
    for _ in range(count):
        context, query = draw(st.integers(0, 20)), draw(st.integers(0, 9))
        common = min(draw(st.integers(0, len(prefix))), context // size)
        needed = -(-(context + query) // size)
        table.append(prefix[:common] + [next(ids) for _ in range(needed - common)])
        queries.append(query)
        contexts.append(context)
    spec = draw(st.sampled_from(MASKS))
    return step(queries, contexts, table, size, seed=draw(st.integers(0, 99)), **spec)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    made=steps(), fresh=st.booleans(), rounding=st.sampled_from([EXACT, Rounding(), Rounding(2)])
)
def test_random_steps(made: Step, fresh: bool, rounding: Rounding) -> None:
    if made.batch.num_tokens:
        agree(made, fresh, rounding)


def test_several_slices_and_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More queries than a slice, and shared and unique blocks in more pieces than one."""
    monkeypatch.setattr(unified, "SHARED_PRODUCTS", 6000)
    monkeypatch.setattr(unified, "UNIQUE_KEYS", 8)
    made = step(
        [SLICE + 7, 70, 1],
        [40, 0, 33],
        [list(range(140)), list(range(140, 158)), list(range(158, 167))],
        num_heads=2, num_kv_heads=1,
    )  # fmt: skip
    assert len(made.metadata().causal_masks) == 2
    assert made.metadata().causal_masks[0].shape == (SLICE, SLICE), "a slice ends with its queries"
    agree(made, True, EXACT)


@pytest.mark.parametrize("spec", [{}, {"alibi": True}, {"causal": False}], ids=str)
def test_a_slice_in_parts_without_kept_masks(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a long prefill is taken: with 128k queries and 32 heads a slice's scores are 8 GiB."""
    made = step([SLICE + 40, 70], [0, 9], [list(range(138)), list(range(138, 158))], **spec)
    whole = made.unified()
    monkeypatch.setattr(metadata, "KEPT_MASKS", 0)
    monkeypatch.setattr(unified, "SCORES", 4 * (SLICE + 110) * 100)
    assert not isinstance(made.metadata().causal_masks, tuple)
    assert [m.shape[0] for m in made.metadata().causal_masks] == [SLICE, 110]
    agree(made, True, EXACT)
    for scores in (unified.SCORES, 1):  # and a row at a time, where one is too wide
        monkeypatch.setattr(unified, "SCORES", scores)
        for found, expected in zip(made.unified(), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("expected", "queries", "contexts", "table"),
    [
        ("---", [0], [5], [[1, 2]]),
        ("c--", [5, 3], [0, 0], [[0, 1], [2]]),
        ("-s-", [1, 1], [7, 7], [[0, 1], [0, 1]]),
        ("--u", [1, 1], [6, 4], [[0, 1], [2, 3]]),
        ("cs-", [5], [8], [[0, 1, 2, 3]]),
        ("c-u", [5, 1], [0, 8], [[0, 1], [2, 3, 4]]),
        ("-su", [1, 1], [5, 6], [[0, 1], [0, 2]]),
        ("csu", [5, 1], [4, 5], [[0, 1, 2], [3, 4]]),
    ],
)  # fmt: skip
def test_the_eight_phases(
    expected: str, queries: list[int], contexts: list[int], table: list[list[int]]
) -> None:
    assert step(queries, contexts, table).metadata().bucket.phase == expected


@pytest.mark.parametrize(("window", "distinct"), [(None, 9), (6, 6)])
def test_the_cache_is_read_once(
    window: int | None, distinct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes read equal the distinct blocks in sight, though three sequences share two of them.

    Read are blocks 27, 21, 2 and 3, of the prefills only the context, and 10 to 14. With a window
    of 6, sequence 1 begins to see at 6, sequence 2 at 3, and sequence 4 at 12: not 10, 11 and 12.
    """
    made = step(
        [1, 1, 6, 9, 1],
        [9, 11, 8, 0, 17],
        [[27, 21, 2], [27, 21, 3], [27, 21, 4, 5], [6, 8, 9], [10, 11, 12, 13, 14]],
        sliding_window=window,
    )
    meta = made.metadata()
    assert meta.bucket.phase == "csu" and not meta.bucket.contiguous
    read: list[Tensor] = []
    fetch = unified.fetch

    def counting(stored: Tensor, blocks: Tensor | slice) -> Tensor:
        found = fetch(stored, blocks)
        read.append(found)
        return found

    monkeypatch.setattr(unified, "fetch", counting)
    made.unified()
    one_block = sum(stored[0].nbytes for stored in (made.cache.key, made.cache.value))
    assert sum(tensor.nbytes for tensor in read) == distinct * one_block


def test_a_block_at_two_places_is_two_entries() -> None:
    """Nothing forbids it: each place has positions of its own."""
    made = step([1, 2], [8, 8], [[0, 1, 2], [1, 0, 3]], sliding_window=7)
    assert sorted(made.metadata().shared_blocks.tolist()) == [0, 0, 1, 1]
    agree(made, True, EXACT)


def test_a_bucket_may_reach_beyond_the_cache() -> None:
    """Nine blocks, all of the cache, in a bucket of ten that is a slice of it."""
    made = step([1] * 9, [3] * 9, [[i] for i in range(9)])
    bucket = made.metadata(rounding=Rounding()).bucket
    assert bucket.contiguous and bucket.unique > made.cache.num_blocks
    agree(made, True, Rounding())


def test_equal_buckets_have_equal_shapes() -> None:
    """What a graph is compiled for: two steps of one bucket differ in values alone."""
    a = step([5, 1, 1], [8, 30, 6], [[0, 1, 2, 3], [20, 21, 22, 23, 24, 25, 26, 27], [40, 41]])
    b = step([6, 1, 1], [7, 32, 3], [[0, 1, 2, 3], [30, 31, 22, 23, 24, 25, 26, 27, 28], [42]])
    first, second = (made.metadata(rounding=Rounding(2)) for made in (a, b))
    assert first.exact != second.exact and first.bucket == second.bucket

    def shapes(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        if isinstance(value, tuple) and not isinstance(value, Bucket):
            return [shapes(v) for v in value]
        if hasattr(value, "__dataclass_fields__"):
            return {
                n: shapes(getattr(value, n)) for n in value.__dataclass_fields__ if n != "exact"
            }
        return value

    assert shapes(first) == shapes(second)


@given(size=st.integers(0, 10**6), steps=st.sampled_from([1, 2, 4, 8, 16]))
def test_rounding(size: int, steps: int) -> None:
    rounded = Rounding(steps)(size)
    assert size <= rounded <= size + max(0, size - 1) // steps
    assert Rounding(steps)(rounded) == rounded
    assert EXACT(size) == size
    mantissa = rounded
    while mantissa and mantissa % 2 == 0:
        mantissa //= 2
    assert mantissa < 2 * steps


def test_phase_strings_and_products() -> None:
    assert {phase(c, s, u) for c in (0, 1) for s in (0, 1) for u in (0, 1)} == {
        "---", "c--", "-s-", "--u", "cs-", "c-u", "-su", "csu",
    }  # fmt: skip
    assert Bucket("--u", 64, 0, 10, 64).products(16) == 160
    assert Bucket("-s-", 3, 10, 0, 4).products(16) == 480
    causal = Bucket("c--", 2 * SLICE + 3, 0, 0, 4).products(16)
    assert causal == SLICE * SLICE + SLICE * 2 * SLICE + 3 * (2 * SLICE + 3)


def test_steps_of_one_bucket_are_one_graph() -> None:
    """Compiled whole, without a break: nothing asks a tensor for its values, as on Gaudi it mustn't."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(unified.attend, backend=counter, fullgraph=True, dynamic=False)
    same = [
        step(
            [5, 1, 1],
            [8, 30, 6],
            [[0, 1, 2, 3], [20, 21, 22, 23, 24, 25, 26, 27], [40, 41]],
            num_blocks=50,
        ),
        step(
            [6, 1, 1],
            [7, 32, 3],
            [[0, 1, 2, 3], [30, 31, 22, 23, 24, 25, 26, 27, 28], [42]],
            num_blocks=50,
        ),
    ]
    other = step([1, 1], [7, 7], [[0, 1], [0, 1]])
    graphs = []
    for made in (*same, other):
        meta = made.metadata(rounding=Rounding(2))
        inputs = (
            meta, pad(made.query, meta.bucket.query), pad(made.key, meta.bucket.own_rows),
            pad(made.value, meta.bucket.own_rows), (made.cache.key, made.cache.value),
            made.scoring(),
        )  # fmt: skip
        output, _ = unified.normalize(compiled(*inputs))
        torch.testing.assert_close(output[: made.batch.num_tokens], made.reference()[0])
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 2]
