"""Decodes that share blocks, as calls over prefixes and rests, against the whole in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.checking.compare import lse_error, output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.harness.base import put
from polyattn.families.attention import reference
from polyattn.families.attention.prefix import PrefixDecode, PrefixPlan

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=16)
LENS = [100, 70, 68, 90, 33]
SHARED = {(0, 1, 2, 3): (0, 2), (0, 3): (2, 2)}
"""Rows, and which of their blocks are the first one's: two levels; the last row has its own alone."""


def step(group: LayerGroup) -> tuple[Any, Batch]:
    """A cache that holds every sequence, and the decode of each one's last token."""
    generator = torch.Generator().manual_seed(3)
    width = -(-max(LENS) // 16)
    table = torch.randperm(64, generator=generator)[: len(LENS) * width].view(-1, width).int()
    for rows, (first, count) in SHARED.items():
        table[list(rows), first : first + count] = table[rows[0], first : first + count]
    cache = group.allocate_cache(64)
    cache.key.zero_(), cache.value.zero_()
    slots = Batch.from_lens(LENS, LENS, table, 16).slot_mapping
    assert slots is not None
    shape = (len(slots), 2, 16)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    put(cache, key, value, slots, (0.05, 0.05))
    return cache, Batch(list(range(len(LENS) + 1)), LENS, table)


@pytest.mark.parametrize("changes", [{}, {"learned_sinks": True}, {"kv_cache_dtype": "int8"}])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_shared_prefixes_are_attended_to_once(
    backend: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyattn.families.attention.prefix.CALL_US", {"cpu": 0.0})
    spec = SPEC.replace(needs_lse=True, **changes)
    group = LayerGroup(select(spec, "cpu", backend=backend))
    scale = 0.05 if "kv_cache_dtype" in changes else 1.0
    sinks = torch.randn(4) if spec.learned_sinks else None
    layer = Attention(group, sinks=sinks, k_scale=scale, v_scale=scale)
    cache, batch = step(group)
    plan = group.plan(batch)
    (call,) = plan.calls
    assert isinstance(call.plan, PrefixPlan) and len(call.plan.levels) == 2
    query = torch.randn(len(LENS), 4, 16)
    out, lse = layer(query, None, None, cache, plan)
    expected, expected_lse = reference.forward(spec, query, None, None, cache, batch, layer.params)
    assert output_error(out, expected) <= tolerance_of(spec).output
    assert lse_error(lse, expected_lse) <= tolerance_of(spec).lse


def test_prefixes_and_rests_are_one_object() -> None:
    """The parts over shared blocks are calls over context, not a layer of their own."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    runner = PrefixDecode.of(group)
    assert runner is not None and runner.shared is runner.own
