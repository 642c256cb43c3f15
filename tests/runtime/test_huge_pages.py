"""Does a cache ask for huge pages?"""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from polyattn import CacheFormat, Indexer, IndexerSpec, LayerSpec, SparseSpec
from polyattn.runtime.cache import huge_pages
from polyattn.runtime.cache.huge_pages import LEAST
from polyattn.runtime.cache.kv_cache import KVCache
from torch import Tensor

FORM = CacheFormat(block_size=16, num_kv_heads=2, head_size=64, v_head_size=64, dtype="bfloat16")
BLOCK = 16 * 2 * 64 * 2


def flags(tensor: Tensor) -> set[str]:
    """The kernel's flags of the mapping that holds the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.numel() * tensor.itemsize // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        low, _, high = first.partition("-")
        if high:
            inside = int(low, 16) <= middle < int(high, 16)
        elif inside and first == "VmFlags:":
            return set(rest)
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="advice of Linux's")
def test_a_large_cache_asks_and_a_small_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    large = KVCache.allocate(FORM, 2 * LEAST // BLOCK)
    assert "hg" in flags(large.key) and "hg" in flags(large.value)
    large.key.fill_(1.0)
    assert float(large.key.float().sum()) == large.key.numel()
    # A small one may lie in what a large one has left, whose flags stay: so the calls are counted.
    lengths: list[int] = []
    monkeypatch.setattr(
        huge_pages, "_madvise", lambda: lambda at, length, advice: lengths.append(length)
    )
    KVCache.allocate(FORM, 1)
    assert not lengths
    KVCache.allocate(FORM, 2 * LEAST // BLOCK)
    assert len(lengths) == 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="advice of Linux's")
def test_a_large_cache_of_index_keys_asks_and_is_zero() -> None:
    spec = LayerSpec(
        kind="sparse", num_heads=4, head_size=64, dtype="float32", sparse=SparseSpec(budget=8),
        indexer=IndexerSpec(num_heads=4, head_size=128, budget=8),
    )  # fmt: skip
    cache = Indexer(spec).allocate_cache(2 * LEAST // (64 * 128 * 4), 64)
    assert "hg" in flags(cache)
    assert not cache.any()
