"""A TPU is looked for cheaply: without a sign of one, JAX is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from polyattn_tpu import platform


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no sign of a TPU in the environment, nor in the process."""
    for name in ("JAX_PLATFORMS", *platform.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torchax", raising=False)


def test_the_default_device_is_found_without_jax() -> None:
    """In a process of its own, with the plugin installed and `JAX_PLATFORMS` unset."""
    code = """
import sys
import polyattn
from polyattn.registry.devices import resolve_device
from polyattn_tpu.platform import plausible
device = resolve_device()
assert plausible() or device.platform != "tpu", device
found = {name.split(".")[0] for name in sys.modules} & {"jax", "jaxlib", "libtpu", "torchax"}
assert plausible() or not found, found
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


@pytest.mark.parametrize("node", ["dev/accel0", "dev/vfio/3"])
def test_a_device_file_makes_it_plausible(nowhere: None, tmp_path: Path, node: str) -> None:
    assert not platform.plausible(str(tmp_path))
    for other in ("dev/accel/accel0", "dev/vfio/vfio"):  # of other vendors, and on every host
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).touch()
    assert not platform.plausible(str(tmp_path))
    (tmp_path / node).touch()
    assert platform.plausible(str(tmp_path))


@pytest.mark.parametrize("name", platform.VARIABLES)
def test_a_variable_makes_it_plausible(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    assert platform.plausible(str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not platform.plausible(str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert platform.plausible(str(tmp_path))


def test_torchax_makes_it_plausible(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchax", platform)
    assert platform.plausible(str(tmp_path))


def test_asked_for_by_name_jax_answers(nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="jax"` is looked for whatever the host looks like; another device isn't."""
    asked: list[str] = []

    def find(name: str) -> None:
        asked.append(name)

    monkeypatch.setattr(platform, "find_spec", find)
    monkeypatch.setattr(platform, "plausible", lambda: False)
    assert platform.detect("jax:0") is None and asked == ["jax"]
    assert platform.detect("cuda") is None and platform.detect() is None and asked == ["jax"]
