"""Asks plugins: which device is here, can a backend run on it, and which of several is better?

Each call into a plugin has a time limit and a thread of its own. No exception or exit of it reaches the
host. A call that hangs costs its time limit. A user's Ctrl-C always arrives in the main thread, so it
differs from a KeyboardInterrupt that a plugin raises.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import is_dataclass, replace
from typing import Any

import pluggy

from polyattn.device import Device
from polyattn.errors import DeviceError, PluginError, SettingsError, describe, plain, shown
from polyattn.registry import lookup
from polyattn.registry.hooks import Platform
from polyattn.registry.info import BackendInfo, load_object
from polyattn.registry.installed import Registry
from polyattn.registry.requirements import requirement_problem
from polyattn.registry.validate import mismatches
from polyattn.settings import current_settings
from polyattn.spec.layer import LayerSpec

log = logging.getLogger("polyattn")


class LatePluginError(PluginError):
    """A plugin that didn't answer in time."""


class PluginCall:
    """A running call into a plugin. `what` names it in errors: `"its probe"`."""

    def __init__(self, what: str, call: Callable[[], Any]):
        self.what = what
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the plugin's own too
            self._error = error
        finally:
            self._done.set()

    def answer(self, seconds: float, setting: str) -> Any:
        """Return the call's result. Raises `PluginError`, or `LatePluginError` if it was late.

        `setting` names the variable that `seconds` comes from.
        """
        if not self._done.wait(seconds):
            raise LatePluginError(
                f"{self.what} did not answer within {seconds:g} s; if it is slow and doesn't hang, set "
                f"{setting} higher"
            )
        if isinstance(self._error, PluginError):
            raise PluginError(describe(self._error)) from self._error
        if self._error is not None:
            raise PluginError(f"{self.what} failed: {describe(self._error)}") from self._error
        return self._answer


def within(seconds: float, setting: str, what: str, call: Callable[[], Any]) -> Any:
    """Return what `call` returns. Raises `PluginError` if it fails or is late."""
    return PluginCall(what, call).answer(seconds, setting)


def detect(registry: Registry, torch_device: str | None = None) -> Device:
    """Return the present device of the highest-ranking platform, or the requested one.

    Raises `DeviceError` with each detector's message.
    """
    said: list[str] = []
    kind = torch_device and torch_device.split(":")[0]
    for platform in sorted(registry.platforms.values(), key=lambda p: (-p.rank, p.name)):
        try:
            device = ask_detector(platform, torch_device)
        except PluginError as error:
            owner = registry.platform_owners[platform.name]
            said.append(f"{platform.name}: {error} ({owner.origin}; {owner.removal})")
            log.warning("platform %s is passed over: %s (%s)", platform.name, error, owner.origin)
            continue
        if device is not None:
            return device
        if kind in (None, platform.name, *platform.device_types):  # others aren't asked
            said.append(f"{platform.name}: not here")
    said += [*registry.disabled, *registry.problems]
    asked = f"device {torch_device!r}" if torch_device else "a device"
    reasons = "".join(f"\n  {text}" for text in said)
    none = '\n  for this machine\'s CPU: pip install "polyattn[cpu]"'
    hint = "" if registry.platforms or registry.disabled else none
    if torch_device:
        hint += "\n  without a name this machine's best device is used"
    raise DeviceError(f"no installed plugin finds {asked} on this machine{reasons}{hint}")


def interpreted(registry: Registry, profile: Device) -> tuple[Device, AbstractContextManager[Any]]:
    """Return a device that interprets a profile's kernels here, and the context to work in.

    The profile of a platform without an interpreter is returned as it is. Raises `PluginError`.
    """
    platform = registry.platforms.get(profile.platform)
    if profile.is_real or platform is None or platform.interpret is None:
        return profile, nullcontext()
    path = platform.interpret
    try:
        device, context = load_object(path)(profile)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{path} can't interpret {profile}: {describe(error)}") from error
    return device, context


_late_detectors: dict[str, str] = {}


def ask_detector(platform: Platform, torch_device: str | None = None) -> Device | None:
    """Return the device that a platform's detector finds. Raises `PluginError` when it fails."""
    path = platform.detect
    if path in _late_detectors:  # to wait once is enough
        raise PluginError(_late_detectors[path])
    adopt = _current_accelerator()

    def find() -> Any:
        adopt()
        return load_object(path)(torch_device)

    seconds = current_settings().plugin_timeout
    try:
        device = within(seconds, "POLYATTN_PLUGIN_TIMEOUT", f"its detector {path}", find)
    except LatePluginError as error:
        _late_detectors[path] = str(error)
        raise
    if device is None:
        return None
    if type(device) is not Device or device.platform != platform.name:
        raise PluginError(f"its detector {path} returned {shown(device)}, not a Device of its own")
    wrong = list(mismatches(device))
    if device.torch_device is None:
        wrong.append("Device.torch_device is None; a detector names the device that it found")
    if wrong:
        raise PluginError(f"its detector {path} returned nonsense: {'; '.join(wrong)}")
    return replace(device, name=plain(device.name))


def _current_accelerator() -> Callable[[], None]:
    """Return a function that sets the caller's current device in another thread.

    `torch.cuda.set_device(1)` holds for its thread alone, and a detector runs in one of its own.
    """
    accelerator: Any = getattr(sys.modules.get("torch"), "accelerator", None)
    index = 0
    if accelerator is not None and accelerator.is_available():
        # A device that torch knows only by name (torchax's) has no current index.
        with suppress(RuntimeError):
            index = accelerator.current_device_index()
    # A new thread begins with 0; setting it would open a context on an unused device.
    return (lambda: accelerator.set_device_index(index)) if index else (lambda: None)


class Fault(str):
    """A reason why a backend can't run that is its plugin's fault, not this machine's."""


class Unset(str):
    """A reason that depends on a setting, which the user may change; it is checked again each time."""


def availability(info: BackendInfo, timeout: float) -> str | None:
    """Return why `info` can't run on this machine, or None. Imports no vendor library."""
    return availabilities([info], timeout)[0]


def availabilities(infos: Iterable[BackendInfo], timeout: float) -> list[str | None]:
    """Return `availability` of each; their probes run side by side, each within `timeout` seconds.

    If a library has several builds, one is enough.
    """
    builds = [info.builds for info in infos]
    answers = iter(_answers([build for several in builds for build in several], timeout))
    return [_of_builds({build.build: next(answers) for build in several}) for several in builds]


def build_here(info: BackendInfo, platform: str, timeout: float) -> BackendInfo:
    """Return the build of `info` that runs on a platform here, else the first one that claims it."""
    there = info.builds_on(platform) or (info,)
    return next((build for build in there if availability(build, timeout) is None), there[0])


def _answers(infos: list[BackendInfo], timeout: float) -> list[str | None]:
    stated = [_declared_problem(info) for info in infos]
    waiting = {
        info.probe: PluginCall("its probe", lambda path=info.probe: load_object(path)())  # type: ignore[misc]
        for info, problem in zip(infos, stated, strict=True)
        if problem is None and info.probe is not None and info.probe not in _probed
    }
    for path, call in waiting.items():
        _probed[path] = _probe_answer(call, timeout)
    answers = [
        _probed[info.probe] if problem is None and info.probe is not None else problem
        for info, problem in zip(infos, stated, strict=True)
    ]
    for path in [path for path, answer in _probed.items() if isinstance(answer, Unset)]:
        _probed.pop(path, None)
    return answers


def _of_builds(answers: dict[str, str | None]) -> str | None:
    """Return why none of a library's builds can run here, or None."""
    reasons = [reason for reason in answers.values() if reason is not None]
    if len(reasons) < len(answers) or len(answers) == 1:
        return None if len(reasons) < len(answers) else reasons[0]
    text = "; ".join(f"{name}: {reason}" for name, reason in answers.items())
    return Fault(text) if any(isinstance(reason, Fault) for reason in reasons) else text


def running(path: str | None, timeout: float) -> str:
    """Return the part of an available backend that runs here, by its `BackendInfo.runs`, or "".

    The answer isn't cached, because a plugin's setting may change it.
    """
    if path is None:
        return ""
    answer = _probe_answer(PluginCall(path, lambda: load_object(path)()), timeout)
    return "" if answer is None else answer


_probed: dict[str, str | None] = {}


def forget_probes() -> None:
    """Probe again at the next question, after an installation."""
    _probed.clear()
    _late_detectors.clear()
    requirement_problem.cache_clear()
    lookup.forget()


def load_problem(info: BackendInfo) -> str | None:
    """Say why a backend's class can't be imported, or None. This imports its library."""
    seconds = current_settings().plugin_timeout
    try:
        loaded = within(
            seconds,
            "POLYATTN_PLUGIN_TIMEOUT",
            f"the import of {info.path}",
            lambda: load_object(info.path),
        )
    except PluginError as error:
        return str(error)
    return None if isinstance(loaded, type) else f"{info.path} is {shown(loaded)}, not a class"


def _declared_problem(info: BackendInfo) -> str | None:
    for text in info.requires:
        problem = requirement_problem(text)
        if problem:
            return f"{problem}; {info.install}" if info.install else problem
    fault = lookup.static_problem(info.path)
    return None if fault is None else Fault(fault)


def _probe_answer(call: PluginCall, timeout: float) -> str | None:
    try:
        answer = call.answer(timeout, "POLYATTN_PROBE_TIMEOUT")
    except PluginError as error:
        if isinstance(error.__cause__, SettingsError):  # the user's to mend, not the plugin's
            return Unset(plain(str(error.__cause__)))
        return Fault(describe(error))
    if answer is None:
        return None
    if type(answer) is not str or not answer.strip():
        return Fault(f"{call.what} returned {shown(answer)}; it must return None or a text")
    return plain(answer)


def ask(manager: pluggy.PluginManager, plugin: Any, hook: str, **arguments: Any) -> Any:
    """Call one hook of one plugin alone, so that its exception can be attributed."""
    others = [p for p in manager.get_plugins() if p is not plugin]
    answers = manager.subset_hook_caller(hook, others)(**arguments)
    return answers[0] if answers else None


def rerank(
    registry: Registry,
    spec: LayerSpec,
    device: Device,
    phase: str,
    ranking: tuple[str, ...],
    seconds: float,
) -> tuple[str, ...]:
    """Return the ranking after every `polyattn_rank` hook, each within `seconds`."""
    policies = {impl.plugin_name for impl in registry.manager.hook.polyattn_rank.get_hookimpls()}
    owners = {p.name: p for p in registry.plugins if p.status == "ok"}
    for name, plugin in registry.manager.list_name_plugin():
        if name not in policies or name not in owners or name in registry.late_policies:
            continue
        arguments = {
            "spec": _copied(spec),
            "device": copy(device),
            "phase": phase,
            "ranking": ranking,
        }
        try:
            answer = within(
                seconds,
                "POLYATTN_PROBE_TIMEOUT",
                "polyattn_rank",
                lambda plugin=plugin, arguments=arguments: ask(  # type: ignore[misc]
                    registry.manager, plugin, "polyattn_rank", **arguments
                ),
            )
            ranking = ranking if answer is None else _ranking(answer, ranking)
        except PluginError as error:  # a policy that fails must not stop the choice
            if isinstance(error, LatePluginError):  # to wait once is enough
                registry.late_policies.add(name)
            owner = owners[name]
            log.warning(
                "polyattn_rank of %s is passed over: %s (until it is fixed: %s)",
                owner.origin,
                error,
                owner.removal,
            )
    return ranking


def _copied(spec: LayerSpec) -> LayerSpec:
    """Return a spec that a hook may do anything to: the caller's stays as it is."""
    mine = copy(spec)
    for name, part in vars(mine).items():
        if is_dataclass(part):
            object.__setattr__(mine, name, copy(part))
    return mine


def _ranking(answer: Any, ranking: tuple[str, ...]) -> tuple[str, ...]:
    if (
        type(answer) not in (list, tuple)
        or not answer
        or any(type(name) is not str or name not in ranking for name in answer)
        or len(set(answer)) != len(answer)
    ):
        raise PluginError(
            f"it returned {shown(answer)}; it may only reorder or drop {list(ranking)}, as a list, "
            "and must leave one"
        )
    return tuple(answer)
