"""Profiles of hardware that isn't here. Figures are from the vendors' datasheets."""

from __future__ import annotations

from polyattn.plugin import Device

PROFILES = (
    ("gaudi2", Device("hpu", "gaudi2", "Gaudi 2", bandwidth=2460, matmul=432)),
    ("gaudi3", Device("hpu", "gaudi3", "Gaudi 3", fp8="ocp", bandwidth=3700, matmul=1835)),
)
