"""A step of each family, in a form that tests of all of them share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    LatentAttention,
    LayerSpec,
    Recurrent,
    SparseAttention,
    SparseSpec,
    select,
)
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.spec.latent import LatentSpec
from polyattn.spec.recurrent import RecurrentSpec

SINKS = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", learned_sinks=True, block_size=16
)
MLA = LayerSpec(
    kind="mla", num_heads=4, head_size=24, v_head_size=16, dtype="float32",
    latent=LatentSpec(rank=32, rope_head_size=8),
)  # fmt: skip
SPARSE = LayerSpec(
    kind="sparse", num_heads=4, num_kv_heads=1, head_size=32, v_head_size=16, dtype="float32",
    block_size=16, sparse=SparseSpec(budget=2, granularity=16, value_in_key=True),
)  # fmt: skip
MAMBA2 = LayerSpec(
    kind="mamba2", num_heads=4, num_kv_heads=2, head_size=8, dtype="float32",
    recurrent=RecurrentSpec(state_size=16),
)  # fmt: skip
TABLE = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)


class Attending:
    """A step of two sequences over a cache."""

    def __init__(self, **changes: Any):
        self.sinks = torch.randn(4)
        self.layer = Attention(select(SINKS, "cpu"), sinks=self.sinks, **changes)
        self.batch = Batch.from_lens([1, 3], [20, 3], TABLE, 16)
        self.inputs = [torch.randn(4, h, 32) for h in (4, 2, 2)]
        self.cache = self.layer.group.allocate_cache(5)
        self.cache.key.normal_()
        self.cache.value.normal_()

    def run(self, layer: Any, plan: Any, *inputs: torch.Tensor) -> Any:
        return layer(*(inputs or self.inputs), self.cache, plan)


class Latent:
    def __init__(self) -> None:
        weights = latent_weights(MLA, torch.Generator().manual_seed(1))
        self.layer = LatentAttention(select(MLA, "cpu"), *weights)
        self.batch = Batch.from_lens([1, 3], [20, 9], TABLE, 16)
        self.inputs = [torch.randn(4, 4, 24), torch.randn(4, 32), torch.randn(4, 8)]
        self.cache = self.layer.group.allocate_cache(5)
        self.cache.key.normal_()

    def run(self, layer: Any, plan: Any, *inputs: torch.Tensor) -> Any:
        return layer(*(inputs or self.inputs), self.cache, plan)


class Choosing:
    """Values are the first part of their keys; each token chooses two blocks."""

    def __init__(self) -> None:
        self.layer = SparseAttention(select(SPARSE, "cpu"))
        self.batch = Batch.from_lens([1, 3], [20, 9], TABLE, 16)
        choice = torch.tensor([[[1, 0]], [[0, -1]], [[0, -1]], [[-1, 0]]], dtype=torch.int32)
        self.inputs = [torch.randn(4, 4, 32), torch.randn(4, 1, 32), choice]
        self.cache = self.layer.group.allocate_cache(5)
        self.cache.key.normal_()

    def run(self, layer: Any, plan: Any, *inputs: torch.Tensor) -> Any:
        query, key, choice = inputs or self.inputs
        return layer(query, key, None, self.cache, plan, choice=choice)


class Recurring:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.layer = Recurrent(select(MAMBA2, "cpu"), **recurrent_params(MAMBA2, generator))
        slots = torch.tensor([1, 0])
        self.batch = Batch.from_lens([1, 3], [20, 3], state_slots=slots)
        self.inputs = recurrent_inputs(MAMBA2, 4, generator)
        self.states = self.layer.group.allocate_states(2)
        self.states.data.normal_()
        self.start = self.states.data.clone()

    def run(self, layer: Any, plan: Any, *inputs: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            self.states.data.copy_(self.start)
        return layer(*(inputs or self.inputs), states=self.states, plan=plan)


FAMILIES = pytest.mark.parametrize("family", [Attending, Latent, Choosing, Recurring])
