"""Decodes that share blocks, as calls over prefixes and rests, against the whole in float64."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, Role, select
from polyattn.checking.compare import lse_error, output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.harness.base import put
from polyattn.families.attention import reference, sharing
from polyattn.families.attention.prefix import PrefixDecode, PrefixPlan
from polyattn.families.attention.sharing import why_not
from polyattn.spec.rope import RopeSpec

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


INCLUDED = [
    {}, {"learned_sinks": True}, {"logit_soft_cap": 3.0}, {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2", "learned_sinks": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", INCLUDED)
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_shared_prefixes_are_attended_to_once(
    backend: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    compare(backend, changes)


def compare(backend: str, changes: dict[str, Any]) -> None:
    """Two levels of shared blocks and a row of its own, taken apart, against the whole."""
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


def test_the_interpreted_kernel_serves_both_parts() -> None:
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__], env=environ, check=True, capture_output=True)


ROPE = RopeSpec(rotary_size=16, positions="cache")
REFUSED = {
    "a sliding window": {"sliding_window": 40}, "chunks": {"chunk_size": 32},
    "ALiBi": {"alibi": True}, "a bitwise batch-invariant": {"batch_invariant": True},
    "positions within the cache": {"rope": ROPE, "sliding_window": 1000},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name_is_served_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over shared blocks that aren't taken apart are right all the same."""
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    spec = SPEC.replace(**REFUSED[name])
    reason = why_not(spec)
    assert reason is not None and (name in reason or spec.rope is not None)
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SDPA"))
    layer = Attention(group, rotate=True if spec.rope else None)
    cache, batch = step(group)
    plan = group.plan(batch)
    assert not any(isinstance(call.plan, PrefixPlan) for call in plan.calls)
    query = torch.randn(len(LENS), 4, 16)
    out = layer(query, None, None, cache, plan)
    expected, _ = reference.forward(spec, query, None, None, cache, batch, layer.params)
    assert output_error(out, expected) <= tolerance_of(spec).output


def test_other_layers_are_refused_by_name() -> None:
    from polyattn.spec.layer import LatentSpec

    latent = LatentSpec(rank=16, rope_head_size=8)
    mla = LayerSpec(num_heads=4, head_size=24, v_head_size=16, latent=latent, kind="mla")
    assert "MLA" in str(why_not(mla))
    encoder = LayerSpec(num_heads=4, head_size=16, role=Role.ENCODER_ONLY, causal=False)
    assert "only a causal decoder" in str(why_not(encoder))


def test_looking_costs_next_to_nothing_where_nothing_is_shared() -> None:
    """256 sequences of 2,048 blocks, within a plan. The bar is 20 us; the best of many is taken."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    table = torch.randperm(256 * 2048).int().view(256, 2048)
    batch, runner = Batch(list(range(257)), [2048 * 16] * 256, table), PrefixDecode.of(group)
    assert runner is not None
    best = float("inf")
    for _ in range(300):
        started = time.perf_counter()
        assert runner.plan(batch) is None
        best = min(best, time.perf_counter() - started)
    assert best < 20e-6, f"{best * 1e6:.1f} us"


def test_prefixes_and_rests_are_one_object() -> None:
    """The parts over shared blocks are calls over context, not a layer of their own."""
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    runner = PrefixDecode.of(group)
    assert runner is not None and runner.shared is runner.own


if __name__ == "__main__":
    sharing.CALL_US = {"cpu": 0.0}
    for features in (
        {},
        {"learned_sinks": True, "logit_soft_cap": 3.0},
        {"kv_cache_dtype": "int8"},
    ):
        compare("TRITON_ATTN", features)
