"""Which device is meant? The only way from a caller's argument to a `Device`."""

from __future__ import annotations

from typing import Any

from polyattn.device import Device
from polyattn.errors import DeviceError, SettingsError, describe, shown
from polyattn.registry.catalogue import catalogue, unknown
from polyattn.registry.discovery import discover, plugins_generation
from polyattn.registry.info import load_object
from polyattn.registry.installed import Registry
from polyattn.registry.machine import detect
from polyattn.settings import Settings, current_settings

_known: dict[tuple[Any, ...], Device] = {}
_default: dict[tuple[Any, ...], str] = {}


def resolve_device(device: Any = None, settings: Settings | None = None) -> Device:
    """Return the device behind a `Device`, a profile's name, a torch device or None.

    Args:
        device: None is this machine's best; of several equal ones, the one that is current at the call.
        settings: instead of those of the environment and the file.

    Raises:
        DeviceError: it isn't known, or isn't here; the message has what each detector said.
        SettingsError: `settings` are none.

    Examples:
        >>> device = resolve_device("x86-avx512")
        >>> device.platform, device.is_real
        ('cpu', False)

    """
    if isinstance(device, Device):
        return device
    if not isinstance(settings, Settings | None):
        raise SettingsError(f"settings={shown(settings)} must be Settings, or None")
    settings = settings or current_settings()
    facts = (settings.plugins, settings.disabled_plugins, plugins_generation())
    text = _current(facts, settings) if device is None else str(device)
    key = (text, facts)
    known = _known.get(key)
    if known is None:
        known = _known[key] = _find(text, discover(settings))
    return known


def _find(text: str, registry: Registry) -> Device:
    if text.split(":")[0] in torch_device_types(registry):
        return detect(registry, text)
    known = profiles(registry)
    if text.lower() not in known:
        platform = text.split(":")[0]
        if any(platform in brings["platforms"] for brings in catalogue().values()):
            raise DeviceError(f"device {text!r} {unknown('platforms', platform, ())}")
        raise DeviceError(f"device {text!r} {unknown('profiles', text, known)}")
    return known[text.lower()]


def profiles(registry: Registry) -> dict[str, Device]:
    """Return the named profiles of the installed platforms."""
    return {n.lower(): d for p in registry.platforms.values() for n, d in p.profiles}


def torch_device_types(registry: Registry) -> set[str]:
    """Return the types of torch device that some platform's plugin speaks for."""
    types = {"cpu"}
    for platform in registry.platforms.values():
        types |= {platform.name, *platform.device_types}
    return types


def _current(facts: tuple[Any, ...], settings: Settings) -> str:
    """Return the current torch device of the best platform that is here."""
    name = _default.get(facts)
    registry = discover(settings)
    if name is None:
        device = detect(registry)
        _known[(str(device.torch_device), facts)] = device
        name = _default[facts] = device.platform
    platform = registry.platforms[name]
    if platform.current is None:
        return str(platform.device_types[0] if platform.device_types else name)
    owner = registry.platform_owners[name].origin
    try:
        answer = load_object(platform.current)()
    except (Exception, SystemExit) as error:
        raise DeviceError(f"{platform.current} of {owner} failed: {describe(error)}") from error
    if type(answer) is not str:
        raise DeviceError(f"{platform.current} of {owner} returned {shown(answer)}, not a device")
    return answer
