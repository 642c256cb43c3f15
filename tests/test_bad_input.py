"""Every malformed batch, tensor or cache gets an error that names it, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from polyattn import Attention, Batch, KVCache, LayerSpec, select
from polyattn.errors import BatchError, CacheError, PluginError, SpecError
from polyattn.runtime.kv_cache import KVCacheSpec

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
TABLE = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)


class Step:
    """A good step: two sequences, 1 and 5 new tokens, 20 and 33 long."""

    def __init__(self) -> None:
        self.layer = Attention(select(SPEC, "cpu"), checks=True)
        self.cache = self.layer.selection.cache_spec(8).allocate()
        self.cache.key.normal_()
        self.cache.value.normal_()
        self.batch: dict[str, Any] = {
            "query_start_loc": [0, 1, 6],
            "seq_lens": [20, 33],
            "block_table": TABLE,
            "slot_mapping": torch.tensor([19, 76, 77, 78, 79, 80]),
        }
        self.tensors: dict[str, Any] = {
            "query": torch.randn(6, 4, 32),
            "key": torch.randn(6, 2, 32),
            "value": torch.randn(6, 2, 32),
        }

    def run(self) -> torch.Tensor:
        batch = Batch(**self.batch)
        out = self.layer(**self.tensors, cache=self.cache, batch=batch)
        assert isinstance(out, torch.Tensor)
        return out


def test_the_good_step_runs() -> None:
    assert Step().run().isfinite().all()


BATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("decreasing", {"query_start_loc": [0, 7, 6]}, "query_start_loc[2]=6 is less"),
    ("negative", {"query_start_loc": [0, -1, 6]}, "query_start_loc[1]=-1"),
    ("not from 0", {"query_start_loc": [1, 2, 6]}, "must start with 0"),
    ("lengths don't match", {"seq_lens": [20]}, "query_start_loc has 3 entries and seq_lens 1"),
    ("short seq", {"seq_lens": [20, 4]}, "seq_lens[1]=4 is shorter than its query of 5"),
    ("negative seq", {"seq_lens": [20, -4]}, "seq_lens[1]=-4 is negative"),
    ("padding with a slot", {"seq_lens": [0, 33]}, "seq_lens[0]=0 is shorter than its query"),
    ("narrow table", {"block_table": TABLE[:, :2]}, "sequence 1 of length 33 needs 3"),
    ("table dtype", {"block_table": TABLE.long()}, "block_table is torch.int64"),
    ("table rows", {"block_table": TABLE[:1]}, "block_table is torch.int32 of shape (1, 3)"),
    ("no table", {"block_table": None}, "has no block_table"),
    ("outside", {"block_table": TABLE + 4}, "block_table[1, 1]=8 points outside"),
    ("below", {"block_table": TABLE - 1}, "block_table[0, 0]=-1 points outside"),
    ("slots dtype", {"slot_mapping": torch.zeros(6, dtype=torch.int32)}, "slot_mapping is"),
    ("slots count", {"slot_mapping": torch.arange(5)}, "slot_mapping is torch.int64 of shape (5,)"),
    ("slot range", {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 128])}, "slot_mapping[5]=128"),
    ("slot -2", {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, -2])}, "slot_mapping[5]=-2"),
    ("slot twice", {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 4])}, "writes slot 4 twice"),
]


@pytest.mark.parametrize(("changes", "says"), [b[1:] for b in BATCHES], ids=[b[0] for b in BATCHES])
def test_bad_batches(changes: dict[str, Any], says: str) -> None:
    step = Step()
    step.batch |= changes
    before = step.cache.key.clone()
    with pytest.raises(BatchError) as caught:
        step.run()
    assert says in str(caught.value)
    assert torch.equal(step.cache.key, before), "a refused step must change nothing"


TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("query heads", {"query": torch.randn(6, 5, 32)}, "query is (6, 5, 32)"),
    ("query rank", {"query": torch.randn(6, 128)}, "query is (6, 128)"),
    ("query dtype", {"query": torch.randn(6, 4, 32).half()}, "torch.float16; it must be"),
    ("query tokens", {"query": torch.randn(7, 4, 32)}, "query is (7, 4, 32)"),
    ("key heads", {"key": torch.randn(6, 4, 32)}, "key is (6, 4, 32)"),
    ("value dtype", {"value": torch.randn(6, 2, 32).double()}, "value is"),
    ("no value", {"value": None}, "key and value come together"),
    ("out shape", {"out": torch.randn(6, 4, 31)}, "out is (6, 4, 31)"),
    ("out dtype", {"out": torch.randn(6, 4, 32).half()}, "out is"),
]


@pytest.mark.parametrize(("changes", "says"), [t[1:] for t in TENSORS], ids=[t[0] for t in TENSORS])
def test_bad_tensors(changes: dict[str, Any], says: str) -> None:
    step = Step()
    step.tensors |= changes
    before = step.cache.key.clone()
    with pytest.raises(BatchError) as caught:
        step.run()
    assert says in str(caught.value)
    assert torch.equal(step.cache.key, before)


def cache_of(**changes: Any) -> KVCache:
    base = {"num_blocks": 8, "block_size": 16, "num_kv_heads": 2, "head_size": 32}
    return KVCacheSpec(**(base | {"v_head_size": 32, "dtype": "float32"} | changes)).allocate()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: None, "pass cache="),
        (lambda: cache_of(block_size=32), "cache.key is (8, 32, 2, 32)"),
        (lambda: cache_of(num_kv_heads=4), "cache.key is"),
        (lambda: cache_of(v_head_size=64), "cache.value is"),
        (lambda: cache_of(layout="HND"), "layout is HND, the selection's NHD"),
    ],
)
def test_bad_caches(make: Callable[[], KVCache | None], says: str) -> None:
    step = Step()
    step.cache = make()  # type: ignore[assignment]
    with pytest.raises(BatchError) as caught:
        step.run()
    assert says in str(caught.value)


def test_caches_that_cannot_be() -> None:
    with pytest.raises(CacheError, match="num_blocks=0"):
        cache_of(num_blocks=0)
    with pytest.raises(CacheError, match="did you mean 'float32'"):
        cache_of(dtype="float23")
    with pytest.raises(CacheError, match="must both be"):
        KVCache(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    with pytest.raises(CacheError, match="contiguous"):
        KVCache(*(torch.zeros(2, 8, 4, 16).transpose(2, 3),) * 2)
    with pytest.raises(CacheError, match="cache torch.float16"):
        cache_of(dtype="float16").write(
            torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), torch.tensor([0])
        )


def test_sinks_slopes_and_scales() -> None:
    selection = select(SPEC, "cpu")
    with pytest.raises(SpecError, match="sinks was given"):
        Attention(selection, sinks=torch.zeros(4))
    with pytest.raises(SpecError, match="sinks is missing"):
        Attention(select(SPEC.replace(learned_sinks=True), "cpu"))
    with pytest.raises(SpecError, match=r"alibi_slopes has shape \(3,\)"):
        Attention(select(SPEC.replace(alibi=True), "cpu"), alibi_slopes=torch.zeros(3))
    with pytest.raises(SpecError, match=r"k_scale=0\.0"):
        Attention(selection, k_scale=0.0)


def test_no_batch_and_profiles() -> None:
    step = Step()
    with pytest.raises(BatchError, match="no batch"):
        step.layer(**step.tensors, cache=step.cache)
    with pytest.raises(PluginError, match="profile to reason about"):
        Attention(select(SPEC, "x86-amx"))


def test_a_failed_plan_is_not_kept() -> None:
    step = Step()
    step.run()
    bad = Batch([0, 1], [100], TABLE[:1])
    with pytest.raises(BatchError):
        step.layer.plan(bad)
    with pytest.raises(BatchError):
        step.layer(torch.randn(1, 4, 32), None, None, step.cache, bad)
    assert step.run().isfinite().all()
