"""Decode by lengths that stay where they are; on a CPU the reference stands in for a GPU's kernel."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from polyattn import PolyattnError, settings
from polyattn.calls import caller_cache as cached
from polyattn.calls import lengths_on_device as core
from polyattn.calls.memo import memo
from polyattn.runtime.step import host_copies
from polyattn_flash_attn import flash_attn_2, flash_attn_3
from torch import Tensor

LENS = [1, 40, 17, 63]


@pytest.fixture(autouse=True)
def by_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lengths stay where they are, and VANILLA, by name, goes by the device's."""
    monkeypatch.setenv("POLYATTN_BACKEND", "VANILLA")
    settings.reload()
    monkeypatch.setattr(cached, "BY_DEVICE", frozenset({"cpu"}))
    torch.manual_seed(0)
    memo.clear()
    with torch.no_grad():
        yield
    memo.clear()


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where lengths are read on the host."""

    def read(tensor: Tensor) -> list[int]:
        raise AssertionError("lengths were copied to the host")

    monkeypatch.setattr(cached, "values_of", read)


CASES: dict[str, dict[str, Any]] = {
    "paged": {},
    "dense": {"paged": False},
    "rows of a dense cache": {"paged": False, "rows": [4, 0, 2, 5]},
    "new tokens": {"new": True},
    "new tokens, dense rows": {"new": True, "paged": False, "rows": [1, 5, 0, 3]},
    "rotated": {"new": True, "rotary": True},
    "window": {"window_size": (20, 0), "softcap": 3.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.3, 0.2, 0.1])},
    "drafts": {"tokens": 3},
    "drafts that are appended": {"tokens": 3, "new": True, "rotary": True},
    "drafts, a window, dense rows": {
        "tokens": 2,
        "new": True,
        "paged": False,
        "window_size": (9, 0),
    },
    "drafts that see all": {"tokens": 3, "new": True, "rotary": True, "causal": False},
    "version 3": {"version": 3, "window_size": (9, -1)},
}


def case(
    paged: bool = True,
    rows: list[int] | None = None,
    new: bool = False,
    rotary: bool = False,
    version: int = 2,
    tokens: int = 1,
    **given: Any,
) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
    """Return the function, its tensors and its other arguments."""
    extra: dict[str, Any] = {"causal": True, "return_softmax_lse": True, **given}
    extra["cache_seqlens"] = torch.tensor(LENS, dtype=torch.int32).clamp(max=64 - tokens)
    if paged:
        caches = torch.randn(2, 4 * 4 + 3, 16, 2, 16)
        table = torch.randperm(16).view(4, 4).int()
        extra["page_table" if version == 3 else "block_table"] = table
    else:
        caches = torch.randn(2, 6, 64, 2, 16)
    if rows is not None:
        extra["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    if new:
        extra |= {"k": torch.randn(4, tokens, 2, 16), "v": torch.randn(4, tokens, 2, 16)}
    if rotary:
        angles = torch.randn(64, 6)
        extra |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    module = flash_attn_3 if version == 3 else flash_attn_2
    function = module.flash_attn_with_kvcache
    return function, (torch.randn(4, tokens, 4, 16), caches[0], caches[1]), extra


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_host_s_lengths_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, (q, k_cache, v_cache), extra = case(**CASES[name])
    caches = [k_cache.clone(), v_cache.clone()]
    with monkeypatch.context() as patch:
        patch.setattr(cached, "BY_DEVICE", frozenset())
        wanted, wanted_lse = function(q, *caches, **extra)
    unread(monkeypatch)
    found, lse = function(q, k_cache, v_cache, **extra)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(k_cache, caches[0]) and torch.equal(v_cache, caches[1])


def test_packed_queries_of_other_lengths_are_another_call() -> None:
    """As many tokens in all, but not as many of each sequence."""
    _, (q, *caches), extra = case(tokens=2)
    packed = q.flatten(0, 1)
    for lens in ([2, 2, 2, 2], [1, 3, 2, 2]):
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        table = {"page_table": extra["block_table"], "cache_seqlens": extra["cache_seqlens"]}
        found = flash_attn_3.flash_attn_with_kvcache(
            packed, *caches, causal=True, cu_seqlens_q=starts, **table
        )
        each = [
            flash_attn_3.flash_attn_with_kvcache(
                rows[None], *caches, causal=True, page_table=table["page_table"][i : i + 1],
                cache_seqlens=table["cache_seqlens"][i : i + 1],
            )[0]
            for i, rows in enumerate(packed.split(lens))
        ]  # fmt: skip
        torch.testing.assert_close(found, torch.cat(each), rtol=1e-5, atol=1e-5)


def test_lengths_that_change_in_place_need_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replayed graph does: the same tensors with other numbers in them."""
    function, given, extra = case()
    unread(monkeypatch)
    planned: list[Any] = []
    plan = core.BoundPages._plan
    monkeypatch.setattr(
        core.BoundPages, "_plan", lambda *a: planned.append(plan(*a)) or planned[-1]
    )
    function(*given, **extra)
    lens = extra["cache_seqlens"]
    lens.copy_(torch.tensor([64, 2, 30, 0]))
    extra["block_table"].copy_(extra["block_table"].flip(0))
    found, lse = function(*given, **extra)
    assert planned[0] is planned[1]
    monkeypatch.undo()
    settings.reload()
    fresh = extra | {"cache_seqlens": lens.clone(), "block_table": extra["block_table"].clone()}
    wanted, wanted_lse = function(*given, **fresh)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    assert not found[3].any()  # a row of no keys, as padding is


@pytest.mark.parametrize(
    "change",
    [{"cache_leftpad": torch.tensor([0, 5, 3, 1])}, {"cache_seqlens": torch.tensor(LENS)},
     {"alibi_slopes": torch.rand(4, 4)}],
    ids=["left padding", "int64", "slopes of each row"],
)  # fmt: skip
def test_the_rest_goes_by_the_host_s(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, given, extra = case(paged=False)
    monkeypatch.setattr(cached, "bind_pages", None)  # not called
    out, _ = function(*given, **extra | change)
    assert out.shape == (4, 1, 4, 16)


def test_nobody_goes_by_the_device_s_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYATTN_BACKEND")
    settings.reload()
    function, given, extra = case(new=True)
    fresh = [t.clone() for t in given[1:]]
    with monkeypatch.context() as patch:
        patch.setattr(cached, "BY_DEVICE", frozenset())
        wanted = function(given[0], *fresh, **extra)
    bound_calls: list[Any] = []
    monkeypatch.setattr(
        cached, "bind_pages", lambda *a, **k: bound_calls.append(core.bind_pages(*a, **k))
    )
    found = function(*given, **extra)
    assert bound_calls == [None]
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(given[1], fresh[0]) and torch.equal(given[2], fresh[1])


def test_what_a_graph_can_t_hold_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    function, given, extra = case()
    known = extra | {"cache_seqlens": extra["cache_seqlens"].long()}
    function(*given, **known)
    monkeypatch.setattr(host_copies, "capturing", lambda _: True)
    for others in (known, extra | {"cache_seqlens": extra["cache_seqlens"].long()}):
        with pytest.raises(PolyattnError, match="whose lengths stay on the device"):
            function(*given, **others)
    monkeypatch.setattr(core, "capturing", lambda _: True)
    with pytest.raises(PolyattnError, match="run the step once before"):
        function(*given, **extra)


def test_what_a_graph_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of drafts are planned on the device: before a capture, and kept for it."""
    function, given, extra = case(tokens=3)
    wanted = function(*given, **extra)[0]
    monkeypatch.setattr(core, "capturing", lambda _: True)
    for _ in range(2):
        assert torch.equal(function(*given, **extra)[0], wanted)
    (bound,) = (bound for bound in memo.values() if isinstance(bound, core.BoundPages))
    (kept,) = bound._captured
    assert kept in extra["cache_seqlens"]._polyattn_plans[2].values()
    with pytest.raises(PolyattnError, match="not new views of them"):
        function(*given, **extra | {"cache_seqlens": extra["cache_seqlens"].view(-1)})


def test_nothing_that_is_kept_on_a_tensor_keeps_the_tensor() -> None:
    function, (q, k_cache, v_cache), extra = case()
    function(q, k_cache, v_cache, **extra)
    known = [weakref.ref(t) for t in (k_cache, extra["cache_seqlens"], extra["block_table"])]
    del k_cache, extra
    gc.collect()
    assert [ref() for ref in known] == [None] * 3
