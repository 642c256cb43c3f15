"""Contiguous caches, [sequences, 2, heads, max_len, size]: sequences as single blocks of one storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreting import interpreted
from polyattn import Attention, Batch, CacheFormat, KVCache, LayerGroup, LayerSpec, select
from polyattn.errors import CacheError, SelectionError, SettingsError
from polyattn.families.attention import reference
from polyattn.settings import current_settings, load
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

LONGEST = 96
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=LONGEST)
SETTINGS = replace(current_settings(), layout="contiguous")
PLACES, QUERIES, LENS = [3, 0, 5], [1, 7, 1], [96, 40, 1]


def serve(backend: str, changes: dict[str, Any]) -> None:
    """A mixed step whose keys lie in an engine's own storage; all else in it is NaN or unchanged."""
    spec = SPEC.replace(**changes)
    group = LayerGroup(select(spec, "cpu", backend=backend, settings=SETTINGS))
    assert group.cache_format is not None and group.cache_format.layout == "contiguous"
    generator = torch.Generator().manual_seed(0)
    scale = 0.05 if "kv_cache_dtype" in changes else 1.0
    layer = Attention(group, k_scale=scale, v_scale=scale, checks=True)
    storage = torch.empty(6, 2, 2, LONGEST, 16, dtype=group.allocate_cache(1).key.dtype)
    storage.fill_(7) if storage.dtype == torch.int8 else storage.fill_(torch.nan)
    cache = KVCache.contiguous(storage)
    assert cache.format == group.cache_format
    table = cache.sequence_table(PLACES)

    def tokens(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, 16, generator=generator)

    contexts = [n - q for n, q in zip(LENS, QUERIES, strict=True)]
    before = Batch.from_lens(contexts, contexts, table, LONGEST)
    layer.store(
        tokens(before.num_tokens, 2), tokens(before.num_tokens, 2), cache, before.slot_mapping
    )
    batch = Batch.from_lens(QUERIES, LENS, table, LONGEST)
    query, key, value = (tokens(batch.num_tokens, n) for n in (4, 2, 2))
    out = layer(query, key, value, cache, batch)
    expected, _ = reference.forward(spec, query, None, None, cache, batch, layer.params)
    assert output_error(out, expected) <= tolerance_of(spec).output
    if scale == 1.0:  # the storage itself holds what was stored, where its shape says
        torch.testing.assert_close(storage[3, 0, :, 95], key[0])
        torch.testing.assert_close(storage[0, 1, :, 39], value[7])
    untouched = storage[[1, 2, 4]].float()
    assert (untouched == 7).all() if storage.dtype == torch.int8 else untouched.isnan().all()


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "int8"}, {"sliding_window": 20}])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_sequences_are_blocks_of_one_storage(backend: str, changes: dict[str, Any]) -> None:
    serve(backend, changes)


def test_the_interpreted_kernel_reads_it_too() -> None:
    pytest.importorskip("triton")
    interpreted(__file__)


def test_other_backends_refuse_it_by_name() -> None:
    with pytest.raises(SelectionError, match="wanted contiguous, supported: NHD, HND .FLASHINFER"):
        select(SPEC.replace(dtype="bfloat16", head_size=128), "h100-sxm", backend="FLASHINFER",
               settings=SETTINGS)  # fmt: skip
    with pytest.raises(SelectionError, match="a block that holds a whole sequence"):
        select(SPEC.replace(block_size=None), "cpu", settings=SETTINGS)
    with pytest.raises(SelectionError, match="keys and values of one size"):
        select(SPEC.replace(v_head_size=8), "cpu", settings=SETTINGS)
    chosen = select(SPEC, "cpu").cache_format
    assert chosen is not None and chosen.layout != "contiguous", "nobody's choice but the engine's"


def test_places_may_be_a_tensor() -> None:
    cache = KVCache.contiguous(torch.zeros(3, 2, 1, 8, 4))
    assert torch.equal(cache.sequence_table(torch.tensor([2, 0])), cache.sequence_table([2, 0]))


def test_bad_input() -> None:
    cache = KVCache.contiguous(torch.zeros(2, 2, 1, 8, 4))
    for places, text in (
        ([2], r"sequences\[0\]=2"),
        (torch.tensor([0, 2]), r"sequences\[1\]=2"),
        ([0, -1], r"sequences\[1\]=-1"),
        ([True], "True"),
    ):
        with pytest.raises(CacheError, match=text):
            cache.sequence_table(places)
    with pytest.raises(CacheError, match="isn't contiguous"):
        KVCache.packed(torch.zeros(2, 2, 1, 8, 4), "HND").sequence_table([0])
    with pytest.raises(CacheError, match="must be 5-D"):
        KVCache.contiguous(torch.zeros(2, 3, 1, 8, 4))
    with pytest.raises(CacheError, match="differ in size"):
        KVCache.allocate(CacheFormat(block_size=8, num_kv_heads=1, head_size=8, v_head_size=4,
                                     dtype="float32", layout="contiguous"), 2)  # fmt: skip


def test_the_setting_names_it() -> None:
    assert load({"POLYATTN_LAYOUT": "Contiguous"}, {}, "").layout == "contiguous"
    with pytest.raises(SettingsError, match="POLYATTN_LAYOUT"):
        load({"POLYATTN_LAYOUT": "dense"}, {}, "")


if __name__ == "__main__":
    serve("TRITON_ATTN", {})
    serve("TRITON_ATTN", {"kv_cache_dtype": "int8"})
