"""A cache that a caller drops is freed at once: no call keeps it, and no circle waits for a collector.

An engine that is built after another sizes its own cache by the memory that it finds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from polyattn import settings
from polyattn.calls import caller_cache as cached
from polyattn.calls import lengths_on_device
from polyattn.calls.memo import memo
from polyattn_flash_attn import flash_attn_2, flash_attn_3
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

ROWS, PAGE, HEADS, SIZE = 3, 16, 2, 16
Call = Callable[[Tensor, Tensor], object]
"""Attends over, or with, these keys and values."""


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    torch.manual_seed(0)
    gc.disable()
    with torch.no_grad():
        yield
    gc.enable()


@pytest.fixture
def by_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lengths stay where they are, and VANILLA, by name, goes by the device's."""
    monkeypatch.setenv("POLYATTN_BACKEND", "VANILLA")
    settings.reload()
    monkeypatch.setattr(cached, "BY_DEVICE", frozenset({"cpu"}))
    memo.clear()
    yield
    memo.clear()


def dropped(shape: tuple[int, ...], call: Call, times: int = 2) -> bool:
    """Whether keys and values of this shape are freed once their caller has dropped them."""
    key, value = (torch.randn(shape) for _ in range(2))
    held = [StorageWeakRef(t.untyped_storage()) for t in (key, value)]
    for _ in range(times):  # what is known of a way of calling, too, keeps nothing
        call(key, value)
    del key, value
    return all(ref.expired() for ref in held)


def with_kvcache(module: Any, tokens: int = 1, dense: bool = False, **given: Any) -> Call:
    rows = torch.randn(ROWS, tokens, 4, SIZE)
    extra = {"cache_seqlens": torch.tensor([5, 20, 31], dtype=torch.int32), "causal": True, **given}
    if not dense:
        name = "page_table" if module is flash_attn_3 else "block_table"
        extra[name] = torch.arange(ROWS * 3, dtype=torch.int32).view(ROWS, 3)
    if given.pop("append", False):
        del extra["append"]
        extra |= {name: torch.randn(ROWS, tokens, HEADS, SIZE) for name in ("k", "v")}
    if "rotary_cos" in given:
        extra |= {"rotary_sin": torch.randn(64, 4)}
    return lambda key, value: module.flash_attn_with_kvcache(rows, key, value, **extra)


def varlen(module: Any, paged: bool = False) -> Call:
    starts = torch.tensor([0, 4, 9, 12], dtype=torch.int32)
    query, more = torch.randn(12, 4, SIZE), {}
    if paged:
        more = {"block_table": torch.arange(ROWS * 3, dtype=torch.int32).view(ROWS, 3)}
    return lambda key, value: module.flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5, max_seqlen_k=5,
        causal=True, **more,
    )  # fmt: skip


def rows(module: Any) -> Call:
    query = torch.randn(ROWS, 7, 4, SIZE)
    return lambda key, value: module.flash_attn_func(query, key, value, causal=True)


PAGES, DENSE = (ROWS * 3, PAGE, HEADS, SIZE), (ROWS, 48, HEADS, SIZE)
TURNS = {"rotary_cos": torch.randn(64, 4), "append": True}
CACHED: dict[str, tuple[tuple[int, ...], Call]] = {
    f"{name}, version {version}": (shape, with_kvcache(module, **given))
    for version, module in ((2, flash_attn_2), (3, flash_attn_3))
    for name, shape, given in (
        ("pages", PAGES, {}), ("dense", DENSE, {"dense": True}), ("drafts", PAGES, {"tokens": 3}),
        ("appended", PAGES, {"append": True}), ("rotated", PAGES, TURNS),
        ("appended, dense", DENSE, {"append": True, "dense": True}),
    )
}  # fmt: skip
GIVEN: dict[str, tuple[tuple[int, ...], Call]] = {
    f"{name}, version {version}": (shape, call)
    for version, module in ((2, flash_attn_2), (3, flash_attn_3))
    for name, shape, call in (
        ("whole rows", (ROWS, 7, HEADS, SIZE), rows(module)),
        ("varlen", (12, HEADS, SIZE), varlen(module)),
    )
} | {"varlen, pages": (PAGES, varlen(flash_attn_2, paged=True))}


@pytest.mark.parametrize("name", CACHED | GIVEN)
def test_by_the_host_s_lengths(name: str) -> None:
    assert dropped(*(CACHED | GIVEN)[name])


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.usefixtures("by_device")
def test_by_the_device_s_lengths_and_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, call = CACHED[name]
    assert dropped(shape, call)
    for module in (lengths_on_device, cached):  # and what a graph is recorded of
        monkeypatch.setattr(module, "capturing", lambda _: True)
    assert dropped(shape, call)


def test_a_layer_of_an_engine_s_that_is_dropped() -> None:
    """Caches as engines have them: views of one tensor, each kept by its layer."""
    whole = torch.randn(2, 2, *PAGES)
    held = StorageWeakRef(whole.untyped_storage())
    layers = [(whole[0, layer], whole[1, layer]) for layer in range(2)]
    call = with_kvcache(flash_attn_2)
    for caches in layers * 2:
        call(*caches)
    del whole, layers, caches
    assert held.expired()


def test_one_that_is_kept_is_seen() -> None:
    kept: list[Tensor] = []
    assert not dropped((4,), lambda key, value: kept.append(key.view(2, 2)))
