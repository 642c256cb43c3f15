"""Profiles of hardware that isn't here. Figures are from the vendors' datasheets."""

from __future__ import annotations

from polyattn.plugin import Device

_AVX512 = frozenset({"avx2", "avx512"})

PROFILES = (
    ("x86-avx2", Device("cpu", "x86_64", "x86 with AVX2", frozenset({"avx2"}))),
    ("x86-avx512", Device("cpu", "x86_64", "x86 with AVX-512", _AVX512)),
    ("x86-amx", Device("cpu", "x86_64", "x86 with AMX", _AVX512 | {"avx512_bf16", "amx"})),
    ("neoverse", Device("cpu", "aarch64", "Arm Neoverse", frozenset({"neon", "sve"}))),
)
