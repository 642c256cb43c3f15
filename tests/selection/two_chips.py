"""A platform of two chips, of which a caller makes one current."""

from __future__ import annotations

from dataclasses import replace

from polyattn.device import Device
from polyattn.registry.devices import resolve_device

current_index = 0


def detect(device: str | None) -> Device | None:
    text = device or "fakechip:0"
    if not text.startswith("fakechip"):
        return None
    return replace(resolve_device("h200"), platform="fakechip", arch="f1", torch_device=text)


def current() -> str:
    return f"fakechip:{current_index}"
