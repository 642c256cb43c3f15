"""What do buckets cost over the bundled traces? Padded work, and how many graphs are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from polyattn import LayerSpec
from polyattn.tools.cli.models import bundled
from polyattn.tools.replay.pool import Pool
from polyattn.tools.replay.scheduler import Scheduler
from polyattn.tools.replay.trace import read_trace
from polyattn_hpu.attention import ROUNDING
from polyattn_hpu.buckets import Bucket
from polyattn_hpu.metadata import Metadata, build

LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
CACHE_TOKENS = 1 << 18


def replay(
    trace: str, block_size: int, budget: int = 2048, max_seqs: int = 64
) -> Iterator[Metadata]:
    """Schedule a trace as `polyattn run` does; yield each step's metadata."""
    requests = read_trace(bundled(trace))
    pool = Pool(block_size, CACHE_TOKENS // block_size)
    scheduler = Scheduler(requests, [pool], budget, max_seqs)
    while plan := scheduler.step():
        rows = [item.sequence.held[0].blocks for item in plan]
        table = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = row
        yield build(
            LLAMA, [item.count for item in plan], [item.start + item.count for item in plan],
            table, block_size, rounding=ROUNDING,
        )  # fmt: skip
        scheduler.finish(plan)


@pytest.mark.parametrize(
    ("trace", "block_size"),
    [
        pytest.param("azure_conversation.csv", 16, marks=pytest.mark.slow),
        ("azure_conversation.csv", 128),
        pytest.param("mooncake_conversation.jsonl", 128, marks=pytest.mark.sweep),
    ],
)
def test_padding_and_graphs(trace: str, block_size: int) -> None:
    """Padded work is at most 1.3 times the real work; a graph serves more than three steps.

    Work is what the parts multiply, products of a query token and a key; real: at the step's own
    sizes, padded: at its bucket's.
    """
    real = padded = steps = 0
    graphs: Counter[Bucket] = Counter()
    shapes: set[Bucket] = set()
    for meta in replay(trace, block_size):
        real += meta.exact.products(block_size)
        padded += meta.bucket.products(block_size)
        graphs[meta.bucket] += 1
        shapes.add(meta.exact)
        steps += 1
    print(
        f"{trace}, blocks of {block_size}: {steps} steps of {len(shapes)} shapes in {len(graphs)} "
        f"graphs, padded work {padded / real:.3f} times the real"
    )
    assert padded <= 1.3 * real
    assert 3 * len(graphs) < steps
