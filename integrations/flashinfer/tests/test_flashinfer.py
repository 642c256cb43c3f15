"""FlashInfer's wrappers beside the formula in float64, in both layouts, with every mask and position."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import polyattn_flashinfer
import pytest
import torch
from formulas import attend, distances, in_window
from polyattn import PolyattnError
from polyattn_flashinfer import flashinfer
from torch import Tensor

WORKSPACE = torch.empty(0, dtype=torch.uint8)
QUERY_LENS, LENS, PAGE, HEADS, KV_HEADS, SIZE = [5, 1, 3, 2], [37, 16, 3, 49], 16, 6, 2, 64


def attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = False, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | None = None, mask: Tensor | None = None,
    pos_encoding_mode: str = "NONE",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one sequence (tokens, heads, size), and its LSE to base 2, in float64."""
    sizes, bias = (len(query), len(key)), None
    behind = distances(*sizes)
    if pos_encoding_mode == "ROPE_LLAMA":
        query = turned(query.double(), behind[:, 0])
        key = turned(key.double(), torch.arange(len(key)))
    if pos_encoding_mode == "ALIBI":
        assert query.shape[1] == 6  # ALiBi's slopes of a number that is no power of two
        slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
        bias = -slopes.double()[:, None, None] * behind
        bias += slopes.double()[:, None, None] * (sizes[1] - sizes[0])  # queries' positions from 0
    seen = in_window(*sizes, window_left, 0 if causal and mask is None else -1)
    seen = seen if mask is None else seen & mask.view(sizes)
    out, lse = attend(query, key, value, seen, scale=sm_scale, cap=logits_soft_cap, bias=bias)
    return out, lse.T / math.log(2)


def turned(tokens: Tensor, positions: Tensor) -> Tensor:
    """Rotate tokens (tokens, heads, size) as Llama does."""
    half = tokens.shape[2] // 2
    angle = positions[:, None] * 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = tokens.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def paged(lens: list[int], layout: str = "NHD", dtype: torch.dtype = torch.float32) -> Any:
    """Return a paged cache of random pages, its arrays, and each sequence's keys and values."""
    counts = [-(-n // PAGE) for n in lens]
    pages = torch.randperm(sum(counts) + 3)[: sum(counts)].int()
    order = (PAGE, KV_HEADS) if layout == "NHD" else (KV_HEADS, PAGE)
    cache = torch.randn(sum(counts) + 3, 2, *order, SIZE).to(dtype)
    tokens = cache if layout == "NHD" else cache.transpose(2, 3)
    firsts, rows = [0, *accumulate(counts)], []
    for row, n in enumerate(lens):
        own = tokens[pages[firsts[row] : firsts[row + 1]].long()]
        rows.append([own[:, part].flatten(0, 1)[:n].float() for part in (0, 1)])
    last = torch.tensor([(n - 1) % PAGE + 1 if n else 0 for n in lens], dtype=torch.int32)
    return cache, (indptr(counts), pages, last), rows


def indptr(lens: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def close(found: Any, wanted: list[tuple[Tensor, Tensor]], atol: float = 2e-5) -> None:
    for ours, theirs in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours.double(), torch.cat(theirs), rtol=1e-4, atol=atol)


SCORES: list[dict[str, Any]] = [
    {},
    {"window_left": 7},
    {"logits_soft_cap": 5.0},
    {"sm_scale": 0.3},
    {"pos_encoding_mode": "ALIBI"},
    {"pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "window_left": 20, "logits_soft_cap": 8.0},
]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode(layout: str, scores: dict[str, Any]) -> None:
    cache, arrays, rows = paged(LENS, layout)
    query = torch.randn(len(LENS), HEADS, SIZE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE, q_data_type="float32", **scores)
    wanted = [attention(query[i : i + 1], *rows[i], **scores) for i in range(len(LENS))]
    close(wrapper.run(query, cache, return_lse=True), wanted)
    close([wrapper.run(query, tuple(cache.unbind(1)))], [(out,) for out, _ in wanted])  # type: ignore[misc]
    for i, (key, value) in enumerate(rows):
        if layout == "HND":
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        out, lse = flashinfer.single_decode_with_kv_cache(
            query[i], key, value, layout, return_lse=True, **scores
        )
        close([out[None], lse[None]], [wanted[i]])


@pytest.mark.parametrize("captured", [False, True])
def test_a_compiled_run_is_traced_no_further_than_the_door(captured: bool) -> None:
    """It breaks the graph, as FlashInfer's own does, and compiles once for any lengths."""
    cache, arrays, _ = paged(LENS)
    buffers = dict[str, Any]()
    if captured:
        names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
        rooms = arrays[0].clone(), arrays[1].repeat(4), arrays[2].clone()
        buffers = dict(zip(names, rooms, strict=True))
        buffers["use_cuda_graph"] = True
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, **buffers)

    def step(query: Tensor) -> Tensor:
        out: Tensor = wrapper.run(query, cache)
        return out * 2

    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    traced = torch.compile(step, backend="aot_eager")
    query = torch.randn(len(LENS), HEADS, SIZE)
    for fewer in range(3):
        last = (arrays[2] - fewer).clamp(min=1)
        wrapper.plan(*arrays[:2], last, HEADS, KV_HEADS, SIZE, PAGE, q_data_type="float32")
        assert torch.equal(traced(query), step(query))
    assert counts["unique_graphs"] <= 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", SCORES)
def test_prefill(scores: dict[str, Any], causal: bool) -> None:
    cache, arrays, rows = paged(LENS, "HND")
    query = torch.randn(sum(QUERY_LENS), HEADS, SIZE)
    sizes = {"causal": causal, **scores}
    parts = query.split(QUERY_LENS)
    wanted = [attention(q, *own, **sizes) for q, own in zip(parts, rows, strict=True)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "HND")
    wrapper.plan(indptr(QUERY_LENS), *arrays, HEADS, KV_HEADS, SIZE, PAGE, **sizes)
    close(wrapper.run_return_lse(query, cache), wanted)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(indptr(QUERY_LENS), indptr(LENS), HEADS, KV_HEADS, SIZE, **sizes)
    key, value = (torch.cat(t) for t in zip(*rows, strict=True))
    close(ragged.run_return_lse(query, key, value), wanted)
    single = flashinfer.single_prefill_with_kv_cache_return_lse
    close(single(parts[0], *rows[0], **sizes), wanted[:1])


def test_a_callers_tensors_and_older_names() -> None:
    """As SGLang calls: `begin_forward` once, and `forward` with the layer's own scores."""
    cache, arrays, rows = paged(LENS)
    query = torch.randn(len(LENS), HEADS, SIZE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*arrays, HEADS, KV_HEADS, SIZE, PAGE)
    scores: dict[str, Any] = {"sm_scale": 0.2, "logits_soft_cap": 3.0}
    wanted = [attention(query[i : i + 1], *rows[i], **scores) for i in range(len(LENS))]
    found = wrapper.forward_return_lse(query, cache, **scores)
    close(found, wanted)
    out, lse = torch.empty_like(query), torch.empty(len(LENS), HEADS)
    again = wrapper.run(query, cache, out=out, lse=lse, return_lse=True)
    assert again[0] is out and again[1] is lse
    close(again, wanted)
    halved = [(wanted_out / 2, wanted_lse) for wanted_out, wanted_lse in wanted]
    scales = {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 0.5, "return_lse": True}
    close(wrapper.run(query, cache, **scales), halved)
    wrapper.end_forward()


def test_a_cache_of_eight_bits_is_scaled_by_a_calls_scales() -> None:
    cache, arrays, rows = paged(LENS, "NHD", torch.float8_e4m3fn)
    query = torch.randn(len(LENS), HEADS, SIZE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE, kv_data_type=torch.float8_e4m3fn)
    found = wrapper.run(query, cache, k_scale=0.5, v_scale=3.0, return_lse=True)
    wanted = [
        attention(query[i : i + 1], 0.5 * key, 3 * value) for i, (key, value) in enumerate(rows)
    ]
    close(found, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_custom_masks(packed: bool) -> None:
    cache, arrays, rows = paged(LENS)
    query = torch.randn(sum(QUERY_LENS), HEADS, SIZE)
    masks = [torch.rand(q, n) < 0.6 for q, n in zip(QUERY_LENS, LENS, strict=True)]
    parts = zip(query.split(QUERY_LENS), rows, masks, strict=True)
    wanted = [attention(q, *own, mask=mask) for q, own, mask in parts]
    given = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    if packed:
        given = {"packed_custom_mask": torch.cat([bits(mask.flatten()) for mask in masks])}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(indptr(QUERY_LENS), *arrays, HEADS, KV_HEADS, SIZE, PAGE, **given)
    close(wrapper.run_return_lse(query, cache), wanted)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(indptr(QUERY_LENS), indptr(LENS), HEADS, KV_HEADS, SIZE, **given)
    key, value = (torch.cat(t) for t in zip(*rows, strict=True))
    close(ragged.run_return_lse(query, key, value), wanted)


def bits(mask: Tensor) -> Tensor:
    """Return booleans as bytes, lowest bit first."""
    rows = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (rows * 2 ** torch.arange(8)).sum(1).to(torch.uint8)


def test_fewer_keys_than_queries_and_none() -> None:
    lens = [2, 0, 20]
    cache, arrays, rows = paged(lens)
    counts = [5, 1, 3]
    query = torch.randn(sum(counts), HEADS, SIZE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(indptr(counts), *arrays, HEADS, KV_HEADS, SIZE, PAGE, causal=True)
    parts = zip(query.split(counts), rows, strict=True)
    close(
        wrapper.run_return_lse(query, cache), [attention(q, *own, causal=True) for q, own in parts]
    )


def test_the_buffers_of_a_captured_decode_are_refilled() -> None:
    """On a CPU nothing is captured; the second plan's step is read from the first one's tensors."""
    buffers = torch.zeros(5), torch.zeros(16), torch.zeros(4)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    wrapper._int_workspace_buffer = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE
    )._int_workspace_buffer  # as mini-sglang and SGLang share it
    table, lengths = wrapper._table, wrapper._lens
    for lens in (LENS, [5, 61, 33, 1]):
        cache, arrays, rows = paged(lens)
        query = torch.randn(len(lens), HEADS, SIZE)
        wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE, window_left=30)
        wanted = [attention(query[i : i + 1], *rows[i], window_left=30) for i in range(len(lens))]
        close(wrapper.run(query, cache, return_lse=True), wanted)
        assert wrapper._table is table and wrapper._lens is lengths
    _, arrays, _ = paged([65, 1, 1, 1])
    with pytest.raises(PolyattnError, match="4 sequences of up to 5 pages"):
        wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE)


def test_sinks() -> None:
    cache, arrays, rows = paged(LENS)
    query, sinks = torch.randn(len(LENS), HEADS, SIZE), torch.randn(HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE)
    wanted = []
    for i, own in enumerate(rows):
        out, lse = attention(query[i : i + 1], *own)
        share = torch.sigmoid(lse * math.log(2) - sinks.double())
        wanted.append((out * share[..., None],))
    close([wrapper.run(query, cache, sinks=sinks)], wanted)  # type: ignore[arg-type]


def test_cascade() -> None:
    """Two sequences share a prefix that ends inside of a page, and attend to tokens of their own."""
    cache, (starts, pages, last), rows = paged([21, 5, 40])
    query = torch.randn(4, HEADS, SIZE)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    queries = [indptr([4]), indptr([1, 3])]
    wrapper.plan(
        queries, [starts[:2], starts[1:] - starts[1]], [pages[: starts[1]], pages[starts[1] :]],
        [last[:1], last[1:]], HEADS, KV_HEADS, SIZE, PAGE, True,
    )  # fmt: skip
    whole = [[torch.cat(t) for t in zip(rows[0], own, strict=True)] for own in rows[1:]]
    parts = zip(query.split([1, 3]), whole, strict=True)
    wanted = [(attention(q, *own, causal=True)[0],) for q, own in parts]
    close([wrapper.run(query, cache)], wanted)  # type: ignore[arg-type]


def test_merges() -> None:
    query, (key, value) = torch.randn(3, HEADS, SIZE), torch.randn(2, 30, KV_HEADS, SIZE)
    bounds = [(0, 4), (4, 29), (29, 30)]
    parts = [attention(query, key[a:b], value[a:b]) for a, b in bounds]
    wanted = [attention(query, key, value)]
    outs, sums = (torch.stack(t, 1) for t in zip(*parts, strict=True))
    close(flashinfer.merge_states(outs, sums), wanted)
    pair = flashinfer.merge_state(*parts[0], *parts[1])
    close(flashinfer.merge_state(*pair, *parts[2]), wanted)
    out, lse = (t.clone() for t in pair)
    flashinfer.merge_state_in_place(out, lse, *parts[2], mask=torch.tensor([1, 0, 1]))
    kept = torch.tensor([True, False, True])
    wanted_out, wanted_lse = wanted[0]
    close([out[kept], lse[kept]], [(wanted_out[kept], wanted_lse[kept])])
    assert torch.equal(out[1], pair[0][1]) and torch.equal(lse[1], pair[1][1])


@pytest.mark.parametrize(
    ("beside", "counts"),
    [(True, [1, 1, 1]), (False, [1, 1, 1]), (True, [3, 1, 2]), (False, [3, 1, 2])],
)
def test_mla(beside: bool, counts: list[int]) -> None:
    lens, heads, rank, rope = [19, 33, 7], 4, 64, 32
    _, (starts, pages, _), _ = paged(lens)
    rows = torch.randn(int(pages.max()) + 1, PAGE, rank + rope)
    ckv, kpe = rows[..., :rank], rows[..., rank:]
    if not beside:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    nope, pe = torch.randn(sum(counts), heads, rank), torch.randn(sum(counts), heads, rope)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    wrapper.plan(
        indptr(counts), starts, pages, torch.tensor(lens), heads, rank, rope, PAGE, True, 0.1
    )
    wanted, query = [], torch.cat([nope, pe], -1).split(counts)
    for i, n in enumerate(lens):
        own = rows[pages[starts[i] : starts[i + 1]].long()].flatten(0, 1)[:n, None]
        wanted.append(attention(query[i], own, own[..., :rank], causal=True, sm_scale=0.1))
    close(wrapper.run(nope, pe, ckv, kpe, return_lse=True), wanted)


def test_pages_that_tokens_are_appended_to() -> None:
    cache, (starts, pages, last), _ = paged(LENS, "HND")
    lens = flashinfer.get_seq_lens(starts, last, PAGE)
    assert lens.tolist() == LENS
    new = [3, 0, 1, 5]
    tokens = torch.randn(2, sum(new), KV_HEADS, SIZE)
    seq, position = flashinfer.get_batch_indices_positions(indptr(new), lens, sum(new) + 2)
    assert seq.tolist() == [0, 0, 0, 2, 3, 3, 3, 3, 3, -1, -1]
    assert position.tolist() == [34, 35, 36, 2, 44, 45, 46, 47, 48, 0, 0]
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, 2), value=math.nan)
    before = cache.clone()
    flashinfer.append_paged_kv_cache(*padded, seq, position, cache, pages, starts, last, "HND")
    for at, (row, place) in enumerate(zip(seq.tolist()[:-2], position.tolist()[:-2], strict=True)):
        page = pages[starts[row] + place // PAGE]
        assert torch.equal(cache[page, :, :, place % PAGE], tokens[:, at])
        cache[page, :, :, place % PAGE] = before[page, :, :, place % PAGE]
    assert torch.equal(cache, before)


def test_what_is_refused_is_named() -> None:
    cache, arrays, _ = paged(LENS)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    query = torch.randn(len(LENS), HEADS, SIZE)
    with pytest.raises(PolyattnError, match="use_cuda_graph=True"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    with pytest.raises(PolyattnError, match="jit_args"):
        decode(WORKSPACE, jit_args=["mine"])
    with pytest.raises(PolyattnError, match="kv_layout='nhd'"):
        decode(WORKSPACE, "nhd")
    wrapper = decode(WORKSPACE)
    with pytest.raises(PolyattnError, match=r"run\(\) before plan\(\)"):
        wrapper.run(query, cache)
    with pytest.raises(PolyattnError, match="pos_encoding_mode='ROPE'"):
        wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE, pos_encoding_mode="ROPE")
    both: dict[str, Any] = {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0}
    with pytest.raises(PolyattnError, match=r"logits_soft_cap=5\.0 with pos_encoding_mode='ALIBI'"):
        wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE, **both)
    wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE, pos_encoding_mode="ALIBI")
    with pytest.raises(PolyattnError, match="sinks with pos_encoding_mode='ALIBI'"):
        wrapper.run(query, cache, sinks=torch.zeros(HEADS))
    wrapper.plan(*arrays, HEADS, KV_HEADS, SIZE, PAGE)
    with pytest.raises(PolyattnError, match="k_scale is given.*each head"):
        wrapper.run(query, cache, k_scale=torch.ones(KV_HEADS))
    with pytest.raises(PolyattnError, match=r"q is \(3, 6, 64\)"):
        wrapper.run(query[:3], cache)


def test_pages_from_an_offset_are_read_from_there() -> None:
    """A part of a step's `indptr` is one, too."""
    cache, (starts, pages, last), rows = paged(LENS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts[1:], pages, last[1:], HEADS, KV_HEADS, SIZE, PAGE)
    query = torch.randn(len(LENS) - 1, HEADS, SIZE)
    wanted = [attention(query[i : i + 1], *own) for i, own in enumerate(rows[1:])]
    close(wrapper.run(query, cache, return_lse=True), wanted)


def test_what_the_tensors_contradict_is_named() -> None:
    cache, (starts, pages, last), _ = paged(LENS)
    sizes, query = (HEADS, KV_HEADS, SIZE, PAGE), torch.randn(len(LENS), HEADS, SIZE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for place, name in enumerate(("num_qo_heads", "num_kv_heads", "head_dim", "page_size")):
        wrong = [*sizes]
        wrong[place] *= 2
        wrapper.plan(starts, pages, last, *wrong)
        with pytest.raises(PolyattnError, match=f"{name}={wrong[place]}.*have {sizes[place]}"):
            wrapper.run(query, cache)
    with pytest.raises(PolyattnError, match=rf"ends with {len(pages)}.*{len(pages) - 1} indices"):
        wrapper.plan(starts, pages[:-1], last, *sizes)
    with pytest.raises(PolyattnError, match="last_page_len has 1 entries"):
        wrapper.plan(starts, pages, last[:1], *sizes)
    with pytest.raises(PolyattnError, match="q_data_type='float23'"):
        wrapper.plan(starts, pages, last, *sizes, q_data_type="float23")
    wrapper.plan(starts, pages, last, *sizes)
    with pytest.raises(PolyattnError, match="q_len_per_req=1.*have 2"):
        wrapper.run(query, cache, q_len_per_req=2)
    with pytest.raises(PolyattnError, match=r"out is \(1, .*must be \("):
        wrapper.run(query, cache, out=query[:1])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    with pytest.raises(PolyattnError, match="kv_indptr begins with"):
        ragged.plan(indptr(QUERY_LENS[1:]), indptr(LENS)[1:], *sizes[:3])


def test_install_and_uninstall() -> None:
    polyattn_flashinfer.install()
    try:
        import flashinfer as installed  # type: ignore[import-not-found]

        assert installed.__version__ == polyattn_flashinfer.VERSIONS["flashinfer"]
        assert (
            installed.decode.single_decode_with_kv_cache is flashinfer.single_decode_with_kv_cache
        )
    finally:
        polyattn_flashinfer.uninstall()
