"""Sequences whose first given key stands later in its text: chunks, kept tokens, distances, angles."""

from __future__ import annotations

import polyattn
import pytest
import torch
from formulas import attend
from polyattn import Batch, LayerSpec
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.families.attention.rope import rotate
from polyattn.kernel import BatchError
from polyattn.spec.rope import RopeSpec
from torch import Tensor

QUERIES, KEYS, FIRSTS = (1, 33, 0, 5, 17), (40, 33, 4, 3, 60), (0, 7, 3, 50, 24)
HEADS, SIZE = 4, 16


def tensors(*, rows: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    if rows is not None:
        shapes = (rows, 9, HEADS, SIZE), (rows, 31, 2, SIZE), (rows, 31, 2, SIZE)
    else:
        shapes = (sum(QUERIES), HEADS, SIZE), (sum(KEYS), 2, SIZE), (sum(KEYS), 2, SIZE)  # type: ignore[assignment]
    return [torch.randn(*shape) for shape in shapes]


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, first: int, chunk: int | None, window: int | None,
    kept: int, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence by positions in the text, in float64; the LSE (queries, heads)."""
    at = torch.arange(first, first + len(key))
    place = torch.arange(first + len(key) - len(query), first + len(key))[:, None]
    seen = at <= place
    if chunk is not None:
        seen = seen & (at // chunk == place // chunk)
    if window is not None:
        seen = seen & ((place - at < window) | (at < kept))
    bias = None if slopes is None else slopes.double()[:, None, None] * (at - place)
    out, lse = attend(query, key, value, seen, bias=bias)
    return out, lse.T


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA", "VANILLA"])
@pytest.mark.parametrize(
    "limits", [(24, None, 0), (8, None, 0), (None, 21, 3), (None, 5, 40), (16, 9, 3)], ids=str
)
def test_packed(limits: tuple[int | None, int | None, int], backend: str) -> None:
    query, key, value = tensors()
    chunk, window, kept = limits
    out, lse = polyattn.attention(
        query, key, value, causal=True, chunk_size=chunk, sliding_window=window, sink_tokens=kept,
        query_lens=QUERIES, key_lens=KEYS, first_positions=FIRSTS, return_lse=True, backend=backend,
    )  # fmt: skip
    each = zip(query.split(QUERIES), key.split(KEYS), value.split(KEYS), FIRSTS, strict=True)
    wanted = [by_hand(q, k, v, first, *limits) for q, k, v, first in each if len(q)]
    torch.testing.assert_close(out, torch.cat([w[0] for w in wanted]).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, torch.cat([w[1] for w in wanted]).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limits", [(16, None, 0), (None, 7, 4)], ids=str)
def test_dense_rows_as_whole_texts(limits: tuple[int | None, int | None, int]) -> None:
    """What earlier keys can't change: the same texts with and without them."""
    query, key, value = tensors(rows=3)
    chunk, window, kept = limits
    asked = {"causal": True, "chunk_size": chunk, "sliding_window": window, "sink_tokens": kept}
    firsts = (16, 32, 160) if chunk else (4, 9, 100)
    out = polyattn.attention(query, key, value, first_positions=firsts, **asked)  # type: ignore[arg-type]
    for row, first in enumerate(firsts):
        before = torch.randn(first, 2, SIZE) if chunk else torch.randn(first, 2, SIZE) - 100
        whole = [torch.cat([before, t[row]])[None] for t in (key, value)]
        if not chunk:  # kept first tokens that were not given count for nothing
            asked = asked | {"sink_tokens": 0}
        alone = polyattn.attention(query[row : row + 1], *whole, **asked)  # type: ignore[arg-type]
        torch.testing.assert_close(out[row], alone[0], rtol=1e-5, atol=1e-5)


def test_alibi_goes_by_distances() -> None:
    query, key, value = tensors()
    out = polyattn.attention(
        query, key, value, causal=True, alibi_slopes=alibi_slopes(HEADS), sliding_window=9,
        sink_tokens=3, query_lens=QUERIES, key_lens=KEYS, first_positions=FIRSTS, backend="TORCH_SDPA",
    )  # fmt: skip
    each = zip(query.split(QUERIES), key.split(KEYS), value.split(KEYS), FIRSTS, strict=True)
    wanted = [by_hand(*qkv, None, 9, 3, alibi_slopes(HEADS))[0] for (*qkv,) in each if len(qkv[0])]
    torch.testing.assert_close(out, torch.cat(wanted).float(), rtol=1e-5, atol=1e-5)


def test_a_layer_rotates_by_places_in_the_text() -> None:
    """Dynamic NTK goes by the whole text's length: angles differ, not their differences alone."""
    rope = RopeSpec(rotary_size=SIZE, scaling="dynamic", factor=2.0, original_length=16)
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=2, head_size=SIZE, dtype="float32", cached=False, rope=rope
    )
    query, key, value = tensors()
    layer = polyattn.Attention(spec, rotate=True)
    batch = Batch.from_lens(QUERIES, KEYS, first_positions=FIRSTS)
    out = layer(query, key, value, None, layer.group.plan(batch))
    turned_queries, turned_keys = [], []
    each = zip(query.split(QUERIES), key.split(KEYS), FIRSTS, strict=True)
    for q, k, first in each:
        end = first + len(k)
        places = torch.arange(end - len(q), end)
        turned_queries.append(rotate(q, places.clamp(min=0), rope, end))
        turned_keys.append(rotate(k, torch.arange(first, end), rope, end))
    wanted = polyattn.attention(
        torch.cat(turned_queries).float(), torch.cat(turned_keys).float(), value, causal=True,
        query_lens=QUERIES, key_lens=KEYS,
    )  # fmt: skip
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_refused() -> None:
    given = LayerSpec(num_heads=HEADS, head_size=SIZE, dtype="float32", cached=False)
    for name in ("first_positions", "key_starts"):
        with pytest.raises(BatchError, match=f"{name}=.* must name one place, 0 to 2147483647"):
            Batch.from_lens([3], [3], **{name: [2**31]})
    with pytest.raises(BatchError, match="first_positions=.* must name one place, 0 to"):
        Batch.from_lens([1, 2], [1, 2], first_positions=[3])
    with pytest.raises(BatchError, match="first_positions=.* must name one place, 0 to"):
        Batch.from_lens([1], [1], first_positions=[-1])
    masked = polyattn.LayerGroup(given.replace(mask="custom", causal=False))
    seen = polyattn.CustomMask.pack([torch.ones(1, 1, dtype=torch.bool)])
    with pytest.raises(BatchError, match="first_positions beside mask='custom'"):
        masked.plan(Batch.from_lens([1], [1], first_positions=[3], mask=seen))
    cached = polyattn.LayerGroup(LayerSpec(num_heads=HEADS, head_size=SIZE, dtype="float32"))
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(BatchError, match="first_positions are for keys that are passed whole"):
        cached.plan(Batch([0, 1], [1], table, first_positions=[3]))
    query, key, value = tensors(rows=1)
    with pytest.raises(BatchError, match="first_positions.* are left out beside it"):
        polyattn.attention(
            query, key, value, mask=torch.ones(1, 1, 9, 31, dtype=torch.bool), first_positions=[1]
        )


def test_some_sequences_have_their_own_places() -> None:
    some = Batch.from_lens(QUERIES, KEYS, first_positions=FIRSTS).part([1, 3])
    assert some.first_positions == [7, 50]
    assert some.key_starts == [40, 40 + 33 + 4]


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA"])
def test_a_ring_of_pages(backend: str) -> None:
    """A window's pages are written anew in turn: a block table that repeats them is all that takes."""
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=2, head_size=SIZE, dtype="float32", sliding_window=9,
        block_size=4,
    )  # fmt: skip
    layer = polyattn.Attention(polyattn.LayerGroup(polyattn.select(spec, "cpu", backend=backend)))
    ring, whole = layer.group.allocate_cache(8), layer.group.allocate_cache(24)
    torch.manual_seed(0)
    lens = [0, 0]
    for count in (4, 4, 3, 1, 1, 1, 4, 1, 2, 4, 4, 1, 1):
        tokens = [torch.randn(2 * count, heads, SIZE) for heads in (HEADS, 2, 2)]
        lens = [n + count for n in lens]
        places = torch.arange(12, dtype=torch.int32)
        found = []
        for cache, table in (
            (ring, torch.stack([places % 4, 4 + places % 4])),
            (whole, torch.stack([places, 12 + places])),
        ):
            batch = Batch.from_lens([count] * 2, lens, table, 4)
            found.append(layer(*tokens, cache, layer.group.plan(batch)))
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert lens[0] > 16, "the ring was written anew"
