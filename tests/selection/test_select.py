"""What is remembered of a choice, and for whom: settings, threads, devices."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import polyattn.api
import pytest
import torch
import two_chips
from polyattn import (
    Device,
    LayerSpec,
    check_supported,
    register,
    resolve_device,
    select,
    unregister,
)
from polyattn.errors import DeviceError, SettingsError, SpecError
from polyattn.plugin import BackendInfo, Capabilities, Platform, declare
from polyattn.selection.selection import Decision
from polyattn.settings import Settings, parse_overrides

SPEC = LayerSpec(num_heads=4, head_size=64, dtype="float32")


def named(backend: str) -> Settings:
    return Settings(sources=(parse_overrides(backend, "POLYATTN_BACKEND"),))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The choices that were computed, not remembered."""
    found: list[str] = []
    real = polyattn.api._select

    def counted(spec: LayerSpec, device: Device, settings: Settings, verify: bool):  # type: ignore[no-untyped-def]
        selection = real(spec, device, settings, verify)
        found.append(selection.decision.prefill)
        return selection

    monkeypatch.setattr(polyattn.api, "_select", counted)
    polyattn.api._remembered.clear()
    return found


def test_settings_in_turn_are_remembered_side_by_side(computed: list[str]) -> None:
    for _ in range(10):
        for name in ("TORCH_SDPA", "EXAMPLE_ATTN"):
            assert select(SPEC, "cpu", settings=named(name)).decision.prefill == name
    assert computed == ["TORCH_SDPA", "EXAMPLE_ATTN"]


def test_what_runs_is_asked_once_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own asks, which costs more than what it asks for."""
    asked: list[str | None] = []
    monkeypatch.setattr(polyattn.api, "running", lambda path, timeout: asked.append(path) or "")
    select(LayerSpec(num_heads=2, head_size=8, scale=0.4321), "cpu")
    assert asked and len(asked) == len({*asked})


def test_threads_with_settings_of_their_own() -> None:
    polyattn.api._remembered.clear()
    wrong: list[Decision] = []
    start = threading.Barrier(2)

    def run(name: str) -> None:
        start.wait()
        for heads in range(1, 60):
            spec = SPEC.replace(num_heads=heads)
            decision = select(spec, "cpu", settings=named(name)).decision
            if decision.prefill != name:
                wrong.append(decision)

    threads = [threading.Thread(target=run, args=(n,)) for n in ("TORCH_SDPA", "EXAMPLE_ATTN")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CHIPS = Platform(name="fakechip", detect="two_chips:detect", rank=100, current="two_chips:current")
FAKE_ATTN = BackendInfo(
    name="FAKE_ATTN",
    summary="",
    path="polyattn_cpu.sdpa:TorchSDPA",
    capabilities=Capabilities(platforms={"fakechip": ()}, dtypes=frozenset({"float32"})),
)
declare(__name__, api_versions=(1, 1), platforms=[CHIPS], backends=[FAKE_ATTN])


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register(sys.modules[__name__], "two-chips")
    monkeypatch.setattr(two_chips, "current_index", 0)
    yield
    unregister("two-chips")


def test_the_current_device_is_asked_anew(chips: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.cuda.set_device(1)` changes it."""
    first = select(SPEC)
    assert first.device.torch_device == "fakechip:0"
    monkeypatch.setattr(two_chips, "current_index", 1)
    second = select(SPEC)
    assert second.device.torch_device == "fakechip:1"
    assert resolve_device().torch_device == "fakechip:1"
    monkeypatch.setattr(two_chips, "current_index", 0)
    assert select(SPEC) is first


def test_a_torch_device_is_a_device() -> None:
    assert select(SPEC, torch.device("cpu")) is select(SPEC, "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="'cuda:0'"):
            select(SPEC, torch.device("cuda:0"))
    with pytest.raises(DeviceError, match="device 'meta' is unknown"):
        select(SPEC, torch.device("meta"))


def test_a_device_that_is_not_here_names_who_was_asked() -> None:
    with pytest.raises(DeviceError, match="finds device 'hpu' on this machine") as caught:
        select(SPEC, "hpu")
    assert str(caught.value).splitlines()[1:] == [
        "  hpu: not here", "  without a name this machine's best device is used",
    ]  # fmt: skip


def test_support_is_asked_by_the_names_of_vllm() -> None:
    """As its `validate_configuration`, which returns the reasons."""
    at = {"backend": "FLASH_ATTN_V3", "device": "h100-sxm"}
    assert check_supported(128, torch.bfloat16, "auto", 16, **at) == []
    reasons = check_supported(80, torch.float16, "fp8_e5m2", 16, **at)
    assert any(line.startswith("head_size: wanted 80") for line in reasons)
    assert any(line.startswith("kv_cache_dtype: wanted fp8_e5m2") for line in reasons)
    assert check_supported(80, torch.float16, "fp8_e5m2", 16, device="h100-sxm") == []
    with pytest.raises(SpecError, match="dtype"):
        check_supported(128, "float17")
    with pytest.raises(SettingsError, match="NOPE"):
        check_supported(128, backend="NOPE", device="cpu")
