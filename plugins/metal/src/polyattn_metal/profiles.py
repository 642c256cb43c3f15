"""Hardware to reason about without having it. Bandwidths in GB/s are Apple's specifications'."""

from __future__ import annotations

from polyattn.plugin import Device

PROFILES = tuple(
    (f"metal-{arch}", Device("metal", arch, f"Apple {name}", bandwidth=bandwidth))
    for arch, name, bandwidth in (
        ("m2-ultra", "M2 Ultra", 800),
        ("m3-max", "M3 Max", 400),
        ("m3-ultra", "M3 Ultra", 819),
        ("m4", "M4", 120),
        ("m4-max", "M4 Max", 546),
        ("m5", "M5", 153),
    )
)
