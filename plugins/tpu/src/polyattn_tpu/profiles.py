"""Profiles of hardware that isn't here. Figures are from the vendors' datasheets."""

from __future__ import annotations

from polyattn.plugin import Device

_TPU7X = Device("tpu", "v7x", "TPU7x", fp8="ocp", bandwidth=7370, matmul=2307)

PROFILES = (
    ("tpu-v5e", Device("tpu", "v5e", "TPU v5e", bandwidth=819, matmul=197)),
    ("tpu-v5p", Device("tpu", "v5p", "TPU v5p", bandwidth=2765, matmul=459)),
    ("tpu-v6e", Device("tpu", "v6e", "TPU v6e", bandwidth=1640, matmul=918)),
    ("tpu-v7x", _TPU7X),
    ("tpu7x", _TPU7X),
)
