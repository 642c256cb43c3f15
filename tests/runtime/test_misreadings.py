"""What would be taken for something else in silence, or fail deep within, is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    BlockSparseMask,
    CacheFormat,
    CacheWindow,
    CustomMask,
    KVCache,
    LayerGroup,
    LayerSpec,
    Settings,
    StateCache,
    StepGraphs,
    StepSize,
    attention,
    deberta_buckets,
    discover,
    select,
    select_layers,
    shared_prefixes,
    t5_buckets,
)
from polyattn.errors import BatchError, CacheError, PolyattnError, SettingsError, SpecError
from polyattn.runtime.cache.state_cache import StateCacheSpec

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
FORM = CacheFormat(block_size=16, num_kv_heads=2, head_size=32, v_head_size=32, dtype="float32")
TABLE = torch.zeros(2, 3, dtype=torch.int32)
BITS = torch.ones(5, dtype=torch.bool)
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[PolyattnError], str]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def refused(
    error: type[PolyattnError], says: str, call: Callable[..., Any], *args: Any, **named: Any
) -> Case:
    return call, args, named, error, says


def one(**more: Any) -> Batch:
    return Batch([0, 1], [1], TABLE[:1], **more)


def cache() -> KVCache:
    return KVCache.allocate(FORM, 2)


def contiguous() -> KVCache:
    return KVCache.contiguous(zeros(3, 2, 2, 16, 32))


BATCHES = [
    refused(BatchError, "query_start_loc has shape (1, 2)", Batch, np.array([[0, 1]]), [1]),
    refused(BatchError, "seq_lens has shape ()", Batch, [0, 1], np.array(1)),
    refused(BatchError, "positions=[0] must be a tensor", one, positions=[0]),
    refused(BatchError, "dtype float32; it must be an int32", one,
            host_block_table=np.zeros((1, 3), np.float32)),
    refused(BatchError, "inputs=3 must map names", one, inputs=3),
    refused(BatchError, "inputs has 3", one, inputs={3: zeros(1)}),
    refused(BatchError, "inputs['a']='b' must be a tensor or numbers", one, inputs={"a": "b"}),
    refused(BatchError, "block_table=[[1, 2]] must be int32", shared_prefixes, [[1, 2]], [1], 16),
    refused(BatchError, "must be int32, on the host", shared_prefixes, np.zeros((2, 3)), [9, 9], 1),
    refused(BatchError, "block_size=1.5 must be", shared_prefixes, TABLE.numpy(), [9, 9], 1.5),
    refused(BatchError, "lens=[-1, 9] must be", shared_prefixes, TABLE.numpy(), [-1, 9], 1),
    refused(BatchError, "lens[0]=1.5 must be", shared_prefixes, TABLE.numpy(), [1.5, 9], 1),
    refused(BatchError, "StepSize.state_targets='no' must be", StepSize, 1, state_targets="no"),
    refused(BatchError, "groups=[3] must be a list of LayerGroup", StepGraphs, [3], print, [1], 9),
    refused(BatchError, "shared_prefix='no' must be", StepGraphs, [], print, [1], 9,
            shared_prefix="no"),
]  # fmt: skip

MASKS = [
    refused(BatchError, "masks[0] is an array", CustomMask.pack, [np.ones((2, 2), bool)]),
    refused(BatchError, "masks[0] is torch.float32 of shape (2, 2)", CustomMask.pack, [torch.ones(2, 2)]),
    refused(BatchError, "parents[0]=-1 must be a list", CustomMask.tree, [-1, 0]),
    refused(BatchError, "prefixes=[-3] must be 0", CustomMask.prefix_lm, [-3], [5], [7]),
    refused(BatchError, "prefixes[0]=1.5 must be an integer", CustomMask.prefix_lm, [1.5], [5], [7]),
    refused(BatchError, "seq_lens has 1 entries", CustomMask.prefix_lm, [3, 3], [5, 5], [7]),
    refused(BatchError, "documents[0][1]=1.5", CustomMask.documents, [[1, 1.5]], [2]),
    refused(BatchError, "documents has 1 entries", CustomMask.documents, [[1, 1]], [2, 2]),
    refused(BatchError, "block=16 must be", BlockSparseMask, [0, 1], [0], 16),
    refused(BatchError, "mask=3 must be a CustomMask", BlockSparseMask.of, 3, [1], [5], (1, 1)),
    refused(BatchError, "seq_lens has 1 entries and query_lens 2", BlockSparseMask.of,
            CustomMask(BITS), [1, 1], [5], (1, 1)),
    refused(BatchError, "seq_lens=[-5]", BlockSparseMask.sliding_window, 2, [1], [-5], (1, 1)),
]  # fmt: skip

CACHES = [
    refused(CacheError, "form=3 must be a CacheFormat", KVCache, *zeros(2, 2, 16, 2, 32), 3),
    refused(CacheError, "form has blocks of 16, 2 KV heads of 32/32", KVCache,
            *zeros(2, 2, 16, 2, 64), FORM),
    refused(CacheError, "form=3 must be", KVCache.allocate, 3, 4),
    refused(CacheError, "device='cpux' is no torch device", KVCache.allocate, FORM, 4, "cpux"),
    refused(CacheError, "form=3 must be", KVCache.joined, zeros(2, 16, 2, 64), 3),
    refused(CacheError, "blocks of 16 and 3 KV heads; the form's have 16 and 2", KVCache.joined,
            zeros(2, 16, 3, 64), FORM),
    refused(CacheError, "heads_first=True has blocks of 2 and 16 KV heads", KVCache.joined,
            zeros(2, 16, 2, 64), FORM, True),
    refused(CacheError, "heads_first='no' must be True or False", KVCache.joined,
            zeros(2, 16, 2, 64), FORM, "no"),
    refused(CacheError, "storage is torch.float16; it must be torch.float32, the form's, or bytes",
            KVCache.joined, zeros(2, 16, 2, 128, dtype=torch.float16), FORM),
    refused(CacheError, "the last at least 64 of torch.float32", KVCache.joined,
            zeros(2, 16, 2, 64, dtype=torch.uint8), FORM),
    refused(CacheError, "sequences=3 must be a list", lambda: contiguous().sequence_table(3)),
    refused(CacheError, "size=0 must be a positive", lambda: cache().in_blocks_of(0)),
    refused(CacheError, "size=-4 must be a positive", lambda: cache().in_blocks_of(-4)),
    refused(CacheError, "num_slots=True", StateCacheSpec, num_slots=True, shape=(1,), dtype="float32"),
    refused(CacheError, "source='0' is out of", StateCache(zeros(3, 4)).copy, "0", 1),
    refused(CacheError, "target=1.5 is out of", StateCache(zeros(3, 4)).copy, 0, 1.5),
    refused(BatchError, "targets=[1] must be", StateCache.accepted, [1], torch.tensor([1])),
    refused(BatchError, "counts is (1,) of torch.float32", StateCache.accepted,
            torch.tensor([[3, 4]]), torch.tensor([1.5])),
    refused(BatchError, "counts is (1,) of torch.int64; it must be (2)", StateCache.accepted,
            torch.tensor([[3, 4], [5, 6]]), torch.tensor([1])),
    refused(SpecError, "CacheWindow.window='4'", CacheWindow, 16, "4"),
    refused(SpecError, "CacheWindow.window=0 must be", CacheWindow, 16, 0),
    refused(SpecError, "CacheWindow.block_size=-1", CacheWindow, -1, 4),
    refused(SpecError, "CacheWindow.sinks=-1", CacheWindow, 16, 4, -1),
    refused(SpecError, "CacheWindow.chunk=-3", CacheWindow, 16, 4, 0, -3),
    refused(SpecError, "keeps everything; set window, chunk or both", CacheWindow, 16, None),
]  # fmt: skip

CHOICES = [
    refused(SettingsError, "backend=['VANILLA'] must be", select, SPEC, "cpu", backend=["VANILLA"]),
    refused(SettingsError, "verify='no' must be True or False", select, SPEC, "cpu", verify="no"),
    refused(SettingsError, "settings=3 must be Settings", select, SPEC, "cpu", settings=3),
    refused(SettingsError, "settings=3 must be Settings", discover, 3),
    refused(SpecError, "must be a list of LayerSpec", select_layers, SPEC, "cpu"),
    refused(SpecError, "specs[1]=3 must be a LayerSpec", select_layers, [SPEC, 3], "cpu"),
    refused(SettingsError, "Settings.verify='no' must be", Settings, verify="no"),
    refused(SettingsError, "Settings.plugins='cpu' must be a tuple", Settings, plugins="cpu"),
    refused(SettingsError, "Settings.layout='x' is unknown", Settings, layout="x"),
    refused(CacheError, "cache_format=3 must be", lambda: LayerGroup(
        select(SPEC, "cpu"), cache_format=3)),  # type: ignore[arg-type]
    refused(SpecError, "checks='no' must be True or False", lambda: Attention(
        select(SPEC, "cpu"), checks="no")),  # type: ignore[arg-type]
    refused(SpecError, "inputs=3 must map names", lambda: Attention(
        select(SPEC, "cpu"), inputs=3)),  # type: ignore[arg-type]
    refused(BatchError, "return_lse='no' must be True or False", attention,
            *zeros(3, 1, 5, 4, 16), return_lse="no"),
    refused(SpecError, "num_buckets=2 must be an integer, 4", t5_buckets, 2, bidirectional=True),
    refused(SpecError, "num_buckets=32.0", t5_buckets, 32.0, bidirectional=True),
    # Its logarithm would be divided by 0, and rounded to whatever NaN is.
    refused(SpecError, "max_distance=8 must be an integer, 9", t5_buckets, 32, 8, bidirectional=True),
    refused(SpecError, "bidirectional='no' must be", t5_buckets, bidirectional="no"),
    refused(SpecError, "num_buckets=-1", deberta_buckets, -1),
    refused(SpecError, "max_distance=17 must be an integer, 18", deberta_buckets, 32, 17),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "args", "named", "error", "says"), [*BATCHES, *MASKS, *CACHES, *CHOICES]
)
def test_refused_by_name(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    error: type[PolyattnError],
    says: str,
) -> None:
    with pytest.raises(error) as caught:
        call(*args, **named)
    assert says in str(caught.value)


def test_what_is_right_is_taken() -> None:
    """Arrays and tensors beside lists; bytes of any number of elements; forms that tensors have."""
    batch = Batch(np.array([0, 1], np.int8), torch.tensor([1], dtype=torch.int32))
    assert (batch.starts, batch.lens) == ([0, 1], [1])
    assert contiguous().sequence_table(np.array([2, 0])).tolist() == [[2], [0]]
    assert KVCache(*zeros(2, 2, 16, 2, 32), FORM).format is FORM
    stored = KVCache.joined(zeros(2, 2, 16, 256, dtype=torch.uint8), FORM, heads_first=True)
    assert stored.format.head_size == 32 and stored.key.dtype == torch.float32
    assert StateCache.accepted(torch.tensor([[3, 4]]), torch.tensor([2])).tolist() == [4]
    assert t5_buckets(32, 9, bidirectional=True).max() < 32
    assert deberta_buckets(32, 18).max() < 64
    ids = torch.tensor([1, 1, 2])
    assert CustomMask.documents([ids], [1]).bits.tolist() == [False, False, True]
