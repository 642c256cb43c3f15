"""A zoo of broken plugins: every healthy one works beside them, and each one's fault is named."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polyattn
import pytest
import torch  # before the clock of a detector runs that imports it
from defaults import CPU_DEFAULT
from polyattn import LayerSpec, select
from polyattn.errors import DeviceError, PolyattnError
from polyattn.registry import discovery
from polyattn.registry.discovery import discover
from polyattn.registry.machine import availabilities, detect
from polyattn.tools.cli.doctoring import examine
from polyattn.tools.cli.listing import backend_rows, plugin_rows
from zoo.animals import ANIMALS, HEALTHY, Animal
from zoo.build import build

SPEC = LayerSpec(num_heads=4, head_size=64, dtype="float32")
BROKEN = [animal for animal in ANIMALS.values() if animal.name not in HEALTHY]
UNREADY = ("NEEDY", "MODULE-OTHER", "PROBE_HANGS")
TIMEOUTS = {"POLYATTN_PROBE_TIMEOUT": "0.5", "POLYATTN_PLUGIN_TIMEOUT": "0.8"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert torch is not None
    return build(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def inside(zoo: Path) -> Iterator[dict[str, Any]]:
    """What `list`, `doctor` and a selection say in this process, with the whole zoo installed."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(zoo))
    for name in list(os.environ):
        if name.startswith("POLYATTN_"):
            patch.delenv(name)
    for name, value in TIMEOUTS.items():
        patch.setenv(name, value)
    discovery.refresh()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("polyattn").addHandler(handler)
    registry = discover()
    found = {
        "registry": registry,
        "list": [*plugin_rows(registry), *backend_rows(registry)],
        "problems": registry.problems,
        "doctor": examine(),
        "selection": select(SPEC, "cpu"),
        "reasons": availabilities([registry.backends[name] for name in UNREADY], 0.5),
        "log": records,
    }
    logging.getLogger("polyattn").removeHandler(handler)
    patch.undo()
    yield found
    discovery.refresh()


def test_the_zoo_is_large() -> None:
    assert len(BROKEN) >= 200


@pytest.mark.parametrize("animal", BROKEN, ids=lambda animal: animal.name)
def test_each_fault_is_named_with_distribution_and_remedy(
    inside: dict[str, Any], animal: Animal
) -> None:
    if animal.where == "log":
        lines = [line for line in inside["log"] if f"zoo-{animal.name} 1.2" in line]
        assert lines and all("polyattn_rank" in line for line in lines)
    else:
        problems = (
            inside["problems"] if animal.where == "problems" else inside["doctor"]["problems"]
        )
        lines = [line for line in problems if f"zoo-{animal.name} 1.2" in line]
    disabling = f"DISABLE_PLUGINS={animal.name}"
    if animal.name == "point-name":  # which no list can name
        disabling = "PLUGINS to the names of the others"
    remedy = f"pip uninstall zoo-{animal.name}, or set POLYATTN_{disabling}"
    assert any(remedy in line for line in lines), lines
    if animal.says == "did not answer within":
        assert any("and doesn't hang, set POLYATTN_P" in line for line in lines), lines
    assert any(animal.says in line for line in lines), lines
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


def test_corrupt_metadata_is_named(inside: dict[str, Any]) -> None:
    assert any("zoo_corrupt" in p and "metadata is corrupt" in p for p in inside["problems"])


def test_everybody_else_is_served(inside: dict[str, Any]) -> None:
    decision = inside["selection"].decision
    assert (decision.prefill, decision.decode) == (CPU_DEFAULT, CPU_DEFAULT)
    assert {*inside["problems"]} <= {*decision.notes}  # explain says who is missing
    assert inside["doctor"]["devices"] and "cpu" in inside["doctor"]["devices"][0]
    for animal in HEALTHY.values():
        named = f"zoo-{animal.name} 1.2"
        assert not any(named in line for line in inside["doctor"]["problems"]), animal.name
    states = {row["name"]: row.get("state") for row in inside["doctor"]["backends"]}
    for name in ("HEALTHY", "LOWER_CASE", "PRINTS", "REEXPORT", "STAR", "LAZY", "BRANCH", "ATTEMPT",
                 "TUPLE", "RENAMED", "GLOBALS", "WALRUS", "LATIN", "MOVED", "NAMESPACE"):  # fmt: skip
        assert states[name] == "ready", name
    assert states["NEEDY"] == "zoo-lib is not installed (needs zoo-lib>=2); pip install zoo"


def test_looking_up_a_class_imports_nothing_of_it(zoo: Path) -> None:
    code = (
        "import sys; from polyattn.registry.lookup import static_problem as find\n"
        "print([find(f'zoo_package_parent_{n}.inner.kernel:Kernel') for n in sys.argv[1:]])\n"
        "print([m for m in sys.modules if m.startswith('zoo_')])"
    )
    names = ("raises", "exits", "hangs", "interrupts")
    found = subprocess.run(
        [sys.executable, "-c", code, *names], env={**os.environ, "PYTHONPATH": str(zoo)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines() == ["[None, None, None, None]", "[]"]


def test_texts_are_plain_and_bounded(inside: dict[str, Any]) -> None:
    row = next(row for row in inside["list"] if row["name"] == "TEXTS")
    assert row["summary"].startswith("[red]xxx") and row["problem"].startswith("[bold]yyy")
    assert all(row[name].isprintable() and len(row[name]) <= 300 for name in ("summary", "problem"))
    assert inside["registry"].backends["TEXTS"].install == "a b c"


HANGING = ",".join(name for name in ANIMALS if "hangs" in name)


def command(zoo: Path, *args: str, code: int = 0, **env: str) -> tuple[str, str]:
    """Run a command among all but the hanging animals, unless `env` says otherwise."""
    env = {"POLYATTN_DISABLE_PLUGINS": HANGING, **env}
    path = os.pathsep.join(filter(None, (str(zoo), os.environ.get("PYTHONPATH"))))
    found = subprocess.run(
        [sys.executable, "-m", "polyattn", *args],
        env={**os.environ, "PYTHONPATH": path, **TIMEOUTS, **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == code, found.stdout[-2000:] + found.stderr[-2000:]
    assert "Traceback" not in found.stderr
    assert "\x1b" not in found.stdout + found.stderr
    return found.stdout, found.stderr


def test_list_with_the_zoo(zoo: Path) -> None:
    out, err = command(zoo, "list", POLYATTN_DISABLE_PLUGINS="")
    assert out.count("\nproblem: ") >= 200 and "LOWER_CASE" in out
    assert (
        "prints" not in out.replace("zoo-prints", "").replace("prints ", "")
        and "hook prints" in err
    )
    assert "import writes" in err
    data = json.loads(command(zoo, "list", "--json")[0])
    assert {"HEALTHY", "TORCH_SDPA", "TEXTS"} <= {row["name"] for row in data["backends"]}


def test_a_run_in_the_zoo(zoo: Path) -> None:
    """Detection imports torch here, within its own time."""
    run = ("run", "--requests", "2", "--scale", "0.02", "--max-tokens", "2", "--json")
    data = json.loads(command(zoo, *run, POLYATTN_PLUGIN_TIMEOUT="20")[0])
    assert data["groups"][0]["chosen"]["decode"] == CPU_DEFAULT and data["checked_tokens"] > 0


def test_a_backend_is_named_in_any_case(zoo: Path, inside: dict[str, Any]) -> None:
    registry = inside["registry"]
    assert registry.backend("Lower_Case") is registry.backends["LOWER_CASE"]
    spec = SPEC.to_json()
    out, _ = command(zoo, "explain", "--spec", spec, "--device", "cpu", "--backend", "lower_case")
    assert "=> prefill LOWER_CASE, decode LOWER_CASE" in out


def test_naming_a_broken_backend_says_why(inside: dict[str, Any]) -> None:
    registry = inside["registry"]
    with pytest.raises(PolyattnError, match=r"zoo-duplicate-a 1\.2.*zoo-duplicate-b 1\.2"):
        registry.backend("twice")
    needy, other, hangs = inside["reasons"]
    assert "pip install zoo" in str(needy) and "has no 'Kernel'" in str(other)
    assert "did not answer" in str(hangs)


def test_a_name_of_ours_stays_ours(inside: dict[str, Any]) -> None:
    registry = inside["registry"]
    assert registry.owners["TORCH_SDPA"].dist == registry.owners["FLEX_ATTENTION"].dist
    assert registry.platforms["cpu"].detect == "polyattn_cpu.probes:detect"
    assert "TWICE" not in registry.backends and "twochip" not in registry.platforms


def test_a_disabled_animal_is_not_imported(zoo: Path) -> None:
    out, _ = command(zoo, "list", POLYATTN_DISABLE_PLUGINS=f"import-exits,{HANGING}")
    assert "plugin 'import-exits'" not in out and "plugin 'import-base'" in out


def test_an_animal_that_no_list_can_name_is_left_out_by_naming_others(zoo: Path) -> None:
    out, _ = command(zoo, "list", POLYATTN_PLUGINS="healthy", POLYATTN_DISABLE_PLUGINS="")
    assert "HEALTHY" in out and "zoo-point-name" in out and "problem: " not in out


def test_where_no_device_is_found_detectors_that_failed_are_named(inside: dict[str, Any]) -> None:
    with pytest.raises(DeviceError) as caught:
        detect(inside["registry"], "no_such_device")
    assert (
        "chip_raises: its detector zoo_detector_raises:ask failed: RuntimeError: no chip (plugin "
        "'detector-raises' of zoo-detector-raises 1.2; pip uninstall zoo-detector-raises, or set "
        "POLYATTN_DISABLE_PLUGINS=detector-raises)"
    ) in str(caught.value)


def test_a_late_policy_is_asked_once(inside: dict[str, Any]) -> None:
    assert inside["registry"].late_policies == {"rank-hangs"}


def test_a_second_discovery_doesnt_wait_for_a_hanging_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.animals import ANIMALS
    from zoo.build import install

    install(tmp_path, replace(ANIMALS["import-hangs"], name="import-hangs-twice"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("POLYATTN_PLUGIN_TIMEOUT", "0.3")
    for _ in range(2):
        discovery.refresh()
        assert any("did not answer within 0.3 s" in problem for problem in discover().problems)
    discovery.refresh()


def test_three_hundred_plugins_are_listed_in_time(tmp_path: Path) -> None:
    from zoo.animals import backends
    from zoo.build import install

    for index in range(300):
        install(tmp_path, Animal(f"many-{index}", backends(f"[info('MANY_{index}')]"), ""))
    code = "import time; from polyattn import discover; t = time.process_time()\n"
    code += "print(len(discover().backends), time.process_time() - t)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    count, seconds = found.stdout.split()
    assert int(count) > 300
    assert float(seconds) < 4  # catches what grows with the square; a plugin takes a millisecond


@pytest.mark.slow
def test_doctor_names_who_keeps_others_waiting(tmp_path: Path) -> None:
    """A plugin that works is no problem; that all who list wait for its torch is said."""
    from zoo.animals import backends
    from zoo.build import install

    sources = {"early": "import torch", "late": "__import__('time').sleep(0.6)"}
    sources |= {"more": "from torch import Tensor", "other": "import torch; print('torch')"}
    for name, first in sources.items():
        install(tmp_path, Animal(name, f"{first}\n{backends(f'[info({name.upper()!r})]')}", ""))
    env = {"POLYATTN_PLUGIN_TIMEOUT": "30"}
    said = json.loads(command(tmp_path, "doctor", "--json", **env, POLYATTN_DISABLE_PLUGINS="")[0])
    early, late, *others = said["notes"]
    assert [note.split(", ")[0] for note in others] == [
        f"plugin {name!r} of zoo-{name} 1.2: its hook module imports torch"
        for name in ("more", "other")
    ]
    assert early.startswith("plugin 'early' of zoo-early 1.2: its hook module imports torch, ")
    assert late.startswith("plugin 'late' of zoo-late 1.2: its import and hooks are slow, 0.")
    assert all("before anybody can list or select; move what" in note for note in said["notes"])
    text, _ = command(tmp_path, "doctor", **env, POLYATTN_DISABLE_PLUGINS="early,more,other")
    assert "note: plugin 'late' of zoo-late" in text and "no problem found" in text


def test_refresh_forgets_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.animals import backends
    from zoo.build import install

    flag = tmp_path / "mended"
    ask = "\ndef ask():\n    from os.path import exists\n"
    ask += f"    return None if exists({str(flag)!r}) else 'no'\n"
    source = backends("[info('MENDED', probe='zoo_mended:ask')]") + ask
    install(tmp_path, Animal("mended", source, ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    discovery.refresh()
    assert availabilities([discover().backend("MENDED")], 2.0) == ["no"]
    flag.touch()
    assert availabilities([discover().backend("MENDED")], 2.0) == ["no"]
    polyattn.registry.discovery.refresh()
    assert availabilities([discover().backend("MENDED")], 2.0) == [None]


def test_a_second_name_of_a_module_leaves_the_first_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.animals import backends
    from zoo.build import install

    rank = "asked = []\n@hookimpl\ndef polyattn_rank(ranking):\n    asked.append(ranking)\n"
    install(tmp_path, Animal("first", backends("[info('FIRST')]") + f"\n{rank}", ""))
    shutil.copytree(tmp_path / "zoo_first-1.2.dist-info", again := tmp_path / "zoo_z-1.2.dist-info")
    (again / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-z\nVersion: 1.2\n")
    (again / "entry_points.txt").write_text("[polyattn.plugins]\nz = zoo_first\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    discovery.refresh()
    (problem,) = (text for text in discover().problems if "zoo-z 1.2" in text)
    assert "zoo_first is plugin 'first' already; remove one entry point" in problem
    select(SPEC, "cpu")
    assert importlib.import_module("zoo_first").asked
    monkeypatch.undo()
    discovery.refresh()
