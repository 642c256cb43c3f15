"""The hooks that a plugin implements. Each runs at discovery or selection, never per call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from polyattn.device import Device
from polyattn.errors import shown
from polyattn.registry.info import BackendInfo
from polyattn.registry.validate import PLATFORM_NAME, path_problems
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import RowFormat
from polyattn.spec.variant import AttentionVariant

PROJECT = "polyattn"
ENTRY_POINT_GROUP = "polyattn.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A platform that a plugin detects.

    Attributes:
        name: of the platform; lower-case letters, digits and `_`.
        detect: `"package.module:function"`. It takes a torch device string or None, and returns a
            `Device` with `torch_device` set, or None if this machine has no such device.
        rank: the present platform of the highest rank is the default; the CPU's is 0.
        device_types: torch's types of device that belong to it (`("cuda",)`); empty: its name.
        current: `"package.module:function"`, which returns cheaply the current one of several devices
            (`"cuda:1"`); None if there is only one.
        profiles: names of its hardware, to reason about without having it (`("h100", Device(...))`); a
            device may have several names.
        interpret: `"package.module:function"`, which makes a profile run without its hardware, for
            `polyattn run`. It takes the profile and returns a `Device` with `torch_device` set, and a
            context manager to work in. None if kernels need the hardware.

    Examples:
        >>> platform = Platform(name="npu", detect="mine.npu:detect", device_types=("npu",))
        >>> list(platform.problems())
        []

    """

    name: str
    detect: str
    rank: int = 10
    device_types: tuple[str, ...] = ()
    current: str | None = None
    profiles: tuple[tuple[str, Device], ...] = ()
    interpret: str | None = None

    def problems(self) -> Iterator[str]:
        """Yield the errors of its names and paths."""
        if not PLATFORM_NAME.fullmatch(self.name):
            yield (
                f"Platform.name={shown(self.name)} can't be a platform's name; use lower-case "
                "letters, digits and _"
            )
        yield from path_problems("Platform.detect", self.detect, "function")
        yield from path_problems("Platform.current", self.current, "function")
        yield from path_problems("Platform.interpret", self.interpret, "function")
        for kind in self.device_types:
            if not PLATFORM_NAME.fullmatch(kind):
                yield f"Platform.device_types: {shown(kind)} can't be a type of torch device"


@dataclass(frozen=True)
class TorchDevices:
    """Detects a platform's devices by a module that answers as `torch.cuda` does.

    Attributes:
        types: torch's types of device that it speaks for; the first is in the names of its devices.
        library: returns that module, or None where this machine has no such device.
        describe: takes the module and a device's index, and returns the device.

    Examples:
        >>> from types import SimpleNamespace
        >>> npus = SimpleNamespace(current_device=lambda: 1)
        >>> devices = TorchDevices(("npu",), lambda: npus, lambda npus, index: Device("npu", "910b"))
        >>> devices.detect().torch_device, devices.detect("npu:3").torch_device, devices.current()
        ('npu:1', 'npu:3', 'npu:1')

    """

    types: tuple[str, ...]
    library: Callable[[], Any]
    describe: Callable[[Any, int], Device]

    def detect(self, torch_device: str | None = None) -> Device | None:
        """Return the device asked for, or the current one; None where there is none.

        Args:
            torch_device: torch's name, with an index or without; None: the current device.

        """
        kind, _, number = (torch_device or self.types[0]).partition(":")
        library = self.library() if kind in self.types else None
        if library is None:
            return None
        index = int(number) if number else library.current_device()
        return self.describe(library, index).on(f"{self.types[0]}:{index}")

    def current(self) -> str:
        """Return the device that is current now, of those that this process sees."""
        return f"{self.types[0]}:{self.library().current_device()}"


def declare(
    module: str,
    *,
    api_versions: tuple[int, int],
    platforms: Sequence[Platform] = (),
    backends: Sequence[BackendInfo] = (),
    variants: Sequence[AttentionVariant] = (),
    row_formats: Sequence[RowFormat] = (),
    timings: Sequence[str] = (),
) -> None:
    """Write a module's hooks, each of which returns what is passed for it.

    Args:
        module: the plugin's module of hooks, imported: `__name__`.
        api_versions: the lowest and the highest `API_VERSION` that the plugin works with.
        platforms: those that it detects.
        backends: those that it brings.
        variants: attention variants, their functions as paths.
        row_formats: formats of cached rows, `encode` and `decode` as paths.
        timings: timing tables that it carries, as absolute paths.

    Raises:
        KeyError: the module isn't imported.

    Examples:
        >>> import sys
        >>> sys.modules["mine.hooks"] = module = type(sys)("mine.hooks")
        >>> declare("mine.hooks", api_versions=(1, 1))
        >>> module.polyattn_api_versions(), module.polyattn_backends()
        ((1, 1), ())
        >>> del sys.modules["mine.hooks"]

    """
    answers = {
        "api_versions": api_versions,
        "platforms": platforms,
        "backends": backends,
        "variants": variants,
        "row_formats": row_formats,
        "timings": timings,
    }
    for what, answer in answers.items():
        setattr(sys.modules[module], f"polyattn_{what}", hookimpl(lambda answer=answer: answer))


class HookSpecs:
    """The hooks that polyattn calls. Only `polyattn_api_versions` is required."""

    @hookspec
    def polyattn_api_versions(self) -> tuple[int, int]:  # type: ignore[empty-body]
        """Return the lowest and the highest `API_VERSION` that the plugin works with."""

    @hookspec
    def polyattn_platforms(self) -> Sequence[Platform]:  # type: ignore[empty-body]
        """Return the platforms that the plugin detects. One plugin owns a platform."""

    @hookspec
    def polyattn_backends(self) -> Sequence[BackendInfo]:  # type: ignore[empty-body]
        """Return the backends that the plugin brings. A name belongs to one plugin."""

    @hookspec
    def polyattn_variants(self) -> Sequence[AttentionVariant]:  # type: ignore[empty-body]
        """Return the attention variants that the plugin brings, their functions as paths."""

    @hookspec
    def polyattn_row_formats(self) -> Sequence[RowFormat]:  # type: ignore[empty-body]
        """Return the formats of cached rows that the plugin brings, `encode` and `decode` as paths."""

    @hookspec
    def polyattn_timings(self) -> Sequence[str]:  # type: ignore[empty-body]
        """Return the timing tables that the plugin carries: absolute paths of files in its package.

        `polyattn tune` writes such a table. It speaks of one device; elsewhere it is not looked at.
        """

    @hookspec
    def polyattn_rank(
        self, spec: LayerSpec, device: Device, phase: str, ranking: tuple[str, ...]
    ) -> Sequence[str] | None:
        """Re-rank the backends that can serve, best first; None leaves the order alone.

        A policy may reorder and drop; a name that isn't in `ranking` is refused.
        """
