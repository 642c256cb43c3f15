"""Which cases follow from a backend's claims? Each claim is tested, what isn't claimed refused."""

from __future__ import annotations

from polyattn.conformance.case import Case
from polyattn.conformance.cases import attention, index, mla, recurrent, services
from polyattn.device import Device
from polyattn.registry.capabilities import SERVICES
from polyattn.registry.info import BackendInfo

CASE = 1000
"""Random batches of one case."""


def derive(info: BackendInfo, device: Device, whole: bool = True) -> list[Case]:
    """Return every case that `info`'s capabilities give on `device`.

    `whole=False`: of attention, the cases of `attention.ONE_LAYER` alone.
    """
    caps = info.capabilities
    if "index" in caps.phases:
        return index.derive(info, device)
    if caps.phases & SERVICES:
        return services.derive(info, device)
    if any(kind.is_recurrent for kind in caps.kinds):
        return recurrent.derive(info, device)
    if any(kind.is_latent for kind in caps.kinds):
        return mla.derive(info, device)
    return attention.derive(info, device, whole)


def batch_cases(cases: list[Case], count: int) -> list[Case]:
    """Return the cases of `count` random batches: each has a seed of its own, and draws its layers."""
    return [
        Case("batches", str(index + 1), cases[0].spec, "drawn")
        for index in range(-(-count // CASE))
    ]
