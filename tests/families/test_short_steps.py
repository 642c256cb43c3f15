"""Steps that are over before a library's call returns go to whoever takes tensors by addresses."""

from __future__ import annotations

import pytest
import torch
from polyattn import LayerGroup, LayerSpec, select
from polyattn.calls import lightest_backend
from polyattn.calls.lightest_backend import is_short, server_of
from polyattn.calls.plans import plan_lengths

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", cached=False)


def group_by(name: str, named: bool = False) -> LayerGroup:
    """A group that `name` serves, chosen or named."""
    if named:
        return LayerGroup(select(SPEC, backend=name))
    return LayerGroup(select(SPEC).alone(name))


def test_what_is_short() -> None:
    assert is_short(SPEC, [4, 4], [4, 300])
    assert not is_short(SPEC, [1], [513])
    assert not is_short(SPEC.replace(num_heads=128, num_kv_heads=128, head_size=128), [512], [512])
    assert is_short(SPEC, [], [])


def test_a_cpu_s_calls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_by("TORCH_SDPA")
    assert server_of(group, [4], [4]) is group
    monkeypatch.setattr(group, "device_type", "cuda")
    assert server_of(group, [4], [4]).selection.backend("prefill").name == "NATIVE_ATTN"  # type: ignore[union-attr]
    assert server_of(group, [4], [600]) is group


def test_who_was_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_by("TORCH_SDPA", named=True)
    monkeypatch.setattr(group, "device_type", "cuda")
    assert server_of(group, [4], [4]) is group


def test_bits_that_must_not_depend_on_the_batch_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = select(SPEC.replace(batch_invariant=True)).alone("TORCH_SDPA")
    group = LayerGroup(selection)
    monkeypatch.setattr(group, "device_type", "cuda")
    assert server_of(group, [4], [4]) is group


def test_who_goes_by_addresses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_by("NATIVE_ATTN")
    monkeypatch.setattr(group, "device_type", "cuda")
    assert server_of(group, [4], [4]) is group


def test_the_plan_is_of_who_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightest_backend, "_lightest", lambda group: group_by("NATIVE_ATTN"))
    group = group_by("TORCH_SDPA")
    monkeypatch.setattr(group, "device_type", "cuda")
    assert group.torch_device == torch.device("cpu")
    assert plan_lengths(group, (2,), (3,)).calls[0].name == "NATIVE_ATTN"
