"""Which backend a name means: other engines' names are aliases, and kinds of layers are told apart."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
from polyattn import LayerSpec, select
from polyattn.errors import PluginError, SettingsError
from polyattn.plugin import BackendInfo, Capabilities, declare
from polyattn.registry import catalogue, names
from polyattn.registry.discovery import discover, refresh, register, unregister

LLAMA = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)


def test_a_registry_is_found_again_as_long_as_nothing_new_is_registered() -> None:
    """Whose hooks answer otherwise the next time is asked again, and installed plugins by `refresh`."""
    mine = ModuleType("mine_for_a_while")
    before = discover()
    register(mine)
    during = discover()
    assert during is not before and during is discover()
    unregister(mine)
    assert discover() is before
    register(mine)
    assert discover() is not during
    unregister(mine)
    refresh()
    assert discover() is not before
    with pytest.raises(PluginError, match="plugin=3 has no __name__: pass a module"):
        register(3)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("CPU_ATTN", "NATIVE_ATTN"),
        ("intel_amx", "NATIVE_ATTN"),
        ("TORCH_NATIVE", "TORCH_SDPA"),
        ("SDPA", "TORCH_SDPA"),
        ("FLEX", "FLEX_ATTENTION"),
        ("fa2", "FLASH_ATTN"),
        ("FA3", "FLASH_ATTN_V3"),
        ("FA4", "FLASH_ATTN_V4"),
        ("TRTLLM", "FLASHINFER_TRTLLM"),
        ("trtllm_mha", "FLASHINFER_TRTLLM"),
        ("TRTLLM_MLA", "FLASHINFER_MLA"),
        ("CUTLASS", "CUTLASS_MLA"),
        ("TRITON", "TRITON_ATTN"),
        ("AITER", "ROCM_ATTN"),
        ("ROCM_AITER_FA", "ROCM_ATTN"),
        ("PALLAS", "PALLAS_ATTN"),
        ("ASCEND", "ASCEND_ATTN"),
        ("INTEL_XPU", "XPU_FLASH_ATTN"),
    ],
)
def test_the_engines_names_are_known(alias: str, name: str) -> None:
    assert discover().backend(alias).name == name


def test_an_alias_is_an_override_and_a_note_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = select(LLAMA, "x86-amx", backend="cpu_attn").decision
    assert decision.prefill == decision.decode == "NATIVE_ATTN"
    assert "CPU_ATTN is NATIVE_ATTN" in decision.explain()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON")
    monkeypatch.setenv("POLYATTN_BACKEND", "decode=FA3")
    decision = select(LLAMA, "h100-sxm").decision
    assert (decision.prefill, decision.decode) == ("TRITON_ATTN", "FLASH_ATTN_V3")
    assert {"FA3 is FLASH_ATTN_V3", "TRITON is TRITON_ATTN"} <= set(decision.notes)


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        ("MAMBA1", "mamba1", "TRITON_SCAN"),
        ("mamba2", "mamba2", "TRITON_SCAN"),
        ("LINEAR", "linear", "TRITON_SCAN"),
        ("SHORT_CONV", "short_conv", "CAUSAL_CONV1D"),
        ("GDN", "gdn", "TRITON_SCAN"),
        ("GDN_ATTN", "gdn", "FLA"),
    ],
)
def test_a_kind_of_layer_is_no_backend(name: str, kind: str, backend: str) -> None:
    with pytest.raises(
        SettingsError, match="is a kind of layer; its backends on cuda are"
    ) as caught:
        select(LLAMA, "h100-sxm", backend=name)
    assert backend in str(caught.value)
    assert f"name one for the kind: {kind}=" in str(caught.value)
    named = str(caught.value).rpartition(" ")[2]
    select(LLAMA, "h100-sxm", backend=named)  # the remedy is taken as it stands


@pytest.mark.parametrize("name", names.COUNTERPARTS)
def test_a_name_without_a_counterpart_says_what_serves(name: str) -> None:
    """The advice names backends that exist, and is no backend's name or alias."""
    assert names.backend_named(name, discover().backends) is None
    with pytest.raises(SettingsError, match="is no backend here; ") as caught:
        select(LLAMA, "h100-sxm", backend=name)
    for word in re.findall(r"\b[A-Z]+_[A-Z_]+\b", str(caught.value).partition(";")[2]):
        assert word in discover().backends


def test_vllms_older_names_work() -> None:
    assert select(LLAMA, "h100-sxm", backend="TRITON_ATTN_VLLM_V1").decision.decode == "TRITON_ATTN"


def test_an_absent_plugins_alias_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_DISABLE_PLUGINS", "cuda")
    there = catalogue.installed
    monkeypatch.setattr(
        catalogue, "installed", lambda name: None if name == "polyattn-cuda" else there(name)
    )
    with pytest.raises(
        SettingsError, match="'FA3' isn't here: polyattn-cuda has it and isn't inst"
    ):
        select(LLAMA, "cpu", backend="FA3")


@pytest.fixture
def plugin() -> Iterator[list[BackendInfo]]:
    """The backends of a stranger's plugin; a test fills them in before it asks."""
    infos: list[BackendInfo] = []
    declare(__name__, api_versions=(1, 1), backends=infos)
    register(sys.modules[__name__], "stranger")
    yield infos
    unregister("stranger")


MINE = BackendInfo(
    name="MINE", summary="", path="mine:Mine", capabilities=Capabilities(platforms={"cpu": ()})
)


def test_an_alias_that_is_anothers_name_is_a_conflict(plugin: list[BackendInfo]) -> None:
    plugin.append(replace(MINE, aliases=("TORCH_SDPA", "mine_too")))
    registry = discover()
    assert registry.backend("TORCH_SDPA").name == "TORCH_SDPA"
    assert registry.backend("MINE_TOO").name == "MINE"
    assert any(
        "alias 'TORCH_SDPA' is claimed by MINE" in text and "rename one" in text
        for text in registry.problems
    )


def test_an_alias_of_two_backends_is_neithers(plugin: list[BackendInfo]) -> None:
    plugin += [replace(MINE, aliases=("OURS",)), replace(MINE, name="OTHER", aliases=("OURS",))]
    registry = discover()
    assert any("alias 'OURS' is claimed by MINE" in text for text in registry.problems)
    with pytest.raises(Exception, match="the alias 'OURS' is claimed"):
        registry.backend("ours")


@pytest.mark.parametrize("aliases", [("MINE",), ("A", "a"), ("no spaces",)])
def test_a_bad_alias_breaks_its_plugin(plugin: list[BackendInfo], aliases: tuple[str, ...]) -> None:
    plugin.append(replace(MINE, aliases=aliases))
    registry = discover()
    assert "MINE" not in registry.backends
    assert any("BackendInfo.aliases" in text for text in registry.problems)


def test_two_registered_plugins_with_one_name_are_told_how_to_remove_one(
    plugin: list[BackendInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.append(MINE)
    monkeypatch.setitem(sys.modules, "another", ModuleType("another"))
    declare("another", api_versions=(1, 1), backends=[MINE])
    register(sys.modules["another"], "another")
    try:
        said = [text for text in discover().problems if "backend name 'MINE'" in text]
        with pytest.raises(SettingsError, match="'MINE' isn't usable: the backend name 'MINE' is"):
            select(LLAMA, "cpu", backend="mine")
    finally:
        unregister("another")
    assert len(said) == 1 and "polyattn.unregister('another')" in said[0]
