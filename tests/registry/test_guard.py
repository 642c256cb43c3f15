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
from polyattn.registry.guard import LatePluginError, within
from polyattn.registry.info import load_object


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


def test_a_setting_that_a_probe_cannot_honour_is_the_users_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probe() -> None:
        raise SettingsError("environment variable LANES=7: must be 8")

    monkeypatch.setattr(machine, "load_object", lambda path: probe)
    info = replace(discover().backend("VANILLA"), probe="lanes:probe", runs="lanes:probe")
    for _ in range(2):  # nothing is remembered of it
        with pytest.raises(SettingsError, match="LANES=7: must be 8"):
            machine.availability(info, 5)
        with pytest.raises(SettingsError, match="LANES=7: must be 8"):
            machine.running(info, 5)


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
