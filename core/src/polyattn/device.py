"""What does the layer run on? `Device`: this machine's, or a named profile of absent hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from polyattn.errors import DeviceError, nearest


@dataclass(frozen=True)
class Device:
    """A device as selection sees it.

    `arch` is the vendor's name of the instruction set (`sm_90`, `gfx942`, `v5e`, `x86_64`).
    `fp8` says which e4m3 the hardware computes: `"ocp"`, `"fnuz"` (a different format of the
    same name) or None. `bandwidth` (GB/s) and `matmul` (dense bf16 TFLOP/s) are datasheet
    figures, 0 where none is stated. `torch_device` is None for a profile: such a device can be
    reasoned about, not run on. `reported`: of a profile, what the driver of such a device calls it,
    which is the name of what is measured there.
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
        """Return the same device, bound to one of this machine's torch devices."""
        return replace(self, torch_device=torch_device)

    @staticmethod
    def profile(name: str) -> Device:
        """Return a named profile. Raises `DeviceError` with the nearest valid name."""
        key = ALIASES.get(name.lower(), name.lower())
        if key not in PROFILES:
            raise DeviceError(f"device profile {name!r} is unknown{nearest(name, PROFILES)}")
        return PROFILES[key]

    def __str__(self) -> str:
        label = f"{self.platform} {self.arch}"
        return f"{self.name} ({label})" if self.name else label


def arch_matches(pattern: str, arch: str) -> bool:
    """Whether `arch` fits `pattern`: a name, `"sm_80+"` (or later) or `"sm_80-sm_90"` (a range)."""
    if pattern == arch:
        return True
    bounds = re.fullmatch(r"([a-z_]+)(\d+)(?:\+|-\1(\d+))", pattern)
    parts = re.fullmatch(r"([a-z_]+)(\d+)[a-z]*", arch)
    if not bounds or not parts or bounds[1] != parts[1]:
        return False
    return int(bounds[2]) <= int(parts[2]) <= int(bounds[3] or 10**9)


def _nvidia(
    name: str, arch: str, bandwidth: float, matmul: float, reported: str, fp8: bool = True
) -> Device:
    return Device(
        "cuda", arch, name, fp8="ocp" if fp8 else None, bandwidth=bandwidth, matmul=matmul,
        reported=f"NVIDIA {reported}",
    )  # fmt: skip


PROFILES: dict[str, Device] = {
    "a100": _nvidia("A100 80 GB SXM", "sm_80", 2039, 312, "A100-SXM4-80GB", fp8=False),
    "l40s": _nvidia("L40S", "sm_89", 864, 362, "L40S"),
    "h100-sxm": _nvidia("H100 SXM", "sm_90", 3350, 989, "H100 80GB HBM3"),
    "h200": _nvidia("H200 SXM", "sm_90", 4800, 989, "H200"),
    "b200": _nvidia("B200", "sm_100", 8000, 2250, "B200"),
    "rtx4090": _nvidia("GeForce RTX 4090", "sm_89", 1008, 165, "GeForce RTX 4090"),
    "rtx5090": _nvidia("GeForce RTX 5090", "sm_120", 1792, 210, "GeForce RTX 5090"),
    "mi250x": Device("rocm", "gfx90a", "Instinct MI250X", bandwidth=3277, matmul=383),
    "mi300x": Device("rocm", "gfx942", "Instinct MI300X", fp8="fnuz", bandwidth=5300, matmul=1307),
    "mi355x": Device("rocm", "gfx950", "Instinct MI355X", fp8="ocp", bandwidth=8000, matmul=2500),
    "tpu-v5e": Device("tpu", "v5e", "TPU v5e", bandwidth=819, matmul=197),
    "tpu-v5p": Device("tpu", "v5p", "TPU v5p", bandwidth=2765, matmul=459),
    "tpu-v6e": Device("tpu", "v6e", "TPU v6e", bandwidth=1640, matmul=918),
    "tpu-v7x": Device("tpu", "v7x", "TPU7x", fp8="ocp", bandwidth=7370, matmul=2307),
    "gaudi2": Device("hpu", "gaudi2", "Gaudi 2", bandwidth=2460, matmul=432),
    "gaudi3": Device("hpu", "gaudi3", "Gaudi 3", fp8="ocp", bandwidth=3700, matmul=1835),
    "x86-avx2": Device("cpu", "x86_64", "x86 with AVX2", frozenset({"avx2"})),
    "x86-avx512": Device("cpu", "x86_64", "x86 with AVX-512", frozenset({"avx2", "avx512"})),
    "x86-amx": Device(
        "cpu", "x86_64", "x86 with AMX", frozenset({"avx2", "avx512", "avx512_bf16", "amx"})
    ),
    "neoverse": Device("cpu", "aarch64", "Arm Neoverse", frozenset({"neon", "sve"})),
}
"""Hardware to reason about without having it. Figures are the vendors' datasheets'."""

ALIASES = {"h100": "h100-sxm", "4090": "rtx4090", "5090": "rtx5090", "tpu7x": "tpu-v7x"}
