"""One case of the kit."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.device import Device
from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class Case:
    """One test: `check` says what is looked at, `batch` names a shape."""

    check: str
    label: str
    spec: LayerSpec
    batch: str = "mixed"

    @property
    def id(self) -> str:
        """The test's id in pytest."""
        return f"{self.check}-{self.label}-{self.batch}".replace(" ", "_")


def captures(device: Device) -> bool:
    """Whether this machine's device records graphs: torch calls CUDA's and ROCm's both so."""
    return str(device.torch_device).startswith("cuda")
