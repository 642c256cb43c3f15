"""Asks this machine: which platform's device is here, and can a backend run on it?"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from polyattn.device import Device
from polyattn.errors import DeviceError
from polyattn.registry.discovery import Registry
from polyattn.registry.info import BackendInfo, load_object


def detect(registry: Registry, torch_device: str | None = None) -> Device:
    """Return the highest-ranking platform's device that is here, or the one asked for.

    Raises `DeviceError` with what each platform's detector said.
    """
    said: list[str] = []
    for platform in sorted(registry.platforms.values(), key=lambda p: (-p.rank, p.name)):
        try:
            device = load_object(platform.detect)(torch_device)
        except Exception as error:
            said.append(f"{platform.name}: its detector failed: {type(error).__name__}: {error}")
            continue
        if device is not None:
            if not isinstance(device, Device) or device.platform != platform.name:
                said.append(f"{platform.name}: its detector returned {device!r}")
                continue
            return device
        said.append(f"{platform.name}: not here")
    said += registry.problems
    asked = f"device {torch_device!r}" if torch_device else "a device"
    reasons = "".join(f"\n  {text}" for text in said)
    hint = "" if registry.platforms else '\n  no plugin is installed: pip install "polyattn[cpu]"'
    raise DeviceError(f"no installed plugin finds {asked} on this machine{reasons}{hint}")


def availability(info: BackendInfo, timeout: float) -> str | None:
    """Return why `info` can't run on this machine, or None. Imports no vendor library.

    Of several builds one is enough.
    """
    if info.variants:
        reasons = {v.name: availability(info.as_built(v), timeout) for v in info.variants}
        if None in reasons.values():
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    for text in info.requires:
        problem = _requirement_problem(text)
        if problem:
            return f"{problem}; {info.install}" if info.install else problem
    problem = static_problem(info.path)
    if problem or info.probe is None:
        return problem
    return _run_probe(info.probe, timeout)


@cache
def _requirement_problem(text: str) -> str | None:
    plain = _PLAIN_REQUIREMENT.fullmatch(text)
    # packaging takes 30 ms to import, its parser of requirements as long again: not before needed.
    if plain:
        name, needed = plain.groups()
    else:
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        name, needed = requirement.name, str(requirement.specifier)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed (needs {text})"
    if needed:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(needed).contains(version, prereleases=True):
            return f"{name} {version} is installed, but {text} is needed"
    return None


_PLAIN_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*([<>=!~][^;\[]*)?")


@cache
def static_problem(path: str) -> str | None:
    """Return why `"package.module:Class"` can't be there, from its source, without importing it."""
    module, _, name = path.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"its module {module} can't be found: {type(error).__name__}: {error}"
    if found is None:
        return f"its module {module} is missing; the plugin is incomplete: reinstall it"
    if not (found.origin and found.origin.endswith(".py")):
        return None
    # A look at the text costs a twentieth of parsing it, and this is on the way of every selection.
    defined = rf"^\s*(?:class|def)\s+{name}\b|^{name}\s*[:=]|^\s*(?:from .*)?import .*\b{name}\b"
    if not re.search(defined, Path(found.origin).read_text(encoding="utf-8"), re.MULTILINE):
        return f"{module} has no {name!r}; the plugin and its declaration disagree"
    return None


_probed: dict[str, str | None] = {}


def forget_probes() -> None:
    """Probe again at the next question, after something was installed or mended."""
    _probed.clear()
    _requirement_problem.cache_clear()
    static_problem.cache_clear()


def _run_probe(path: str, timeout: float) -> str | None:
    """Run a probe in a thread of its own, so that one that hangs costs `timeout` seconds."""
    if path not in _probed:
        _probed[path] = _within(timeout, lambda: load_object(path)())
    return _probed[path]


def _within(timeout: float, call: Callable[[], Any]) -> str | None:
    answer: list[str | None] = []

    def run() -> None:
        try:
            result = call()
            answer.append(None if result is None else str(result))
        except BaseException as error:
            answer.append(f"its probe failed: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        return f"its probe did not answer within {timeout:g} s (POLYATTN_PROBE_TIMEOUT)"
    return answer[0] if answer else "its probe ended without an answer"
