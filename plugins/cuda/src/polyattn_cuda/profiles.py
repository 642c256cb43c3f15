"""Profiles of hardware that isn't here. Figures are from the vendors' datasheets."""

from __future__ import annotations

from polyattn.plugin import Device


def _nvidia(
    name: str, arch: str, bandwidth: float, matmul: float, reported: str, fp8: bool = True
) -> Device:
    return Device(
        "cuda", arch, name, fp8="ocp" if fp8 else None, bandwidth=bandwidth, matmul=matmul,
        reported=f"NVIDIA {reported}",
    )  # fmt: skip


_A100 = _nvidia("A100 80 GB SXM", "sm_80", 2039, 312, "A100-SXM4-80GB", fp8=False)
_H100 = _nvidia("H100 SXM", "sm_90", 3350, 989, "H100 80GB HBM3")
_H200 = _nvidia("H200 SXM", "sm_90", 4800, 989, "H200")
_RTX4090 = _nvidia("GeForce RTX 4090", "sm_89", 1008, 165, "GeForce RTX 4090")
_RTX5090 = _nvidia("GeForce RTX 5090", "sm_120", 1792, 210, "GeForce RTX 5090")

PROFILES = (
    ("a100-sxm", _A100),
    ("a100", _A100),
    ("l40s", _nvidia("L40S", "sm_89", 864, 362, "L40S")),
    ("h100-sxm", _H100),
    ("h100", _H100),
    ("h200-sxm", _H200),
    ("h200", _H200),
    ("b200", _nvidia("B200", "sm_100", 8000, 2250, "B200")),
    ("rtx4090", _RTX4090),
    ("4090", _RTX4090),
    ("rtx5090", _RTX5090),
    ("5090", _RTX5090),
)
