"""What isn't installed is named, with the command that installs it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import polyattn
import pytest
from polyattn.errors import DeviceError, SettingsError
from polyattn.registry import catalogue
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.tools.cli.catalogue import generated
from polyattn.tools.cli.listing import WIDTH, columns

ROOT = Path(__file__).parents[2]
SPEC = polyattn.LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that polyattn-cuda isn't installed, and that polyattn came from a wheel."""
    monkeypatch.setenv("POLYATTN_DISABLE_PLUGINS", "cuda")
    polyattn.settings.reload()
    there = catalogue.installed
    monkeypatch.setattr(
        catalogue, "installed", lambda name: None if name == "polyattn-cuda" else there(name)
    )
    monkeypatch.setattr(catalogue, "_checkout", lambda: None)


def test_the_catalogue_is_what_our_plugins_declare() -> None:
    fresh = generated(discover())
    assert catalogue.CATALOGUE.read_text() == fresh, (
        "stale: pip install -r requirements-dev.txt && python -m polyattn.tools.cli.catalogue"
    )
    for brings in json.loads(fresh).values():
        assert all((ROOT / folder / "pyproject.toml").is_file() for folder in brings["folder"])


@pytest.mark.usefixtures("without_cuda")
def test_an_absent_plugins_names_come_with_the_command_that_installs_it() -> None:
    remedy = r"polyattn-cuda has it and isn't installed; run .*pip install \"polyattn\[cuda\]\""
    with pytest.raises(DeviceError, match=remedy):
        resolve_device("h100-sxm")
    with pytest.raises(SettingsError, match=remedy):
        polyattn.select(SPEC, device="cpu", backend="flash_attn")


@pytest.mark.usefixtures("without_cuda")
def test_a_misspelt_name_of_an_absent_plugin_is_corrected() -> None:
    with pytest.raises(DeviceError, match="did you mean 'h100-sxm'"):
        resolve_device("h100-smx")


def test_an_unknown_backend_is_told_what_lists_them() -> None:
    with pytest.raises(
        SettingsError, match="'NOPE' is unknown; `polyattn list --all` prints them$"
    ):
        polyattn.select(SPEC, device="cpu", backend="nope")


@pytest.mark.usefixtures("without_cuda")
def test_a_checkout_installs_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_checkout", lambda: ROOT)
    command = catalogue.install_command("polyattn-cuda")
    assert command.endswith(f"pip install {ROOT / 'plugins/cuda'}")  # triton's is here


def test_the_checkout_is_where_core_was_installed_from() -> None:
    origin = json.loads(metadata.distribution("polyattn").read_text("direct_url.json") or "{}")
    assert origin["url"].endswith("/core")
    assert catalogue._checkout() == ROOT


def test_a_wide_table_wraps_between_words() -> None:
    text = columns(
        [("name", "what it is"), ("A", "word " * 60), ("B", "flashinfer-python>=0.6.13")]
    )
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "flashinfer-python>=0.6.13" in text
