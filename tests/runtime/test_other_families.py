"""Do layers other than plain attention refuse a step that they would run in silence, and wrongly?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import (
    AttentionState,
    Batch,
    CustomMask,
    Indexer,
    IndexerSpec,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    RecurrentSpec,
    SparseAttention,
    SparseSpec,
    Stream,
    UnionAttention,
    merge_states,
)
from polyattn.errors import BatchError

TABLE = torch.tensor([[5, 2, 7]], dtype=torch.int32)
SPARSE: dict[str, Any] = {
    "kind": "sparse", "num_heads": 4, "num_kv_heads": 1, "head_size": 32, "dtype": "float32",
    "block_size": 16, "needs_lse": True, "sparse": SparseSpec(budget=8),
}  # fmt: skip
MLA = LayerSpec(
    kind="mla",
    num_heads=2,
    head_size=24,
    v_head_size=16,
    latent=LatentSpec(rank=32, rope_head_size=8),
    dtype="float32",
    block_size=16,
)
CONV = LayerSpec(
    kind="short_conv",
    num_heads=8,
    head_size=1,
    dtype="float32",
    recurrent=RecurrentSpec(conv_width=4),
)


@pytest.mark.parametrize("spec", [LayerSpec(**SPARSE), MLA, CONV])
def test_a_step_s_mask_is_refused(spec: LayerSpec) -> None:
    mask = CustomMask.tree([[-1, 0, 0]])
    batch = Batch([0, 3], [33], TABLE, state_slots=torch.tensor([0]), mask=mask)
    with pytest.raises(BatchError, match=r"kind 'custom'.* key: plan a batch without it"):
        LayerGroup(spec).plan(batch)


def test_key_starts_beside_a_cache_are_refused() -> None:
    with pytest.raises(BatchError, match="key_starts are for keys that are passed whole"):
        LayerGroup(LayerSpec(**SPARSE)).plan(Batch([0, 3], [33], TABLE, key_starts=[7]))


def test_a_length_shorter_than_its_query_is_refused() -> None:
    with pytest.raises(BatchError, match=r"seq_lens\[0\]=20 is shorter than its query of 33"):
        LayerGroup(LayerSpec(**SPARSE)).plan(Batch([0, 33], [20], TABLE))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (Batch.from_lens([3], [9], TABLE, 8), "block_size=8, with which the batch was made"),
        (Batch([0, 3], [2], TABLE), r"seq_lens\[0\]=2 is shorter than its query of 3"),
        (Batch([0, 3], [33], TABLE[:, :2].contiguous()), "block_table has 2 blocks of 16"),
    ],
)
def test_an_indexer_s_batch_is_checked(batch: Batch, says: str) -> None:
    indexer = Indexer(LayerSpec(**SPARSE, indexer=IndexerSpec(num_heads=2, head_size=16, budget=8)))
    keys = indexer.allocate_cache(8)
    with pytest.raises(BatchError, match=says):
        indexer(torch.zeros(3, 2, 16), keys, batch, weights=torch.zeros(3, 2))


def test_streams_are_of_the_same_tokens() -> None:
    layers = [SparseAttention(LayerSpec(**SPARSE)) for _ in range(2)]
    caches = [layer.group.allocate_cache(8) for layer in layers]
    two = Batch([0, 1, 3], [9, 9], TABLE.expand(2, 3).contiguous())
    streams = [Stream(caches[0], Batch([0, 3], [33], TABLE)), Stream(caches[1], two)]
    says = r"streams\[1\] has query tokens at \[0, 1, 3\], streams\[0\] at \[0, 3\]"
    with pytest.raises(BatchError, match=says):
        UnionAttention(layers)(torch.zeros(3, 4, 32), streams)


@pytest.mark.parametrize("part", ["output", "lse"])
def test_states_of_other_dtypes_are_refused(part: str) -> None:
    one = {"output": torch.ones(2, 3, 4), "lse": torch.zeros(2, 3)}
    other = one | {part: one[part].half()}
    with pytest.raises(BatchError, match=rf"states\[1\].{part} is .* of torch.float16; it must be"):
        merge_states([AttentionState(**one), AttentionState(**other)])
