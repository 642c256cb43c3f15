"""What a plugin does while it is asked stays with the plugin; what the user does does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from polyattn.device import Device
from polyattn.errors import PluginError, SettingsError
from polyattn.plugin import Platform
from polyattn.registry import machine
from polyattn.registry.discovery import discover
from polyattn.registry.info import load_object
from polyattn.registry.machine import LatePluginError, within


def ask(call: Any, seconds: float = 5.0) -> Any:
    return within(seconds, "THE_SETTING", "its hook", call)


def test_answers_and_failures() -> None:
    assert ask(lambda: 7) == 7
    for error, says in (
        (ValueError("no"), "its hook failed: ValueError: no"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (PluginError("said\nplainly"), "said plainly"),
    ):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(PluginError) as caught:
            ask(fail)
        assert says in str(caught.value)


def test_a_call_that_hangs_costs_its_time() -> None:
    started = time.perf_counter()
    with pytest.raises(LatePluginError, match=r"within 0\.1 s; .* set THE_SETTING higher"):
        ask(lambda: time.sleep(30), 0.1)
    assert time.perf_counter() - started < 5


def test_a_real_interrupt_still_works() -> None:
    main = threading.get_ident()
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
    started = time.perf_counter()
    # Where tests run in the background the shell has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(lambda: time.sleep(20), 30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - started < 10


def test_a_setting_that_a_probe_cannot_honour_leaves_its_backend_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = ["7"]

    def probe() -> None:
        if lanes != ["8"]:
            raise SettingsError(f"environment variable LANES={lanes[0]}: must be 8")

    monkeypatch.setattr(machine, "load_object", lambda path: probe)
    info = replace(discover().backend("VANILLA"), probe="lanes:probe", runs="lanes:probe")
    assert machine.availability(info, 5) == "environment variable LANES=7: must be 8"
    lanes[:] = ["6"]  # nothing is remembered of it
    assert machine.availability(info, 5) == "environment variable LANES=6: must be 8"
    assert not isinstance(machine.availability(info, 5), machine.Fault)
    assert machine.running(info.runs, 5) == "environment variable LANES=6: must be 8"


def test_an_import_that_exits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_at_import.py").write_text("import sys; sys.exit(9)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="exits_at_import:Kernel exits, with 9"):
        load_object("exits_at_import:Kernel")


def test_a_package_that_selects_while_it_is_imported_has_its_plugin(tmp_path: Path) -> None:
    """Its import lock is held by the thread that waits for the plugin's answer."""
    from zoo.animals import Animal, backends
    from zoo.build import install

    install(tmp_path, Animal("engine", "", ""))
    (tmp_path / "zoo_engine.py").unlink()
    (tmp_path / "zoo_engine").mkdir()
    (tmp_path / "zoo_engine" / "hooks.py").write_text(backends("[info('OF_ENGINE')]"))
    (tmp_path / "zoo_engine" / "__init__.py").write_text(
        "import polyattn\nprint('OF_ENGINE' in polyattn.discover().backends)\n"
    )
    info = tmp_path / "zoo_engine-1.2.dist-info" / "entry_points.txt"
    info.write_text("[polyattn.plugins]\nengine = zoo_engine.hooks\n")
    found = subprocess.run(
        [sys.executable, "-c", "import zoo_engine"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "POLYATTN_PLUGIN_TIMEOUT": "5"},
    )  # fmt: skip
    assert found.stdout == "True\n"


class TestDetectors:
    """A detector runs in a thread of its own, for the caller's current device."""

    PLATFORM = Platform(name="cpu", detect=f"{__name__}:found")

    def test_the_callers_current_device_is_the_detectors(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        current = threading.local()

        class Accelerator:
            is_available = staticmethod(lambda: True)
            current_device_index = staticmethod(lambda: getattr(current, "index", 0))

            @staticmethod
            def set_device_index(index: int) -> None:
                current.index = index

        def found(torch_device: str | None) -> Device:
            index = Accelerator.current_device_index()
            return Device("cpu", "x86_64", torch_device=f"cpu:{index}")

        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=Accelerator))
        monkeypatch.setattr(machine, "load_object", lambda path: found)
        assert machine.ask_detector(self.PLATFORM) == Device("cpu", "x86_64", torch_device="cpu:0")
        current.index = 3
        assert machine.ask_detector(self.PLATFORM) == Device("cpu", "x86_64", torch_device="cpu:3")

    def test_a_late_detector_is_asked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLYATTN_PLUGIN_TIMEOUT", "0.1")
        asked = []

        def hang(torch_device: str | None) -> None:
            asked.append(torch_device)
            time.sleep(30)

        monkeypatch.setattr(machine, "load_object", lambda path: hang)
        platform = Platform(name="cpu", detect="late:detector")
        for _ in range(2):
            with pytest.raises(PluginError, match="did not answer"):
                machine.ask_detector(platform)
        assert len(asked) == 1
        machine.forget_probes()


def test_a_stranger_may_not_take_a_name_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.animals import Animal
    from zoo.build import install

    install(tmp_path, Animal("stranger", "", "", point="cpu"))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = discover()
    assert registry.owners["TORCH_SDPA"].status == "ok"
    (problem,) = [text for text in registry.problems if "zoo-stranger" in text]
    assert "polyattn-cpu keeps it" in problem and "pip uninstall zoo-stranger" in problem
    assert "DISABLE_PLUGINS" not in problem


class Failing:
    """A finder of sys.meta_path that fails whenever something that isn't here is asked for."""

    @staticmethod
    def find_distributions(context: object) -> None:
        raise RuntimeError("no distributions")

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        return None


class FailingSpecs:
    """One that fails for each module that the finders before it don't have."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        raise RuntimeError(f"no spec of {name}")


@pytest.mark.parametrize(
    ("at", "finder"),
    [(0, Failing), (99, Failing), (99, FailingSpecs)],
    ids=["first", "last", "specs"],
)
def test_a_failing_finder_is_passed_over(
    at: int, finder: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyattn.registry.discovery import refresh
    from polyattn.registry.integrations import integrations
    from polyattn.tools.cli.doctoring import examine
    from polyattn.tools.cli.listing import backend_rows

    before = backend_rows(discover()), integrations(), discover().problems
    finders = list(sys.meta_path)
    finders.insert(at, finder)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "meta_path", finders)
    refresh()
    try:
        assert backend_rows(discover()) == before[0]  # no probe takes it for its library's
        assert discover().problems == before[2]
        assert [i.name for i in integrations()] == [i.name for i in before[1]]
        assert examine()["devices"]
    finally:
        monkeypatch.undo()
        refresh()


def test_a_policy_cannot_change_the_callers_spec() -> None:
    from polyattn import LayerSpec, select
    from polyattn.plugin import hookimpl
    from polyattn.registry.discovery import register, unregister

    class Vandal:
        @hookimpl
        def polyattn_api_versions(self) -> tuple[int, int]:
            return (1, 1)

        @hookimpl
        def polyattn_rank(self, spec: LayerSpec) -> None:
            object.__setattr__(spec, "sliding_window", 3)
            if spec.rope is not None:
                object.__setattr__(spec.rope, "theta", 3.0)

    spec = LayerSpec(num_heads=4, head_size=64, dtype="float32")
    register(Vandal(), "vandal")
    try:
        assert select(spec, "cpu").spec.sliding_window is None
        assert spec.sliding_window is None
    finally:
        unregister("vandal")
