"""What does the layer run on? `Device`: this machine's, or a named profile of absent hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Device:
    """A device as the selection sees it.

    Attributes:
        platform: `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"hpu"` or a plugin's.
        arch: the vendor's name of the instruction set (`"sm_90"`, `"gfx942"`, `"v5e"`, `"x86_64"`).
        name: of the product, for people.
        features: what else kernels may need (`"avx2"`).
        fp8: the e4m3 format that the hardware computes: `"ocp"`, `"fnuz"` (another format of the same
            name) or None.
        bandwidth: of the memory, in GB/s, from the datasheet; 0 if it states none.
        matmul: dense bf16 TFLOP/s, from the datasheet; 0 if it states none.
        torch_device: torch's name of this machine's device; None for a profile, which can be reasoned
            about but not run on.
        reported: of a profile, the name that the driver of such a device reports; measured times have
            it.

    Examples:
        >>> device = Device("cuda", "sm_90", name="H100", fp8="ocp")
        >>> str(device), device.is_real
        ('H100 (cuda sm_90)', False)

    """

    platform: str
    arch: str
    name: str = ""
    features: frozenset[str] = field(default=frozenset())
    fp8: str | None = None
    bandwidth: float = 0.0
    matmul: float = 0.0
    torch_device: str | None = None
    reported: str = ""

    @property
    def is_real(self) -> bool:
        """Whether this is a device of this machine rather than a profile."""
        return self.torch_device is not None

    @property
    def is_accelerator(self) -> bool:
        """Whether the device is anything but the host's CPU."""
        return self.platform != "cpu"

    def on(self, torch_device: str) -> Device:
        """Return the same device, bound to one of this machine's torch devices.

        Args:
            torch_device: `"cuda:1"`.

        """
        return replace(self, torch_device=torch_device)

    def __str__(self) -> str:
        label = f"{self.platform} {self.arch}"
        return f"{self.name} ({label})" if self.name else label


def arch_matches(pattern: str, arch: str) -> bool:
    """Return whether an architecture fits a pattern.

    Args:
        pattern: a name, `"sm_80+"` (this one or later) or `"sm_80-sm_90"` (a range, ends included).
        arch: an architecture's name.

    Examples:
        >>> arch_matches("sm_80+", "sm_90"), arch_matches("sm_80-sm_89", "sm_90a")
        (True, False)

    """
    if pattern == arch:
        return True
    bounds = re.fullmatch(r"([a-z_]+)(\d+)(?:\+|-\1(\d+))", pattern)
    parts = re.fullmatch(r"([a-z_]+)(\d+)[a-z]*", arch)
    if not bounds or not parts or bounds[1] != parts[1]:
        return False
    return int(bounds[2]) <= int(parts[2]) <= int(bounds[3] or 10**9)
