"""flash-attn's functions against their documented formula, written out in float64."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polyattn_flash_attn
import pytest
import torch
from formulas import attend, distances, in_window
from polyattn import PolyattnError
from polyattn.registry import requirements
from polyattn_flash_attn import bert_padding, flash_attn_2, flash_attn_3
from torch import Tensor


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def expected(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: (tokens, heads, size). Returns the output and the LSE (heads, tokens)."""
    sizes = len(q), len(k)
    bias = None if slopes is None else -slopes.double()[:, None, None] * distances(*sizes).abs()
    seen = in_window(*sizes, window[0], 0 if causal else window[1])
    return attend(q, k, v, seen, cap=softcap, bias=bias)


def close(found: Tensor, wanted: Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit)


def draw(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    given: dict[str, Any] = {"causal": rng.random() < 0.5}
    if rng.random() < 0.5:
        given["window_size"] = (rng.choice([-1, 0, 3, 11]), rng.choice([-1, 0, 2, 9]))
    if rng.random() < 0.3:
        given["softcap"] = 3.0
    return given


def formula(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "causal": given["causal"],
        "window": given.get("window_size", (-1, -1)),
        "softcap": given.get("softcap", 0.0),
    }


@pytest.mark.parametrize("seed", range(40))
@torch.no_grad()
def test_dense_and_packed(seed: int) -> None:
    given, rng = draw(seed), random.Random(seed)
    rows, queries, keys = rng.randint(1, 3), rng.randint(1, 20), rng.randint(1, 25)
    q = torch.randn(rows, queries, 4, 16)
    kv = torch.randn(rows, keys, 2, 2, 16)
    slopes = None
    if given["causal"] and rng.random() < 0.4:
        slopes = torch.rand(4) if rng.random() < 0.5 else torch.rand(rows, 4)
    out, lse, _ = flash_attn_2.flash_attn_kvpacked_func(
        q, kv, alibi_slopes=slopes, return_attn_probs=True, **given
    )
    cu_q, cu_k = (torch.arange(rows + 1, dtype=torch.int32) * n for n in (queries, keys))
    packed = flash_attn_2.flash_attn_varlen_kvpacked_func(
        q.flatten(0, 1), kv.flatten(0, 1), cu_q, cu_k, queries, keys, alibi_slopes=slopes, **given
    )
    close(packed.view_as(out), out.double())
    for row in range(rows):
        mine = slopes[row] if slopes is not None and slopes.dim() == 2 else slopes
        wanted = expected(q[row], kv[row, :, 0], kv[row, :, 1], **formula(given), slopes=mine)
        close(out[row], wanted[0])
        close(lse[row], wanted[1])


@torch.no_grad()
def test_a_window_may_be_tensors() -> None:
    """flash-attention's own tests draw theirs so; they count as what they hold at each call."""
    q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
    window = torch.tensor(3), torch.tensor(0)
    for left in (3, 1):
        window[0].fill_(left)
        found = flash_attn_2.flash_attn_func(q, k, v, window_size=window)
        assert torch.equal(found, flash_attn_2.flash_attn_func(q, k, v, window_size=(left, 0)))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_kvcache(seed: int, version: int, paged: bool) -> None:
    """New keys are appended in place, where the documentation says, and attended to."""
    given, rng = draw(seed), random.Random(seed)
    rows, queries, page = 3, rng.choice([1, 4]), 16
    before = [rng.randint(queries, 40) for _ in range(rows)]
    new = queries if rng.random() < 0.7 else 0
    k, v = torch.randn(rows, queries, 2, 16), torch.randn(rows, queries, 2, 16)
    whole = torch.randn(2, rows, 64, 2, 16)
    caches, table = whole.clone(), None
    if paged:
        order = torch.randperm(rows * 4)
        table = order.view(rows, 4).int()
        caches = torch.empty(2, rows * 4, page, 2, 16)
        caches[:, order] = whole.view(2, rows * 4, page, 2, 16)
    module = flash_attn_2 if version == 2 else flash_attn_3
    at: dict[str, Any] = {}
    if version == 3 and table is not None and seed % 3 == 0:  # rows of a table for more sequences
        given_table = torch.full((5, 4), -7, dtype=torch.int32)
        at["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
        given_table[[4, 0, 2]] = table
    else:
        given_table = table
    extra = {"block_table" if version == 2 else "page_table": given_table, **at}
    if new:
        extra |= {"k": k, "v": v}
    q = torch.randn(rows, queries, 4, 16)
    lens = torch.tensor(before, dtype=torch.int32)
    if version == 3:  # it changes nothing: no rotation, or the positions that are used anyway
        extra["rotary_seqlens"] = lens
        if seed % 2:
            turns = {"rotary_cos": torch.ones(64, 8), "rotary_sin": torch.zeros(64, 8)}
            extra |= turns if new else {}
    out, lse = module.flash_attn_with_kvcache(
        q, caches[0], caches[1], cache_seqlens=lens,
        return_softmax_lse=True, **extra, **given,
    )  # fmt: skip
    for row, length in enumerate(before):
        stored = whole[:, row].clone()
        if new:
            stored[:, length : length + new] = torch.stack([k[row], v[row]])
        held = caches[:, row] if table is None else caches[:, table[row].long()].flatten(1, 2)
        assert torch.equal(held, stored)
        keys, values = stored[:, : length + new]
        wanted = expected(q[row], keys, values, **formula(given))
        close(out[row], wanted[0])
        close(lse[row], wanted[1])


@torch.no_grad()
def test_numpy_may_write_lengths_and_tables() -> None:
    """An engine's host buffers are NumPy's, too, whose writes count as no change of the tensor."""
    q, keys = torch.randn(8, 4, 16), torch.randn(4, 16, 2, 16)
    starts, table, lens = np.array([0, 3, 8]), np.array([[0, 1], [2, 3]]), np.array([20, 17])
    starts, table, lens = (a.astype(np.int32) for a in (starts, table, lens))
    cu, pages, seen = map(torch.from_numpy, (starts, table, lens))
    for first, rows, count in ((3, [[0, 1], [2, 3]], [20, 17]), (5, [[3, 1], [0, 2]], [9, 30])):
        starts[1], table[:], lens[:] = first, rows, count
        out = flash_attn_2.flash_attn_varlen_func(q, q, q, cu, cu, 8, 8)
        for own, mine in zip(
            out.split([first, 8 - first]), q.split([first, 8 - first]), strict=True
        ):
            close(own, expected(mine, mine, mine)[0])
        out = flash_attn_2.flash_attn_with_kvcache(
            q[:2, None], keys, keys, cache_seqlens=seen, block_table=pages
        )
        for at, length in enumerate(count):
            held = keys[rows[at]].flatten(0, 1)[:length]
            close(out[at], expected(q[at : at + 1], held, held)[0])


@torch.no_grad()
def test_left_padding_and_batch_indices() -> None:
    caches = torch.randn(2, 5, 32, 2, 16)
    q, pads, rows, lens = torch.randn(3, 2, 4, 16), [0, 5, 9], [4, 0, 2], [20, 32, 11]
    ints = [torch.tensor(x, dtype=torch.int32) for x in (lens, rows, pads)]
    out = flash_attn_2.flash_attn_with_kvcache(
        q, caches[0], caches[1], cache_seqlens=ints[0], cache_batch_idx=ints[1],
        cache_leftpad=ints[2], causal=True,
    )  # fmt: skip
    for i in range(3):
        keys, values = caches[:, rows[i], pads[i] : lens[i]]
        close(out[i], expected(q[i], keys, values, causal=True)[0])


@pytest.mark.parametrize("limits", [{"causal": True}, {"attention_chunk": 6}, {}])
@torch.no_grad()
def test_tokens_turn_by_their_places_in_the_cache(limits: dict[str, Any]) -> None:
    """Left padding counts, as in flash-attn's own test; chunks are local attention to its kernel."""
    caches, lens, pads = torch.randn(2, 2, 32, 2, 16), [20, 11], [5, 9]
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    angles = torch.randn(32, 8)
    whole, place = caches.double(), [torch.arange(n, n + 3) for n in lens]
    out = flash_attn_3.flash_attn_with_kvcache(
        q, caches[0], caches[1], k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=torch.tensor(lens).int(), cache_leftpad=torch.tensor(pads).int(), **limits,
    )  # fmt: skip
    for row, at in enumerate(place):
        turns = torch.polar(torch.ones(3, 1, 8).double(), angles[at][:, None].double())
        query, key = (torch.view_as_complex(t[row].double().unflatten(-1, (8, 2))) for t in (q, k))
        query = torch.view_as_real(query * (turns if limits else turns[:1])).flatten(-2)
        whole[0, row, at] = torch.view_as_real(key * turns).flatten(-2)
        whole[1, row, at] = v[row].double()
        keys, values = whole[:, row, pads[row] : lens[row] + 3]
        queries_at, keys_at = torch.arange(3)[:, None] + len(keys) - 3, torch.arange(len(keys))
        mask = torch.ones(3, len(keys), dtype=torch.bool)
        if "causal" in limits:
            mask = keys_at <= queries_at
        elif limits:
            mask = keys_at // 6 == queries_at // 6
        close(out[row], attend(query, keys, values, mask)[0])


@torch.no_grad()
def test_packed_queries_and_new_keys_of_version_3() -> None:
    """Sequences of other lengths each, rotated from where their caches end."""
    counts, new, before = [3, 1, 5], [3, 0, 4], [7, 20, 1]
    cos, sin = (torch.randn(32, 4) for _ in range(2))
    q, k, v = torch.randn(9, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    caches = torch.randn(2, 3, 32, 2, 16)
    whole = caches.clone()
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 4, 9], [0, 3, 3, 7], before)]
    given = {"causal": True, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q, caches[0], caches[1], k, v, cu_seqlens_q=ints[0], cu_seqlens_k_new=ints[1],
        cache_seqlens=ints[2], max_seqlen_q=5, return_softmax_lse=True, **given,
    )  # fmt: skip
    assert lse.shape == (4, 9)
    first = [0, 0]
    for row, length in enumerate(before):
        at = [slice(a, a + n) for a, n in zip(first, (counts[row], new[row]), strict=True)]
        held = whole[:, row : row + 1].clone()
        one = flash_attn_2.flash_attn_with_kvcache(
            q[at[0]][None], held[0], held[1], k[at[1]][None], v[at[1]][None],
            cache_seqlens=length, **given,
        )  # fmt: skip
        close(out[at[0]], one[0].double())
        assert torch.equal(caches[:, row], held[:, 0])
        first = [part.stop for part in at]


@torch.no_grad()
def test_no_room_changes_nothing() -> None:
    caches, table = torch.randn(2, 6, 16, 2, 16), torch.arange(6).view(2, 3).int()
    before, new = caches.clone(), torch.randn(2, 4, 2, 16)
    lens = torch.tensor([3, 45], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"cache_seqlens\[1\]=45 and 4 new tokens: block_table"):
        flash_attn_2.flash_attn_with_kvcache(
            torch.randn(2, 4, 4, 16), *caches, new, new, cache_seqlens=lens, block_table=table
        )
    with pytest.raises(RuntimeError, match="cache_seqlens"):
        flash_attn_2.flash_attn_with_kvcache(torch.randn(2, 4, 4, 16), *caches, block_table=table)
    with pytest.raises(RuntimeError, match="rows go with dense rows"):
        flash_attn_2.flash_attn_with_kvcache(
            torch.randn(2, 4, 4, 16), *caches, cache_seqlens=lens, block_table=table,
            cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32),
        )  # fmt: skip
    assert torch.equal(caches, before)


@torch.no_grad()
def test_partial_results_combine() -> None:
    """Over two parts of the keys, the second of which one query doesn't see."""
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
    parts = [
        flash_attn_3.flash_attn_func(q, k[:, at], v[:, at], return_attn_probs=True)
        for at in (slice(0, 6), slice(6, 9))
    ]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    lses[1, 0, 2], outs[1, 0, 2] = -torch.inf, 0.0
    kept = torch.empty(2, 5, 4, 16)
    found, lse = flash_attn_3.flash_attn_combine(outs, lses, kept)
    assert found is kept
    for row in range(2):
        out, wanted = expected(q[row], k[row], v[row])
        first = expected(q[row], k[row, :6], v[row, :6])
        if row == 0:
            out[2], wanted[:, 2] = first[0][2], first[1][:, 2]
        close(found[row], out)
        close(lse[row].T, wanted)


@pytest.mark.parametrize("seed", range(12))
def test_gradients(seed: int) -> None:
    given = draw(seed)
    leaves = [torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((9, 4), (13, 2), (13, 2))]
    weight = torch.randn(2, 9, 4, 16)
    out = flash_attn_2.flash_attn_func(*leaves, **given)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    rows = [expected(*(t[row] for t in leaves), **formula(given))[0] for row in range(2)]
    wanted = torch.autograd.grad((torch.stack(rows) * weight).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        close(a, b.nan_to_num().double())
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_2.flash_attn_func(*leaves, **given)
        again = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(again, found, strict=True):
        assert torch.equal(a, b)


def test_gradients_beside_a_sequence_of_no_keys() -> None:
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((9, 4), (7, 2), (7, 2)))
    queries, keys = (torch.tensor(at, dtype=torch.int32) for at in ([0, 4, 7, 9], [0, 5, 5, 7]))
    out = flash_attn_2.flash_attn_varlen_func(q, k, v, queries, keys, 4, 5)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    first, last = expected(q[:4], k[:5], v[:5])[0], expected(q[7:], k[5:], v[5:])[0]
    wanted = torch.autograd.grad(first.square().sum() + last.square().sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        close(a, b.double())


@torch.no_grad()
def test_unused_tokens_of_version_3() -> None:
    q, k, v = torch.randn(12, 4, 16), torch.randn(14, 4, 16), torch.randn(14, 4, 16)
    k[4:8] = torch.nan  # beyond what is used of the first sequence
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 12], [0, 8, 14], [3, 7], [4, 6])]
    out = flash_attn_3.flash_attn_varlen_func(
        q, k, v, ints[0], ints[1], 7, 8, seqused_q=ints[2], seqused_k=ints[3], causal=True
    )
    close(out[:3], expected(q[:3], k[:4], v[:4], causal=True)[0])
    close(out[5:], expected(q[5:], k[8:], v[8:], causal=True)[0])
    assert not out[3:5].any()


def test_padding_round_trip() -> None:
    hidden = torch.randn(3, 7, 2, 5, requires_grad=True)
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [0] * 5 + [1] * 2])
    packed, indices, cu, longest, used = bert_padding.unpad_input(hidden, mask)
    assert cu.tolist() == [0, 7, 10, 12] and longest == 7 and used.tolist() == [7, 3, 2]
    back = bert_padding.pad_input(packed, indices, 3, 7)
    assert torch.equal(back, hidden * mask[..., None, None])
    (grad,) = torch.autograd.grad(back.sum(), hidden)
    assert torch.equal(grad, mask[..., None, None].expand_as(hidden).float())
    lens = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    found = bert_padding.unpad_input_for_concatenated_sequences(torch.arange(12.0).view(2, 6), lens)
    assert found[0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert found[2].tolist() == [0, 2, 5, 11] and found[3] == 6


def test_what_is_refused() -> None:
    q = torch.randn(1, 3, 2, 16)
    for given in ({"dropout_p": 0.1}, {"alibi_slopes": torch.rand(2)}):
        with pytest.raises(PolyattnError):
            flash_attn_2.flash_attn_func(q, q, q, **given)
    with pytest.raises(PolyattnError, match="qv"):
        flash_attn_3.flash_attn_func(q, q, q, qv=q)
    cache, cu = torch.randn(1, 8, 2, 16), torch.tensor([1, 3], dtype=torch.int32)
    for given in ({"k": q}, {"rotary_sin": torch.ones(8, 4)}):
        with pytest.raises(PolyattnError, match="one of a pair is missing"):
            flash_attn_2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, **given)
    turns = {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.zeros(8, 4)}
    with pytest.raises(PolyattnError, match="rotary_seqlens is given"):
        flash_attn_3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=3, rotary_seqlens=torch.tensor([1]), **turns
        )
    with pytest.raises(PolyattnError, match=r"window_size=\(2, None\): write -1"):
        flash_attn_2.flash_attn_func(q, q, q, window_size=(2, None))
    packed, starts = q[0], torch.tensor([0, 3])
    for wrong, says in (([0, 3], r"lengths are \[0, 3\]"), (starts.float(), "are torch.float32")):
        with pytest.raises(PolyattnError, match=says):
            flash_attn_2.flash_attn_varlen_func(packed, packed, packed, wrong, starts, 3, 3)
    with pytest.raises((PolyattnError, RuntimeError), match="are torch.float32"):
        flash_attn_2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=starts[1:].float())
    with pytest.raises(PolyattnError, match="begin with 1; they must begin with 0"):
        flash_attn_2.flash_attn_varlen_func(q[0, 1:], q[0], q[0], cu - 1, cu, 2, 2)
    with pytest.raises(PolyattnError, match="num_heads_q"):
        flash_attn_3.flash_attn_qkvpacked_func(torch.randn(1, 3, 6, 16))


@pytest.fixture
def installed() -> Iterator[None]:
    names = [n for n in sys.modules if n.split(".")[0] in polyattn_flash_attn.VERSIONS]
    before = {n: sys.modules.pop(n) for n in names}
    polyattn_flash_attn.install(replace=True)
    yield
    polyattn_flash_attn.uninstall()
    sys.modules.update(before)


def test_install(installed: None) -> None:
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import pad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from flash_attn_interface import flash_attn_with_kvcache

    assert flash_attn_func is flash_attn_2.flash_attn_func
    assert pad_input is bert_padding.pad_input
    assert flash_attn_varlen_func is flash_attn_2.flash_attn_varlen_func
    assert flash_attn_with_kvcache is flash_attn_3.flash_attn_with_kvcache
    with pytest.raises(ImportError, match="polyattn_flash_attn"):  # not "unknown location"
        from flash_attn.flash_attn_interface import _flash_attn_forward  # noqa: F401


def test_no_backend_takes_a_stand_in_for_the_library(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: FLASH_ATTN_V3 called flash_attn_interface, which called FLASH_ATTN_V3."""
    providers = pytest.importorskip("polyattn_cuda.providers")
    monkeypatch.setattr(providers, "_version", lambda package: "2.8.3")
    assert "not installed" in providers.fa3_ready()
    assert "hidden by a stand-in" in providers.flash_attn_ready()
    monkeypatch.setattr(requirements, "installed", lambda name: SimpleNamespace(version="9"))
    assert "hidden in this process" in str(requirements.requirement_problem("Flash_Attn>=2"))
    polyattn_flash_attn.uninstall()
    assert requirements.requirement_problem("Flash_Attn>=2") is None


SIGNATURES = Path(__file__).parents[3] / "tests" / "signatures"


@pytest.mark.parametrize("version", [2, 3])
def test_signatures_are_the_recorded_ones(version: int) -> None:
    name, module = ("flash_attn", flash_attn_2) if version == 2 else ("flash_attn_3", flash_attn_3)
    recorded = json.loads((SIGNATURES / f"{name}.json").read_text())["functions"]
    checked = 0
    for function, signature in recorded.items():
        if function in module.__all__:
            names = list(inspect.signature(getattr(module, function)).parameters)
            assert names == signature["positional"], function
            checked += 1
    assert checked


def steps_of(version: Any) -> Any:
    """A function of queries, keys, values and starts that packs them, and doubles what it gets."""

    def step(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        dense = version.flash_attn_func(q, k, v, window_size=(5, 0), return_attn_probs=True)[:2]
        packed = (t.flatten(0, 1) for t in (q, k, v))
        varlen = version.flash_attn_varlen_func(*packed, starts, starts, 11, 11, causal=True)
        return *dense, varlen * 2

    return step


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("version", [flash_attn_2, flash_attn_3])
@torch.no_grad()
def test_compiled_without_a_break(version: Any, backend: str) -> None:
    """As flash-attn's own functions; lengths are no part of the graph."""
    step = steps_of(version)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    traced = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for rows, middle in ((5, 3), (5, 9), (6, 1), (8, 14)):  # no row count is another size
        q, (k, v) = torch.randn(rows, 7, 4, 16), torch.randn(2, rows, 7, 2, 16)
        starts = torch.tensor([0, middle, 7 * rows])
        for found, wanted in zip(traced(q, k, v, starts), step(q, k, v, starts), strict=True):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    assert counts["unique_graphs"] == 1


@pytest.mark.parametrize("lse", [False, True])
def test_the_operator_is_what_it_declares(lse: bool) -> None:
    """By torch's own checks, with values of another size than keys."""
    query, key, value = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 24)
    starts = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 4, 9]).int()
    options = (True, 0.3, None, None, 5.0, None, lse)
    arguments = (query, key, value, *starts, torch.rand(4), None, None, None, False, *options)
    operator = torch.ops.polyattn_flash_attn.varlen.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_call_may_break_its_graph() -> None:
    """For gradients, slopes of each row, and caches: it is traced no further than the door."""
    q, (k, v) = torch.randn(2, 7, 4, 16), torch.randn(2, 2, 7, 2, 16)
    starts, lens = torch.tensor([0, 5, 14]), torch.tensor([3, 6], dtype=torch.int32)

    def learned(q: Tensor) -> Tensor:
        packed = (t.flatten(0, 1) for t in (q, k, v))
        out = flash_attn_2.flash_attn_varlen_func(*packed, starts, starts, 9, 9, causal=True)
        return flash_attn_2.flash_attn_func(q, k, v).sum() + out.sum()

    def sloped(q: Tensor) -> Tensor:
        return flash_attn_2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes) + 1

    def cached(q: Tensor) -> Tensor:
        return flash_attn_2.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lens) + 1

    def gradient(run: Any) -> Tensor | None:
        leaf = q.clone().requires_grad_()
        run(leaf).backward()
        return leaf.grad

    @torch.no_grad()
    def output(run: Any) -> Any:
        return run(q)

    slopes = torch.rand(2, 4)
    for call, result in ((learned, gradient), (sloped, output), (cached, output)):
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters["stats"]
        counts.clear()
        traced = torch.compile(call, backend="aot_eager")
        for _ in range(3):
            assert torch.equal(result(traced), result(call))
            lens += 1
            lens.clamp_(max=7)
        assert counts["unique_graphs"] <= 4
