"""A cache that a device has no memory for: what the error says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from polyattn import (
    CacheFormat,
    CompressorSpec,
    IndexerSpec,
    KVCache,
    LayerGroup,
    LayerSpec,
    RecurrentSpec,
    SparseSpec,
)
from polyattn.errors import CacheError
from polyattn.families.sparse.compressor import Compressor
from polyattn.families.sparse.indexer import Indexer
from polyattn.runtime.cache import room as rooms
from polyattn.runtime.cache.room import room

SIZES: dict[str, Any] = {"num_heads": 4, "head_size": 64, "dtype": "float32"}
LAYER = LayerSpec(**SIZES)
RECURRENT = LayerSpec(
    kind="short_conv", num_heads=8, head_size=1, dtype="float32",
    recurrent=RecurrentSpec(conv_width=4, activation="silu"),
)  # fmt: skip
SPARSE = LayerSpec(
    kind="sparse", sparse=SparseSpec(budget=8),
    indexer=IndexerSpec(num_heads=4, head_size=32, budget=8), **SIZES,
)  # fmt: skip
ALLOCATIONS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "keys and values": ("num_blocks", LayerGroup(LAYER).allocate_cache),
    "states": ("num_slots", LayerGroup(RECURRENT).allocate_states),
    "index keys": ("num_blocks", Indexer(SPARSE).allocate_cache),
    "a compressor's states": (
        "num_slots", Compressor(CompressorSpec(size=8, tokens_per_entry=4)).allocate_states,
    ),
}  # fmt: skip


@pytest.mark.parametrize("count", [10**13, 10**18, 10**30])
@pytest.mark.parametrize("what", ALLOCATIONS)
def test_a_cache_that_has_no_room_names_the_count_and_what_fits(
    what: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "free_bytes", lambda device: 3 << 30)
    field, allocate = ALLOCATIONS[what]
    said = (
        rf"^{field}={count} needs [\d.,e+]+ GiB and cpu has 3 free; lower {field} to \d+ or less$"
    )
    with pytest.raises(CacheError, match=said) as error:
        allocate(count)
    assert isinstance(error.value, MemoryError)


def test_as_many_blocks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "free_bytes", lambda device: 10 << 20)
    form = CacheFormat(block_size=16, num_kv_heads=4, head_size=64, v_head_size=64, dtype="float32")
    with pytest.raises(CacheError, match="lower num_blocks to 320 or less"):
        KVCache.allocate(form, 10**13)


def test_what_the_host_has_left() -> None:
    free = rooms.free_bytes(torch.device("cpu"))
    assert free is None or 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [0, -1, True, 2.0, None])
@pytest.mark.parametrize("what", ALLOCATIONS)
def test_a_count_is_a_positive_integer(what: str, count: Any) -> None:
    field, allocate = ALLOCATIONS[what]
    with pytest.raises(CacheError, match=rf"{field}={count!r} must be a positive integer"):
        allocate(count)


@pytest.mark.parametrize("free", [None, 1 << 40])
def test_what_an_allocator_says_is_told_where_it_is_all_that_is_known(
    free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No common question says what other chips have left; a fragmented GPU has enough by the count."""
    monkeypatch.setattr(rooms, "free_bytes", lambda device: free)
    with (
        pytest.raises(CacheError, match=r"lower num_slots \(OutOfMemoryError: no block of 8192\)$"),
        room("num_slots", 2, 4096, torch.device("meta")),
    ):
        raise torch.OutOfMemoryError("no block of 8192")


def test_an_error_that_is_not_of_memory_passes() -> None:
    with (
        pytest.raises(RuntimeError, match="^an illegal address$"),
        room("num_slots", 2, 4096, torch.device("cpu")),
    ):
        raise RuntimeError("an illegal address")
