"""Every malformed batch, tensor or cache gets an error that names it, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polyattn
import pytest
import torch
from devices import everywhere
from polyattn import (
    Attention,
    AttentionState,
    Batch,
    CacheFormat,
    KVCache,
    LayerGroup,
    LayerSpec,
    StateCache,
    attention,
    merge_states,
    select,
    select_layers,
)
from polyattn.errors import (
    BatchError,
    CacheError,
    PluginError,
    PolyattnError,
    SettingsError,
    SpecError,
)
from polyattn.runtime import inputs
from polyattn.runtime.cache.kv_cache import quantize
from torch._subclasses.fake_tensor import FakeTensorMode

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
TABLE = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)


class Step:
    """A good step: two sequences, 1 and 5 new tokens, 20 and 33 long."""

    def __init__(self) -> None:
        self.layer = Attention(select(SPEC, "cpu"), checks=True)
        self.cache = self.layer.group.allocate_cache(8)
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
        out = self.layer(**self.tensors, cache=self.cache, plan=batch)
        assert isinstance(out, torch.Tensor)
        return out


def test_the_good_step_runs() -> None:
    assert Step().run().isfinite().all()
    column = Batch([0, 1, 2], [5, 5], TABLE[:, :2][:, ::2])  # one has no neighbour
    assert column.block_table is not None and column.block_table.stride(1) == 2


BATCHES: list[tuple[str, dict[str, Any], str]] = [
    (
        "positions",
        {"positions": torch.zeros(6)},
        "positions is torch.float32 of shape (6,); it must be",
    ),
    ("apart", {"block_table": TABLE.repeat(1, 2)[:, ::2]}, "block_table's columns are 2 apart"),
    ("decreasing", {"query_start_loc": [0, 7, 6]}, "query_start_loc[2]=6 is less"),
    ("negative", {"query_start_loc": [0, -1, 6]}, "query_start_loc[1]=-1"),
    ("not from 0", {"query_start_loc": [1, 2, 6]}, "must start with 0"),
    ("lengths don't match", {"seq_lens": [20]}, "query_start_loc has 3 entries and seq_lens 1"),
    ("short seq", {"seq_lens": [20, 4]}, "seq_lens[1]=4 is shorter than its query of 5"),
    ("negative seq", {"seq_lens": [20, -4]}, "seq_lens[1]=-4 is negative"),
    ("endless seq", {"seq_lens": [20, 2**29 + 1]}, "seq_lens[1]=536870913 is more than 536870912"),
    ("padding with a slot", {"seq_lens": [0, 33]}, "seq_lens[0]=0 is shorter than its query"),
    ("narrow table", {"block_table": TABLE[:, :2]}, "sequence 1 of length 33 needs 3"),
    ("table dtype", {"block_table": TABLE.long()}, "block_table is torch.int64"),
    ("table turned", {"block_table": TABLE.t().contiguous().t()}, "pass block_table.contiguous()"),
    ("table list", {"block_table": [[0, 1, 2], [3, 4, 5]]}, "block_table=[[0, 1, 2]"),
    (
        "elsewhere",
        {"block_table": TABLE.to("meta"), "slot_mapping": None},
        "the batch is on meta, the group on cpu",
    ),
    (
        "slots elsewhere",
        {"slot_mapping": torch.arange(6, device="meta")},
        "slot_mapping is on meta",
    ),
    ("slots list", {"slot_mapping": [19, 76, 77, 78, 79, 80]}, "slot_mapping=[19, 76"),
    ("table rows", {"block_table": TABLE[:1]}, "block_table is torch.int32 of shape (1, 3)"),
    ("no table", {"block_table": None}, "has no block_table"),
    ("outside", {"block_table": TABLE + 4}, "block_table[1, 1]=8 points outside"),
    ("below", {"block_table": TABLE - 1}, "block_table[0, 0]=-1 points outside"),
    ("slots dtype", {"slot_mapping": torch.zeros(6, dtype=torch.int16)}, "slot_mapping is"),
    ("slots count", {"slot_mapping": torch.arange(5)}, "slot_mapping is torch.int64 of shape (5,)"),
    ("slot range", {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 128])}, "slot_mapping[5]=128"),
    ("slot -2", {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, -2])}, "slot_mapping[5]=-2"),
    ("slot twice", {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 4])}, "writes slot 4 twice"),
]


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA", "VANILLA"])
@pytest.mark.parametrize("wrong", [8, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("at", [(0, 0), (1, 2)])
def test_a_hosts_block_table_is_checked_before_anything_runs(
    backend: str, wrong: int, at: tuple[int, int]
) -> None:
    """Without `checks`, too; each of the group's layers refuses."""
    step = Step()
    step.layer = Attention(select(SPEC, "cpu", backend=backend), checks=False)
    table = TABLE.clone()
    table[at] = wrong
    batch = Batch(**(step.batch | {"block_table": table}))
    before, out = step.cache.key.clone(), torch.full((6, 4, 32), 7.0)
    for _ in range(2):
        with pytest.raises(BatchError) as caught:
            step.layer(**step.tensors, cache=step.cache, plan=batch, out=out)
        says = f"block_table[{at[0]}, {at[1]}]={wrong} points outside the cache's 8 blocks"
        assert says in str(caught.value)
    assert torch.equal(step.cache.key, before) and (out == 7.0).all()


def test_entries_that_no_query_reads_may_be_anything() -> None:
    """Behind a sequence's end, left of its window, and of rows without queries."""
    step = Step()
    wide = torch.full((3, 5), -(2**31), dtype=torch.int32)
    wide[0, 1], wide[1, :3] = 1, TABLE[1]  # the first sequence's window begins in its second block
    spec = replace(SPEC, sliding_window=4)
    layer = Attention(select(spec, "cpu"), checks=False)
    batch = Batch([0, 1, 6, 6], [20, 33, 30], wide, step.batch["slot_mapping"])
    assert layer(**step.tensors, cache=step.cache, plan=batch).isfinite().all()


def test_a_query_of_another_dtype_is_told_what_sets_it() -> None:
    query = torch.randn(6, 4, 32)
    step = Step()
    layer = Attention(select(replace(SPEC, dtype="bfloat16"), "cpu"))
    cache = layer.group.allocate_cache(8)
    with pytest.raises(BatchError, match=r"LayerSpec.dtype sets the dtype; the default.*bfloat16"):
        layer(query, query[:, :2], query[:, :2], cache, Batch(**step.batch))
    with pytest.raises(BatchError) as caught:
        layer(query[:, :3].bfloat16(), query, query, cache, Batch(**step.batch))
    assert "LayerSpec" not in str(caught.value)


@pytest.mark.parametrize("block", [8, 32])
def test_a_batch_made_for_other_blocks(block: int) -> None:
    """Its slots would be other tokens'."""
    step = Step()
    batch = Batch.from_lens([1, 5], [20, 16], TABLE, block)
    before = step.cache.key.clone()
    with pytest.raises(BatchError, match=f"block_size={block}.*differs from the cache's 16"):
        step.layer(**step.tensors, cache=step.cache, plan=batch)
    assert torch.equal(step.cache.key, before)


TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("query heads", {"query": torch.randn(6, 5, 32)}, "query is (6, 5, 32)"),
    ("query rank", {"query": torch.randn(6, 4, 32, 1)}, "query is (6, 4, 32, 1)"),
    ("query rows", {"query": torch.randn(6, 100)}, "4 heads of 32 are 128"),
    ("query dtype", {"query": torch.randn(6, 4, 32).half()}, "torch.float16; it must be"),
    ("query tokens", {"query": torch.randn(7, 4, 32)}, "query is (7, 4, 32)"),
    ("key heads", {"key": torch.randn(6, 4, 32)}, "key is (6, 4, 32)"),
    ("value dtype", {"value": torch.randn(6, 2, 32).double()}, "value is"),
    ("no value", {"value": None}, "key and value come together"),
    ("query list", {"query": [1]}, "query=[1] must be a tensor on cpu"),
    ("no query", {"query": None}, "query=None must be a tensor on cpu"),
    ("value list", {"value": [1]}, "value=[1] must be a tensor on cpu"),
    ("out list", {"out": [1]}, "out=[1] must be a tensor on cpu"),
    (
        "query elsewhere",
        {"query": torch.empty(6, 4, 32, device="meta")},
        "query is on meta, the layer on cpu",
    ),
    ("key elsewhere", {"key": torch.empty(6, 2, 32, device="meta")}, "key is on meta"),
    ("value elsewhere", {"value": torch.empty(6, 2, 32, device="meta")}, "value is on meta"),
    ("out elsewhere", {"out": torch.empty(6, 4, 32, device="meta")}, "out is on meta"),
    ("rows elsewhere", {"query": torch.empty(6, 128, device="meta")}, "query is on meta"),
    ("out shape", {"out": torch.randn(6, 4, 31)}, "out is (6, 4, 31)"),
    ("out dtype", {"out": torch.randn(6, 4, 32).half()}, "out is"),
]


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        pytest.param(part, changes, says, id=name)
        for part, bad in (("batch", BATCHES), ("tensors", TENSORS))
        for name, changes, says in bad
    ],
)
def test_bad_batches_and_tensors(part: str, changes: dict[str, Any], says: str) -> None:
    step = Step()
    getattr(step, part).update(changes)
    before = step.cache.key.clone()
    with pytest.raises(BatchError) as caught:
        step.run()
    assert says in str(caught.value)
    assert torch.equal(step.cache.key, before), "a refused step must change nothing"


def cache_of(**changes: Any) -> KVCache:
    num_blocks = changes.pop("num_blocks", 8)
    base = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "v_head_size": 32}
    return KVCache.allocate(CacheFormat(**(base | {"dtype": "float32"} | changes)), num_blocks)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: None, "pass cache="),
        (lambda: "a cache", "cache is a str; it must be a KVCache"),
        (
            lambda: KVCache.allocate(cache_of().format, 8, "meta"),
            "the cache is on meta, the layer on",
        ),
        (lambda: cache_of(block_size=32), "the cache's block_size is 32, the selection's 16"),
        (lambda: cache_of(num_kv_heads=4), "the cache's num_kv_heads is 4"),
        (lambda: cache_of(v_head_size=64), "the cache's v_head_size is 64"),
        (
            lambda: cache_of(layout="HND"),
            "the cache's layout is HND, the selection's NHD; allocate it with group.allocate_cache(n), "
            "or use select(spec, settings=Settings(layout='HND'))",
        ),
        (
            lambda: cache_of(dtype="bfloat16"),
            "the cache's dtype is bfloat16, the selection's float32",
        ),
        (lambda: cache_of(dtype="int8"), "the cache's dtype is int8, the selection's float32"),
    ],
)
def test_bad_caches(make: Callable[[], KVCache | None], says: str) -> None:
    step = Step()
    step.cache = make()  # type: ignore[assignment]
    with pytest.raises(PolyattnError) as caught:
        step.run()
    assert says in str(caught.value)


def test_caches_that_cannot_be() -> None:
    with pytest.raises(CacheError, match="num_blocks=0"):
        cache_of(num_blocks=0)
    with pytest.raises(CacheError, match="'float23' is unknown; valid: auto"):
        cache_of(dtype="float23")
    with pytest.raises(CacheError, match="must both be"):
        KVCache(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    for key, value in ((np.zeros((2, 8, 4, 16)), torch.zeros(2, 8, 4, 16)), (None, None)):
        for one, other, name in ((key, value, "key"), (torch.zeros(2, 8, 4, 16), key, "value")):
            with pytest.raises(
                CacheError, match=rf"{name}(=None| is an array .* and) must be a tensor"
            ):
                KVCache(one, other)
    for make in (
        KVCache.packed,
        KVCache.contiguous,
        lambda t: KVCache.joined(t, cache_of().format),
    ):
        with pytest.raises(
            CacheError, match="storage is an array .* must be a tensor; torch.as_ten"
        ):
            make(np.zeros((2, 2, 8, 4, 16)))
    with pytest.raises(CacheError, match="data is an array .* must be a tensor; torch.as_tensor"):
        StateCache(np.zeros((2, 8)))
    with pytest.raises(CacheError, match="contiguous"):
        KVCache(*(torch.zeros(2, 8, 4, 16).transpose(2, 3),) * 2)
    with pytest.raises(CacheError, match=r"CacheFormat.layout='hnd' is unknown.*'HND'"):
        cache_of(layout="hnd")
    with pytest.raises(CacheError, match="cache torch.float16"):
        quantize(torch.zeros(1, 2, 32), torch.float16, 1.0)


def test_sinks_slopes_and_scales() -> None:
    selection = select(SPEC, "cpu")
    with pytest.raises(
        SpecError, match=r"sinks needs learned_sinks=True in the spec; .*leave sinks out"
    ):
        Attention(selection, sinks=torch.zeros(4))
    with pytest.raises(
        SpecError, match=r"sinks=None, and the spec has learned_sinks=True; pass float32 \(4,\)"
    ):
        Attention(select(SPEC.replace(learned_sinks=True), "cpu"))
    with pytest.raises(SpecError, match=r"alibi_slopes has shape \(3,\)"):
        Attention(select(SPEC.replace(alibi=True), "cpu"), alibi_slopes=torch.zeros(3))
    drawn = torch.zeros(4, dtype=torch.complex64)  # its imaginary part would be dropped
    with pytest.raises(SpecError, match=r"sinks is torch\.complex64; it must be real"):
        Attention(select(SPEC.replace(learned_sinks=True), "cpu"), sinks=drawn)
    query = torch.randn(1, 2, 4, 32)
    with pytest.raises(BatchError, match=r"sinks is torch\.complex64"):
        attention(query, query, query, sinks=drawn)
    quantised = select(SPEC.replace(kv_cache_dtype="int8"), "cpu")
    with pytest.raises(SpecError, match=r"k_scale=0\.0"):
        Attention(quantised, k_scale=0.0)
    with pytest.raises(SpecError, match=r"v_scale=nan"):
        Attention(quantised, v_scale=float("nan"))
    with pytest.raises(
        SpecError, match=r"k_scale=0\.5 scales a quantised cache, and this one isn't"
    ):
        Attention(selection, k_scale=0.5)


def test_what_is_no_batch_spec_or_store() -> None:
    step, group = Step(), LayerGroup(select(SPEC, "cpu"))
    with pytest.raises(BatchError, match="batch=None must be a Batch"):
        group.plan(None)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="reuse= is a plan of another group"):
        group.plan(Batch(**step.batch), reuse=3)  # type: ignore[arg-type]
    captured, more = group.plan(Batch(**step.batch)), torch.zeros(1, 9, dtype=torch.int32)
    with pytest.raises(BatchError, match="1 sequences, 1 query tokens> can't go where .* captured"):
        group.plan(Batch([0, 1], [9], more), reuse=captured)
    for spec in (None, {"num_heads": 4}):
        with pytest.raises(SpecError, match="must be a LayerSpec"):
            select(spec, "cpu")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"sinks=\[1\] must be a tensor of shape \(4,\)"):
        Attention(select(SPEC.replace(learned_sinks=True), "cpu"), sinks=[1])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="argument backend=3 must be a backend's name"):
        select(SPEC, "cpu", backend=3)  # type: ignore[arg-type]


def test_states_that_cannot_be_merged() -> None:
    good = AttentionState(torch.zeros(3, 4, 8), torch.zeros(3, 4))
    assert merge_states([good]).lse.shape == (3, 4)
    output, lse = good.output, good.lse
    for states, says in (
        ([], r"states=\[\] must be a list of one AttentionState or more"),
        (good, "must be a list of one AttentionState or more"),
        ([good, (1, 2)], r"states\[1\]=\(1, 2\) must be an AttentionState: AttentionState\(out"),
        ([AttentionState(output.numpy(), lse)], r"states\[0\]\.output is an array .* torch.as_ten"),
        ([good, AttentionState(output, None)], r"states\[1\]\.lse=None must be a tensor"),
        (
            [good, AttentionState(output[:1], lse[:1])],
            r"states\[1\]\.output is \(1, 4, 8\) .*\(3, 4",
        ),
        # What torch would broadcast.
        ([AttentionState(output, lse[:, :1])], r"states\[0\]\.lse is \(3, 1\) .* must be \(3, 4\)"),
    ):
        with pytest.raises(BatchError, match=says):
            merge_states(states)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slot_mapping": [0, 1, 2]}, "slot_mapping=[0, 1, 2] must be a tensor on cpu"),
        ({"slot_mapping": torch.zeros(6)}, "slot_mapping is (6,) of torch.float32"),
        ({"slot_mapping": torch.arange(6, device="meta")}, "slot_mapping is on meta"),
        ({"key": torch.empty(6, 2, 32, device="meta")}, "key is on meta"),
        ({"value": None}, "value=None must be a tensor"),
        ({"cache": None}, "cache is a NoneType; it must be a KVCache"),
    ],
)
def test_bad_stores(changes: dict[str, Any], says: str) -> None:
    step = Step()
    given = {
        "key": step.tensors["key"], "value": step.tensors["value"], "cache": step.cache,
        "slot_mapping": torch.arange(6),
    }  # fmt: skip
    before = step.cache.key.clone()
    with pytest.raises(BatchError) as caught:
        step.layer.store(**(given | changes))
    assert says in str(caught.value)
    assert torch.equal(step.cache.key, before)


def test_a_store_looks_at_each_tensor_once_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines store so in each layer of each step, and the host's time is theirs."""
    step = Step()
    given = {name: step.tensors[name] for name in ("key", "value")}
    given |= {"cache": step.cache, "slot_mapping": torch.arange(6)}
    looked_at: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "check_is_real", lambda name, tensor: looked_at.append(name))
        step.layer.store(**given)
        assert looked_at == ["slot_mapping", "key", "value"]
        patch.setattr(LayerGroup, "load", lambda *_, **__: pytest.fail("loaded again"))
        step.layer.store(**given)
        assert looked_at == ["slot_mapping", "key", "value"]
        step.layer.store(**given | {"cache": step.layer.group.allocate_cache(4)})
    assert looked_at == ["slot_mapping", "key", "value"] * 2
    before = step.cache.key.clone()
    step.layer.store(**given)
    with pytest.raises(BatchError, match=r"key is \(5, 2, 32\) .* must be \(6, 2, 32\)"):
        step.layer.store(**given | {"key": given["key"][:5]})
    with pytest.raises(BatchError, match="key is on meta, the layer on cpu"):
        step.layer.store(**given | {"key": given["key"].to("meta")})
    with pytest.raises(BatchError, match=r"inside torch\.vmap"):
        torch.vmap(lambda key: step.layer.store(**given | {"key": key}))(given["key"][None])
    with FakeTensorMode() as mode, pytest.raises(BatchError, match="FakeTensor"):
        step.layer.store(**given | {"key": mode.from_tensor(given["key"])})
    assert torch.equal(step.cache.key, before)


def test_no_plan_and_profiles() -> None:
    step = Step()
    with pytest.raises(BatchError, match=r"plan=None must be a plan .* key, value, cache, plan\)"):
        step.layer(**step.tensors, cache=step.cache)
    said = repr(step.layer.plan(Batch(**step.batch)))  # in one call or two
    assert said.startswith(("<AttentionStep: prefill: 2 seq", "<AttentionStep: decode: 1 seq")), (
        said
    )
    with pytest.raises(PluginError, match="profile to reason about"):
        Attention(select(SPEC, "x86-amx"))
    other = LayerGroup(select(SPEC, "cpu"))
    with pytest.raises(BatchError, match="the plan is of a group for"):
        step.layer(**step.tensors, cache=step.cache, plan=other.plan(Batch(**step.batch)))


def test_a_failed_plan_is_not_kept() -> None:
    step = Step()
    step.run()
    bad = Batch([0, 1], [100], TABLE[:1])
    with pytest.raises(BatchError):
        step.layer.plan(bad)
    with pytest.raises(BatchError):
        step.layer(torch.randn(1, 4, 32), None, None, step.cache, bad)
    assert step.run().isfinite().all()


def test_slots_of_32_bits_are_widened() -> None:
    slots = torch.tensor([3, -1, 5], dtype=torch.int32)
    batch = Batch([0, 3], [3], torch.zeros(1, 1, dtype=torch.int32), slots)
    assert batch.slot_mapping is not None and batch.slot_mapping.dtype == torch.int64
    assert batch.slot_mapping.tolist() == [3, -1, 5]
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(BatchError, match="slot_mapping is torch.int32"):
        Batch.on_buffers([0, 3], [3], starts, lens, table, slots)


def apart(numbers: list[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """A column of an engine's table of metadata: its numbers don't lie side by side."""
    table = torch.tensor([numbers, [0] * len(numbers)], dtype=dtype, device=device)
    return table.T.contiguous()[:, 0]


@everywhere("NATIVE_STORE TORCH_STORE", "TRITON_STORE TORCH_STORE")
def test_metadata_that_lies_apart_is_read_as_it_is(device: str, backend: str) -> None:
    spec = LayerSpec(num_heads=2, head_size=32, dtype="float32", block_size=16)
    layer = Attention(LayerGroup(select(spec, device, backend=f"store={backend}")))
    starts, lens, slots = [0, 5, 6], [5, 20], [48, 49, 50, 51, 52, 83]
    table = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32, device=device)
    query, key, value = torch.randn(3, 6, 2, 32, device=device)
    caches = [layer.group.allocate_cache(8) for _ in range(3)]
    for cache in caches:
        cache.key.zero_()
        cache.value.zero_()
    usual = Batch(starts, lens, table, torch.tensor(slots, device=device))
    offsets, lengths = (apart(numbers, torch.int32, device) for numbers in (starts, lens))
    column = apart(slots, torch.int64, device)
    batch = Batch(offsets, lengths, table, column)
    outs = [
        layer(query, key, value, cache, layer.plan(each))
        for cache, each in zip(caches, (usual, batch), strict=False)
    ]
    assert torch.equal(*outs)
    layer.store(key, value, caches[2], column)
    assert all(torch.equal(cache.key, caches[0].key) for cache in caches)
    # Kernels on a device find these by address, too.
    states = Batch([0, 1, 2], [1, 1], state_slots=apart([1, 0], torch.int64, device))
    for tensor in (batch.seq_lens, batch.query_start_loc, batch.slot_mapping, states.state_slots):
        assert tensor is not None and tensor.is_contiguous()


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "slot_mapping"])
def test_a_captured_graphs_buffers_are_not_copied(name: str) -> None:
    buffers = {
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 4], dtype=torch.int32),
        "block_table": TABLE[:2],
        "slot_mapping": torch.tensor([2, 19]),
    }
    Batch.on_buffers([0, 1, 2], [3, 4], **buffers)
    buffers[name] = apart(buffers[name].tolist(), buffers[name].dtype)
    with pytest.raises(BatchError, match=f"{name} .*stride 2: what a captured graph reads"):
        Batch.on_buffers([0, 1, 2], [3, 4], **buffers)


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])
def test_kernels_read_no_further_than_a_buffer_and_its_own_dtype(name: str) -> None:
    """A GPU's kernels would read whatever lies behind it, or halves of its numbers."""
    buffers = {
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 4], dtype=torch.int32),
    }
    count, buffer = len(buffers[name]), buffers[name]
    for wrong in (buffer.long(), buffer[:-1], buffer[:, None]):
        with pytest.raises(BatchError, match=rf"{name} is .*: kernels read int32 \({count},\)"):
            Batch.on_buffers([0, 1, 2], [3, 4], **(buffers | {name: wrong}), **TABLES)
    longer = torch.nn.functional.pad(buffer, (0, 2))
    Batch.on_buffers([0, 1, 2], [3, 4], **(buffers | {name: longer}), **TABLES)


def test_bounds_are_for_layers_that_read_the_buffers_lengths() -> None:
    """Others plan by the host's: on a CPU, where the buffer can be read, both must be the same."""
    starts, lens = torch.tensor([[0, 1, 2], [3, 4, 0]], dtype=torch.int32)
    group = LayerGroup(select(SPEC, "cpu"))
    group.plan(Batch.on_buffers([0, 1, 2], [3, 4], starts, lens, TABLE[:2], None))
    bounds = Batch.on_buffers([0, 1, 2], [3, 9], starts, lens, TABLE[:2], None)
    with pytest.raises(BatchError, match=r"seq_lens\[1\]=4 in the buffer, 9 on the host"):
        group.plan(bounds)
    bounded = LayerGroup(select(SPEC.replace(length_bounds=True), "cpu", backend="VANILLA"))
    assert bounded.plan(bounds).batch is bounds


TABLES = {"block_table": TABLE[:2], "slot_mapping": torch.tensor([2, 19])}


def test_a_list_of_selected_layers_is_no_selection() -> None:
    layers = select_layers([LayerSpec(num_heads=4, head_size=64)], "cpu")
    for wrong in (layers, layers[0]):
        with pytest.raises(SpecError, match="pass the selection of each item"):
            LayerGroup(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[], "x", 1])
def test_workspaces_and_settings_that_are_none_are_refused(wrong: Any) -> None:
    """An empty list counted as none of either."""
    with pytest.raises(SpecError, match=r"workspaces=.* must be another group's"):
        LayerGroup(select(SPEC, "cpu"), workspaces=wrong)
    with pytest.raises(SettingsError, match=r"settings=.* must be Settings, or None"):
        polyattn.resolve_device("cpu", wrong)
