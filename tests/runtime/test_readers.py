"""A layer that reads another's cache (`kv_source`) stores nothing there, whatever it is passed."""

from __future__ import annotations

import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    LatentAttention,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    SparseAttention,
    SparseSpec,
    select_layers,
)
from polyattn.errors import BatchError, SpecError
from polyattn.tools.replay.check import Checker
from polyattn.tools.replay.runners import LatentRunner, Options, SparseRunner

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
SPARSE = PLAIN.replace(kind="sparse", sparse=SparseSpec(budget=2, granularity=16))
LATENT = LayerSpec(
    kind="mla",
    num_heads=2,
    head_size=48,
    v_head_size=32,
    dtype="float32",
    latent=LatentSpec(rank=64, rope_head_size=16),
    block_size=16,
)
WEIGHTS = torch.randn(2, 32, 64), torch.randn(2, 64, 32)
REFUSED = pytest.raises(BatchError, match=r"another's keys \(kv_source, or own_keys=False\).*None")


@pytest.mark.parametrize("from_spec", [True, False])
@pytest.mark.parametrize("spec", [PLAIN, SPARSE, LATENT], ids=lambda spec: spec.kind.value)
def test_a_reader_refuses_keys_and_leaves_the_cache(spec: LayerSpec, from_spec: bool) -> None:
    make = {"attention": Attention, "sparse": SparseAttention, "mla": LatentAttention}[
        spec.kind.value
    ]
    weights = WEIGHTS if spec is LATENT else ()
    (both,) = select_layers([spec, spec.replace(kv_source=0)], "cpu")
    group = LayerGroup(both.selection)
    writer = make(group, *weights)
    if from_spec:
        reader = make(spec.replace(kv_source=0), *weights)
    else:
        reader = make(group, *weights, own_keys=False)
    cache, table = group.allocate_cache(2), torch.tensor([[1]], dtype=torch.int32)
    batch = Batch.from_lens([5], [5], table, block_size=16)
    query = torch.randn(5, spec.num_heads, spec.head_size)
    key, value = torch.randn(2, 5, 2, 32)
    if spec is LATENT:
        key, value = torch.randn(5, 64), torch.randn(5, 16)
    out = writer(query, key, value, cache, batch)
    stored = cache.key.clone()
    for _ in range(2):  # the first call, which checks the cache, and a later one
        torch.testing.assert_close(reader(query, None, None, cache, batch), out)
        with REFUSED:
            reader(query, key + 1, value + 1, cache, batch)
    with REFUSED:
        reader.store(key + 1, value + 1, cache, batch.slot_mapping)
    assert torch.equal(cache.key[1, :5], stored[1, :5])


def test_a_fused_query_has_keys_too() -> None:
    writer, reader = Attention(PLAIN), Attention(PLAIN.replace(kv_source=0))
    cache = writer.group.allocate_cache(1)
    batch = Batch.from_lens([3], [3], torch.tensor([[0]], dtype=torch.int32), block_size=16)
    fused = torch.randn(3, (4 + 2 + 2) * 32)
    out = writer(fused, None, None, cache, batch)
    with REFUSED:
        reader(fused, None, None, cache, batch)
    torch.testing.assert_close(reader(fused[:, :128], None, None, cache, batch), out)
    with pytest.raises(SpecError, match="own_keys"):
        Attention(PLAIN, own_keys=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [SPARSE, LATENT], ids=lambda spec: spec.kind.value)
def test_a_replay_has_the_caches_that_its_layers_own(spec: LayerSpec) -> None:
    own = spec.replace(dtype="bfloat16")
    (layers,) = select_layers([own, own.replace(kv_source=0), own], "cpu")
    runner = (LatentRunner if spec is LATENT else SparseRunner)(layers, Options(layers=3), 2)
    first, reader, last = runner.caches
    assert first is reader is not last
    assert (
        len(runner.paged())
        == runner.num_caches * (1 if spec is LATENT else 2)
        == len({tensor.data_ptr() for tensor in runner.paged()})
    )
    table = torch.tensor([[1]], dtype=torch.int32)
    runner.step(Batch.from_lens([5], [5], table, block_size=16), Checker(2, seed=0))
