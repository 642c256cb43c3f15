"""Several builds of one library: a profile assumes the preferred one, a device counts what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from polyattn import Device, LayerSpec, discover, register, select, unregister
from polyattn.errors import PluginError, SelectionError
from polyattn.plugin import BackendInfo, Capabilities, Priority, Variant, declare, multiples
from polyattn.registry.devices import resolve_device
from polyattn.registry.machine import availability
from polyattn.registry.validate import accepted
from polyattn.selection.tree import as_built
from polyattn.tools.cli.listing import backend_rows

SPEC = LayerSpec(num_heads=8, head_size=64)
HERE = Device("cuda", "sm_90", torch_device="cuda:0")
PROFILE = resolve_device("h200")


def variant(name: str, **claims: Any) -> Variant:
    return Variant(
        name=name,
        path=f"builds_{name}:Kernel",
        probe=f"builds_{name}:ready",
        capabilities=Capabilities(platforms={"cuda": ()}, **claims),
    )


PLAIN = variant("plain", block_sizes=multiples(256), preferred_block_size=256)
RICH = variant("rich", features=frozenset({"causal", "gqa", "alibi"}))
LIBRARY = BackendInfo.of_variants(
    PLAIN, RICH, name="LIBRARY", summary="of two builds", priorities=(Priority(score=99),)
)


def built(spec: LayerSpec, device: Device, *installed: str) -> BackendInfo:
    def unavailable(info: BackendInfo) -> str | None:
        return None if info.build in installed else f"{info.build or info.name} isn't here"

    return as_built({"LIBRARY": LIBRARY}, spec, device, unavailable)["LIBRARY"]


def test_a_profile_assumes_the_preferred_build_whatever_is_installed() -> None:
    for installed in ((), ("rich",), ("plain", "rich")):
        assert built(SPEC, PROFILE, *installed).build == "plain"
        assert built(SPEC.replace(alibi=True), PROFILE, *installed).build == "plain"


def test_a_device_has_what_is_installed() -> None:
    assert built(SPEC, HERE, "rich").build == "rich"
    assert built(SPEC, HERE, "rich").capabilities is RICH.capabilities
    assert built(SPEC, HERE, "rich").path == RICH.path
    assert built(SPEC, HERE, "plain", "rich").build == "plain"
    # The first that can serve the layer.
    assert built(SPEC.replace(alibi=True), HERE, "plain", "rich").build == "rich"
    assert built(SPEC.replace(alibi=True), HERE, "plain").build == "plain"
    nobody = built(SPEC, HERE)
    assert nobody == LIBRARY and nobody.capabilities is PLAIN.capabilities


def test_a_build_of_another_platform_is_not_probed() -> None:
    def unavailable(info: BackendInfo) -> str | None:
        raise AssertionError(f"{info.build} was probed")

    cpu = Device("cpu", "x86_64", torch_device="cpu")
    assert as_built({"LIBRARY": LIBRARY}, SPEC, cpu, unavailable)["LIBRARY"].build == "plain"


def test_why_none_is_here_names_each() -> None:
    reason = availability(LIBRARY, 5.0)
    assert reason is not None and "plain: " in reason and "rich: " in reason


@pytest.fixture
def library() -> Iterator[None]:
    declare(__name__, api_versions=(1, 1), backends=[LIBRARY])
    register(sys.modules[__name__], "library")
    yield
    unregister("library")


def test_explain_and_list_name_the_build(library: None) -> None:
    selection = select(SPEC, "h200", backend="LIBRARY")
    assert "+ LIBRARY (plain's build) for prefill" in selection.explain()
    assert selection.cache_format is not None and selection.cache_format.block_size == 256
    chosen = selection.backend("prefill")
    assert chosen is not None and chosen.build == "plain"
    verdicts = json.loads(json.dumps(selection.decision.to_dict()))["steps"][-1]["candidates"]
    assert {v["build"] for v in verdicts if v["backend"] == "LIBRARY"} == {"plain"}
    row = next(r for r in backend_rows(discover()) if r["name"] == "LIBRARY")
    assert list(row["builds"]) == ["plain", "rich"] and all(row["builds"].values())


CLAIMS = RICH.capabilities


@pytest.mark.parametrize(
    ("variants", "fields", "why"),
    [
        ((PLAIN, PLAIN), {}, "a build twice"),
        ((), {"variants": (PLAIN,)}, "of_variants"),
        ((), {"build": "x"}, "declare variants"),
        ((Variant(name="a b", path="a:B", capabilities=CLAIMS),), {}, "Variant.name='a b'"),
        ((Variant(name="a", path="nothing", capabilities=CLAIMS),), {}, "Variant.path='nothing'"),
    ],
)
def test_nonsense_is_named(variants: tuple[Variant, ...], fields: dict[str, Any], why: str) -> None:
    make = partial(BackendInfo.of_variants, *variants)
    if not variants:
        make = partial(BackendInfo, path="a:B", capabilities=CLAIMS)
    with pytest.raises(PluginError, match=why):
        accepted("polyattn_backends", [make(name="B", summary="", **fields)], BackendInfo)


CHOICES = """
import json, sys
from importlib.machinery import ModuleSpec
class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, None) if name in sys.argv[1:] else None
sys.meta_path.insert(0, Finder())
from polyattn import LayerSpec, select
base = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
found = []
for spec in (base, base.replace(alibi=True), base.replace(learned_sinks=True)):
    for profile in ("a100", "h200"):
        found.append(select(spec, profile).explain())
print(json.dumps(found))
"""


def test_a_profiles_choice_is_the_same_on_every_machine() -> None:
    """With FlashAttention-3's package there or not, the claims that are judged are the same."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", CHOICES, *modules], capture_output=True, text=True, check=True,
            env=os.environ,
        ).stdout
        for modules in ((), ("flash_attn_interface", "flash_mla"))
    ]  # fmt: skip
    assert runs[0] == runs[1] and "FLASH_ATTN (flash-attn's build)" in runs[0]


def test_torchs_build_is_not_asked_for_what_it_lacks() -> None:
    """It was accepted for ALiBi once, and died when it was built."""
    flash = discover().backends["FLASH_ATTN"]
    torchs = next(b for b in flash.builds if b.build == "torch")
    here = as_built(
        {"FLASH_ATTN": flash}, SPEC.replace(alibi=True), HERE,
        lambda info: None if info.build == "torch" else "not here",
    )["FLASH_ATTN"]  # fmt: skip
    assert here == torchs and "alibi" not in here.capabilities.features
    with pytest.raises(SelectionError, match="vLLM's build reads sinks"):
        select(SPEC.replace(learned_sinks=True), "h200", backend="FLASH_ATTN_V3")
