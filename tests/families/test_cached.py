"""Attention over a caller's own cache, beside softmax written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from formulas import attend, in_window
from polyattn.calls.caller_cache import CallerCache, NewKeys, RotaryTables, attend_cached
from polyattn.calls.plans import CallOptions
from polyattn.calls.views import joined_pages
from polyattn.errors import CacheError, PolyattnError
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.selection.cache_format import CacheFormat
from torch import Tensor

HEADS, SIZE = 4, 16


def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of one sequence, (tokens, heads, size), in float64."""
    return attend(query, key, value, in_window(len(query), len(key), -1, 0))[0]


def turned(tokens: Tensor, turns: RotaryTables, positions: range) -> Tensor:
    """Rotate pairs of the first and the second half of 8 elements, by complex numbers."""
    at = list(positions)
    turn = torch.complex(turns.cos[at], turns.sin[at]).to(torch.complex128)[:, None]
    pairs = torch.complex(tokens[..., :4].double(), tokens[..., 4:8].double()) * turn
    return torch.cat([pairs.real, pairs.imag, tokens[..., 8:].double()], -1)


@pytest.mark.parametrize("form", ["pages", "rows", "rows in another order, with gaps before"])
@pytest.mark.parametrize("new_lens", [[2, 2, 2], [3, 0, 1]], ids=["alike", "ragged"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_new_tokens(form: str, new_lens: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before, counts = [5, 30, 17], [max(n, 1) for n in new_lens]
    caches = torch.randn(2, 12, 16, 2, SIZE) if form == "pages" else torch.randn(2, 5, 64, 2, SIZE)
    rows, gaps = [0, 1, 2], [0, 0, 0]
    table = torch.randperm(12).view(3, 4).int() if form == "pages" else None
    given: dict[str, Any] = {"block_table": table}
    if "order" in form:
        rows, gaps = [4, 0, 2], [3, 0, 7]
        given |= {"rows": torch.tensor(rows).int(), "starts": torch.tensor(gaps).int()}

    def held(row: int, storage: Tensor) -> Tensor:
        if table is not None:
            return storage[:, table[row].long()].flatten(1, 2)
        return storage[:, rows[row]].clone()

    angles = torch.randn(64, 4)
    turns = RotaryTables(angles.cos(), angles.sin(), "neox")
    query = torch.randn(sum(counts), HEADS, SIZE)
    new = NewKeys(
        torch.randn(sum(new_lens), 2, SIZE), torch.randn(sum(new_lens), 2, SIZE), new_lens
    )
    wanted = [held(row, caches) for row in range(3)]
    out, lse = attend_cached(
        query, counts, CallerCache(*caches, **given), torch.tensor(before, dtype=dtype),
        CallOptions(causal=True, needs_lse=True), new=new, turns=turns,
    )  # fmt: skip
    assert lse is not None and lse.shape == (sum(counts), HEADS)
    queries, keys, values = query.split(counts), new.key.split(new_lens), new.value.split(new_lens)
    outs = out.split(counts)
    for row, (length, count) in enumerate(zip(before, new_lens, strict=True)):
        end = length + count
        wanted[row][0, length:end] = turned(keys[row], turns, range(length, end)).float()
        wanted[row][1, length:end] = values[row]
        torch.testing.assert_close(held(row, caches), wanted[row])
        rotated = turned(queries[row], turns, range(length, length + counts[row]))
        own = expected(rotated, *wanted[row][:, gaps[row] : end])
        torch.testing.assert_close(outs[row].double(), own, rtol=1e-5, atol=1e-5)


def test_one_length_for_all_and_none() -> None:
    caches, query = torch.randn(2, 3, 32, 2, SIZE), torch.randn(3, HEADS, SIZE)
    for lens, count in ((7, 7), (None, 32), (torch.full((3,), 9), 9)):
        out, _ = attend_cached(query, [1] * 3, CallerCache(*caches), lens, CallOptions(causal=True))
        wanted = [expected(query[row : row + 1], *caches[:, row, :count]) for row in range(3)]
        torch.testing.assert_close(out.double(), torch.cat(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lens", "more", "match"),
    [(31, {}, r"cache_seqlens\[0\]=31 and 2 new tokens: the cache has room for 32"),
     (torch.tensor([1, 33]), {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
      r"cache_seqlens\[1\]=33 and 2 new tokens: block_table has 2 pages"),
     (None, {}, "cache_seqlens is missing"),
     (3, {"block_table": torch.zeros(2, 2, dtype=torch.int32), "starts": torch.tensor([0, 1])},
      "left padding. go with dense rows"),
     (torch.tensor([1, -1]), {}, r"cache_seqlens\[1\]=-1"),
     (torch.tensor([1]), {}, r"cache_seqlens is \(1,\); it is a number, or a tensor \(2,\)"),
     ([1, 2], {}, "cache_seqlens is a list"),
     (1, {"rows": torch.tensor([0, 2])}, r"rows\[1\]=2: the cache has 2 rows"),
     (1, {"starts": torch.tensor([0, 4])}, r"starts\[1\]=4 \(left padding\) is outside its 3 tokens"),
     (1, {"rows": torch.tensor([0])}, r"rows of the cache is \(1,\)")],
    ids=["no room", "no page", "no lengths", "gaps before pages", "negative", "other count", "a list",
         "no such row", "gap", "other rows"],
)  # fmt: skip
def test_what_is_wrong_changes_nothing(lens: Any, more: dict[str, Any], match: str) -> None:
    page = 17 if "block_table" in more else 32
    caches = torch.randn(2, 2, page, 2, SIZE)
    before, new = caches.clone(), NewKeys(torch.randn(4, 2, SIZE), torch.randn(4, 2, SIZE), [2, 2])
    with pytest.raises(CacheError, match=match):
        attend_cached(
            torch.randn(4, HEADS, SIZE),
            [2, 2],
            CallerCache(*caches, **more),
            lens,
            CallOptions(),
            new=new,
        )
    assert torch.equal(caches, before)


@pytest.mark.parametrize("page", [-1, 7])
def test_a_new_token_s_page_is_one_of_the_cache_s(page: int) -> None:
    caches, query = torch.randn(2, 4, 16, 2, SIZE), torch.randn(2, HEADS, SIZE)
    before, new = caches.clone(), NewKeys(torch.randn(2, 2, SIZE), torch.randn(2, 2, SIZE), [1, 1])
    table = torch.tensor([[0, page], [2, page]], dtype=torch.int32)
    lens = torch.tensor([3, 16], dtype=torch.int32)
    with pytest.raises(
        CacheError, match=rf"block_table\[1\] gives a new token page {page}; .* 4 pages"
    ):
        attend_cached(query, [1, 1], CallerCache(*caches, table), lens, CallOptions(True), new=new)
    assert torch.equal(caches, before)
    lens[1] = 15
    attend_cached(query, [1, 1], CallerCache(*caches, table), lens, CallOptions(True), new=new)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float8_e4m3fn,) * 2])
def test_dtypes_that_a_call_doesn_t_take(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    of_cache, of_query = dtypes
    cache = CallerCache(*torch.randn(2, 2, 32, 2, SIZE).to(of_cache))
    query = torch.randn(2, HEADS, SIZE).to(of_query)
    with pytest.raises(
        PolyattnError, match="the cache is torch.float16, the query|query is torch.float8"
    ):
        attend_cached(query, [1, 1], cache, 3, CallOptions(True))


def test_what_new_tokens_and_turns_lack() -> None:
    caches, query = torch.randn(2, 2, 32, 2, SIZE), torch.randn(4, HEADS, SIZE)
    before, key = caches.clone(), torch.randn(2, 2, SIZE)
    with pytest.raises(CacheError, match="new keys are of 1 sequences; the queries are of 2"):
        attend_cached(
            query, [2, 2], CallerCache(*caches), 3, CallOptions(), new=NewKeys(key, key, [2])
        )
    turns = RotaryTables(torch.ones(9, 4), torch.zeros(9, 4), "neox")
    new = NewKeys(key, key, [1, 1])
    for causal, length, last in ((True, 8, 9), (False, 9, 9)):
        with pytest.raises(CacheError, match=f"9 positions; a token stands at {last}"):
            attend_cached(
                query,
                [2, 2],
                CallerCache(*caches),
                length,
                CallOptions(causal),
                new=new,
                turns=turns,
            )
    assert torch.equal(caches, before)
    attend_cached(query, [2, 2], CallerCache(*caches), 7, CallOptions(True), new=new, turns=turns)
    assert not torch.equal(caches, before)


@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_and_values_in_one_tensor(heads_first: bool) -> None:
    form = CacheFormat(block_size=4, num_kv_heads=2, head_size=8, v_head_size=6, dtype="fp8_e4m3")
    key, value, room = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 6), torch.randn(5, 4, 2, 2)
    storage = torch.cat([key, value, room], -1).to(torch.float8_e4m3fn).view(torch.uint8)
    storage = storage.transpose(1, 2) if heads_first else storage
    cache = KVCache.joined(storage, form, heads_first)
    assert torch.equal(cache.key.float(), key.to(torch.float8_e4m3fn).float())
    assert torch.equal(cache.value.float(), value.to(torch.float8_e4m3fn).float())
    assert cache.key.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    kept = joined_pages(storage, form, heads_first)
    assert joined_pages(storage, form, heads_first) is kept
    with pytest.raises(CacheError, match="the last at least 14"):
        KVCache.joined(storage[..., :13], form, heads_first)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_cache_says_whether_its_blocks_lie_in_turn(
    heads: int, layout: str, interleaved: bool
) -> None:
    form = CacheFormat(
        block_size=16, num_kv_heads=heads, head_size=8, v_head_size=8, dtype="float32",
        layout=layout, apart=(1 + interleaved) * 16,
    )  # fmt: skip
    found = KVCache.allocate(form, 4).format
    assert found == replace(form, layout="NHD" if heads == 1 else layout)
    # K and V side by side in each token's row are no blocks in turn.
    rows = torch.zeros(4, 16, heads, 2 * 8)
    assert KVCache(rows[..., :8], rows[..., 8:]).format.apart == 0


def test_a_latent_s_value_is_the_first_part_of_its_key() -> None:
    form = CacheFormat(
        block_size=4, num_kv_heads=1, head_size=12, v_head_size=8, dtype="float32",
        value_in_key=True,
    )  # fmt: skip
    storage = torch.randn(5, 4, 12)
    cache = KVCache.joined(storage, form, heads_first=True)
    assert cache.value_in_key and torch.equal(cache.key[:, :, 0], storage)
    assert torch.equal(cache.value, cache.key[..., :8])
