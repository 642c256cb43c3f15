"""Profiles of hardware that isn't here. Figures are from the vendors' datasheets."""

from __future__ import annotations

from polyattn.plugin import Device

PROFILES = (
    ("mi250x", Device("rocm", "gfx90a", "Instinct MI250X", bandwidth=3277, matmul=383)),
    (
        "mi300x",
        Device("rocm", "gfx942", "Instinct MI300X", fp8="fnuz", bandwidth=5300, matmul=1307),
    ),
    ("mi355x", Device("rocm", "gfx950", "Instinct MI355X", fp8="ocp", bandwidth=8000, matmul=2500)),
)
