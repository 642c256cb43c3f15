"""A step may be empty: no sequence, no token, an encoder's first batch. Every family, every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from defined_flex import without_compiler
from polyattn import (
    Attention,
    Batch,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    Recurrent,
    Role,
    SparseSpec,
    discover,
    resolve_device,
    select,
)
from polyattn.errors import BatchError, SelectionError
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.registry.machine import availability
from polyattn.selection.tree import SERVICES
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.latent import LatentSpec
from polyattn.spec.recurrent import RecurrentSpec

CPU = resolve_device("cpu")
TABLE = torch.zeros(0, 2, dtype=torch.int32)
NARROW = torch.zeros(0, 0, dtype=torch.int32)
ATTENTION = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", needs_lse=False)


@pytest.fixture(autouse=True)
def flex_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)


def backends(kind: AttentionKind) -> list[str]:
    return [
        name
        for name, info in discover().backends.items()
        if "cpu" in info.capabilities.platforms
        and kind in info.capabilities.kinds
        and not info.capabilities.phases & SERVICES
        and availability(info, 60.0) is None
    ]


def paged(table: torch.Tensor) -> list[Batch]:
    """Without a sequence; sequences without a token, whose keys are or aren't there."""
    few = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32)
    return [Batch.from_lens([], [], table, 16), Batch.from_lens([0, 0], [7, 0], few, 16)]


@pytest.mark.parametrize("table", [TABLE, NARROW], ids=["a wide table", "a table without columns"])
@pytest.mark.parametrize("backend", backends(AttentionKind.ATTENTION))
def test_attention_over_a_cache(backend: str, table: torch.Tensor) -> None:
    spec = ATTENTION.replace(block_size=16)
    layer = Attention(select(spec, "cpu", backend=backend), checks=True)
    cache = layer.group.allocate_cache(3)
    for batch in paged(table):
        before = cache.key.clone()
        out = layer(*(torch.empty(0, h, 32) for h in (4, 2, 2)), cache, batch)
        assert isinstance(out, torch.Tensor) and out.shape == (0, 4, 32)
        assert torch.equal(cache.key.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("role", [Role.ENCODER, Role.ENCODER_ONLY, Role.DECODER, Role.CROSS])
@pytest.mark.parametrize("backend", backends(AttentionKind.ATTENTION))
def test_attention_over_given_keys(backend: str, role: Role) -> None:
    spec = ATTENTION.replace(role=role, cached=False, causal=role is Role.DECODER)
    try:
        layer = Attention(select(spec, "cpu", backend=backend), checks=True)
    except Exception as error:
        assert "is not supported" in str(error) or "wanted" in str(error)
        return
    batches = [Batch.from_lens([], []), Batch.from_lens([0, 0], [0, 0])]
    for batch in batches:
        out = layer(*(torch.empty(0, h, 32) for h in (4, 2, 2)), None, batch)
        assert isinstance(out, torch.Tensor) and out.shape == (0, 4, 32)


@pytest.mark.parametrize("backend", backends(AttentionKind.ATTENTION))
def test_cross_attention_without_an_encoder_s_tokens(backend: str) -> None:
    spec = ATTENTION.replace(role=Role.CROSS, causal=False, block_size=16)
    try:
        layer = Attention(select(spec, "cpu", backend=backend), checks=True)
    except Exception as error:
        assert "wanted" in str(error)
        return
    cache = layer.group.allocate_cache(2)
    nothing = torch.empty(0, 2, 32)
    layer.store(nothing, nothing, cache, torch.empty(0, dtype=torch.int64))
    table = torch.zeros(2, 1, dtype=torch.int32)
    out = layer(torch.ones(3, 4, 32), None, None, cache, Batch([0, 1, 3], [0, 0], table))
    assert isinstance(out, torch.Tensor) and bool((out == 0).all())


@pytest.mark.parametrize("backend", backends(AttentionKind.ATTENTION))
def test_empty_rows_over_a_table_without_columns(backend: str) -> None:
    """A kernel may read a row's first entry before its length: TRITON_ATTN's decode does."""
    layer = Attention(select(ATTENTION.replace(block_size=16), "cpu", backend=backend), checks=True)
    cache = layer.group.allocate_cache(1)
    cache.key.fill_(torch.nan)
    cache.value.fill_(torch.nan)
    table, nowhere = torch.zeros(3, 0, dtype=torch.int32), torch.full((3,), -1)
    batch = Batch([0, 1, 2, 3], [0, 0, 0], table, nowhere)
    plan = layer.group.plan(batch)
    assert [tuple(call.plan.batch.block_table.shape) for call in plan.calls] == [(3, 1)]
    query, key, value = (torch.ones(3, heads, 32) for heads in (4, 2, 2))
    out = layer(query, key, value, cache, plan)
    assert isinstance(out, torch.Tensor) and bool((out == 0).all())
    state = layer.group.spec.replace(needs_lse=True)
    try:
        layer = Attention(select(state, "cpu", backend=backend), checks=True)
    except SelectionError:
        return
    out, lse = layer(query, key, value, cache, batch)
    assert bool((out == 0).all() and (lse == -torch.inf).all())
    with pytest.raises(BatchError, match=r"block_table has 0 blocks of 16 a .*length 5 needs 1"):
        layer.group.plan(Batch([0, 1, 2, 3], [0, 0, 5], table, nowhere))


@pytest.mark.parametrize("table", [TABLE, NARROW], ids=["a wide table", "a table without columns"])
@pytest.mark.parametrize(
    ("kind", "backend"),
    [(k, b) for k in (AttentionKind.MLA, AttentionKind.SPARSE_MLA) for b in backends(k)],
)
def test_mla(kind: AttentionKind, backend: str, table: torch.Tensor) -> None:
    topk = 4 if kind is AttentionKind.SPARSE_MLA else None
    spec = LayerSpec(
        kind=kind, num_heads=4, head_size=24, v_head_size=16, dtype="float32", block_size=16,
        latent=LatentSpec(rank=32, rope_head_size=8),
        sparse=SparseSpec(budget=topk) if topk else None,
    )  # fmt: skip
    named = backend if topk else f"decode={backend}"
    layer = LatentAttention(
        select(spec, "cpu", backend=named), *latent_weights(spec, torch.Generator()), checks=True
    )
    cache = layer.group.allocate_cache(3)
    chosen = torch.empty(0, 1, 4, dtype=torch.int32) if topk else None
    for batch in paged(table):
        inputs = torch.empty(0, 4, 24), torch.empty(0, 32), torch.empty(0, 8)
        out = layer(*inputs, cache, batch, choice=chosen)
        assert isinstance(out, torch.Tensor) and out.shape == (0, 4, 16)


RECURRENT: dict[str, dict[str, Any]] = {
    "short_conv": {"num_heads": 8, "head_size": 1, "recurrent": RecurrentSpec(conv_width=3)},
    "mamba1": {"num_heads": 8, "head_size": 1, "recurrent": RecurrentSpec(state_size=8)},
    "mamba2": {"num_heads": 4, "head_size": 8, "recurrent": RecurrentSpec(state_size=8)},
    "linear": {"num_heads": 4, "head_size": 8, "recurrent": RecurrentSpec(state_size=8)},
    "gdn": {"num_heads": 4, "head_size": 8, "recurrent": RecurrentSpec(state_size=8)},
}


@pytest.mark.parametrize(
    ("kind", "backend"), [(k, b) for k in RECURRENT for b in backends(AttentionKind(k))]
)
def test_recurrences(kind: str, backend: str) -> None:
    spec = LayerSpec(kind=kind, dtype="float32", **RECURRENT[kind])  # type: ignore[arg-type]
    generator = torch.Generator()
    group = LayerGroup(select(spec, "cpu", backend=backend))
    layer = Recurrent(group, checks=True, **recurrent_params(spec, generator))
    states = group.allocate_states(3)
    states.data.fill_(1.0)
    for lens, slots in (([], []), ([7, 0], [1, 2])):
        batch = Batch.from_lens(
            [0] * len(lens), lens, state_slots=torch.tensor(slots, dtype=torch.int64)
        )
        out = layer(*recurrent_inputs(spec, 0, generator), states=states, plan=batch)
        assert out.shape == layer.output_shape(0) and bool((states.data == 1.0).all())
