"""What a window has left changes nothing: masks, distances and in-cache positions over what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import CacheWindow, LayerSpec, Role
from polyattn.errors import SpecError
from polyattn.families.attention.reference import attend, visible
from polyattn.spec.rope import RopeSpec

ROPE = RopeSpec(rotary_size=4)


@st.composite
def steps(draw: st.DrawFn) -> tuple[LayerSpec, int, int, int]:
    """A layer with a window or chunks, its block size, a context and new tokens."""
    kind = draw(st.sampled_from(["window", "chunk", "both", "ALiBi", "cache"]))
    window = None if kind == "chunk" else draw(st.integers(1, 20))
    spec = LayerSpec(
        num_heads=2, num_kv_heads=1, head_size=4, dtype="float64", sliding_window=window,
        sink_tokens=draw(st.integers(0, 9)) if kind in ("window", "cache") else 0,
        chunk_size=draw(st.integers(1, 12)) if kind in ("chunk", "both") else None,
        alibi=kind == "ALiBi",
        rope=RopeSpec(rotary_size=4, positions="cache") if kind == "cache" else None,
    )  # fmt: skip
    return spec, draw(st.integers(1, 7)), draw(st.integers(0, 60)), draw(st.integers(1, 9))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(step=steps())
def test_what_has_gone_is_not_missed(step: tuple[LayerSpec, int, int, int]) -> None:
    spec, size, context, queries = step
    kept, length = CacheWindow.of(spec, size), context + queries
    assert kept is not None
    gone = kept.gone(context)
    left = torch.tensor([t for t in range(length) if t // size not in gone])
    mask = visible(spec, queries, length)
    assert mask.sum() == mask[:, left].sum(), "no query sees what has gone"
    assert torch.equal(mask[:, left], visible(spec, queries, len(left)))
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(n, h, 4, generator=generator, dtype=torch.float64)
        for n, h in ((queries, 2), (length, 1), (length, 1))
    )
    whole, part = attend(spec, query, key, value), attend(spec, query, key[left], value[left])
    for one, other in zip(whole, part, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    blocks = -(-len(left) // size)
    assert blocks <= kept.most_blocks(queries)
    if queries == 1 and kept.chunk is None:
        assert blocks <= kept.head + -(-(kept.window or 0) // size) + 1


def test_the_bound_of_a_streaming_layer() -> None:
    spec = LayerSpec(num_heads=1, head_size=64, sliding_window=1024, sink_tokens=4)
    kept = CacheWindow.of(spec, 16)
    assert kept is not None and kept.most_blocks() == -(-(1024 + 4) // 16) + 1
    assert kept.gone(100_000) == range(1, (100_000 - 1023) // 16)
    assert kept.gone(np.int64(100_000)) == kept.gone(100_000)
    for position in (1.5, -1, True, None):
        with pytest.raises(SpecError, match=f"position={position} must be an integer, 0 or more"):
            kept.gone(position)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="queries=1.5 must be a positive integer"):
        kept.most_blocks(1.5)  # type: ignore[arg-type]


PLAIN = LayerSpec(num_heads=1, head_size=64)
WINDOW = PLAIN.replace(sliding_window=8)


@pytest.mark.parametrize(
    "spec",
    [
        PLAIN,
        PLAIN.replace(role=Role.ENCODER_ONLY, cached=False, causal=False, sliding_window=8),
        WINDOW.replace(sink_tokens=2, alibi=True),
        WINDOW.replace(sink_tokens=2, chunk_size=16),
        WINDOW.replace(variant="relative_bias"),
        WINDOW.replace(mask="custom"),
        WINDOW.replace(
            rope=RopeSpec(rotary_size=64, scaling="dynamic", factor=2.0, original_length=32)
        ),
    ],
)
def test_everything_is_kept_where_places_count(spec: LayerSpec) -> None:
    assert CacheWindow.of(spec, 16) is None


@pytest.mark.parametrize(
    "masks",
    [
        {"sliding_window": 2**31 - 1},
        {"chunk_size": 2**31 - 1},
        {"sliding_window": 8, "sink_tokens": 2**31 - 1},
    ],
)
def test_everything_is_kept_where_nothing_is_hidden(masks: dict[str, int]) -> None:
    assert CacheWindow.of(LayerSpec(num_heads=1, head_size=64, **masks), 16) is None


def test_a_limit_that_hides_nothing_bounds_nothing() -> None:
    """Blocks leave by the window alone, and no kept token is beyond a chunk."""
    base = LayerSpec(num_heads=1, head_size=64, sliding_window=40)
    assert CacheWindow.of(base.replace(chunk_size=2**31 - 1), 16) == CacheWindow(16, 40)
    chunks = base.replace(sliding_window=2**31 - 1, chunk_size=64)
    assert CacheWindow.of(chunks, 16) == CacheWindow(16, None, chunk=64)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None])
def test_bad_block_sizes_are_refused(size: object) -> None:
    with pytest.raises(SpecError, match="block_size="):
        CacheWindow.of(WINDOW, size)  # type: ignore[arg-type]
