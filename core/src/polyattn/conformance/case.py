"""What is one test of the kit? A `Case`: what is looked at, of which layer, over which batch."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, check
from polyattn.spec.layer import LayerSpec
from polyattn.workload.steps import USUAL


@dataclass(frozen=True)
class Case:
    """One test. `check` says what is looked at, `batch` names a shape, `inputs` unusual numbers."""

    check: str
    label: str
    spec: LayerSpec
    batch: str = "mixed"
    inputs: str = USUAL

    @property
    def id(self) -> str:
        """The test's id in pytest."""
        words = [self.check, self.label, self.batch]
        words += [] if self.inputs == USUAL else [self.inputs]
        return "-".join(words).replace(" ", "_")


def captures(device: Device) -> bool:
    """Whether this machine's device records graphs: torch calls CUDA's and ROCm's both so."""
    return str(device.torch_device).startswith("cuda")


def served_phases(caps: Capabilities, spec: LayerSpec, device: Device) -> list[str]:
    """Return which of prefill and decode the claims cover for a layer."""
    return [p for p in ("prefill", "decode") if not check(caps, spec, device, p)]
