"""Which build of a library counts? A profile's is the preferred one, a device's is what is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from polyattn.device import Device
from polyattn.registry.capabilities import check
from polyattn.registry.info import BackendInfo
from polyattn.spec.decompose import asked_phase, questions
from polyattn.spec.layer import LayerSpec


def as_built(
    backends: Mapping[str, BackendInfo],
    spec: LayerSpec,
    device: Device,
    unavailable: Callable[[BackendInfo], str | None],
) -> dict[str, BackendInfo]:
    """Return the backends, each of several builds as the one that counts for `spec` on `device`.

    Of the installed builds that claim the device's platform: the first that can serve the layer, else
    the first. Where none is, the backend stays as it was declared, with the preferred build's claims.
    A build that is the only one of its platform goes without a name.
    """
    return {
        name: _build(info, spec, device, unavailable) if info.variants else info
        for name, info in backends.items()
    }


def _build(
    info: BackendInfo,
    spec: LayerSpec,
    device: Device,
    unavailable: Callable[[BackendInfo], str | None],
) -> BackendInfo:
    there, preferred = info.builds_on(device.platform), info.builds[0]
    chosen = preferred
    if device.is_real and there:
        here = [build for build in there if unavailable(build) is None]
        able = [build for build in here if _serves(build, spec, device)]
        absent = info if len(there) > 1 else preferred
        chosen = (able or here or [absent])[0]
    return replace(chosen, build="") if len(there) == 1 else chosen


def _serves(build: BackendInfo, spec: LayerSpec, device: Device) -> bool:
    """Whether a build can serve some phase of the layer."""
    return any(
        not any(
            check(build.capabilities, asked, device, asked_phase(spec, phase))
            for asked in questions(spec, phase, device.is_accelerator)
        )
        for phase in build.capabilities.phases & {"prefill", "decode"}
    )
