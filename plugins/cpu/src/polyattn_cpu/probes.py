"""Probes the processor and, for torch.compile, the C++ compiler."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from polyattn.plugin import Device

_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "amx_tile": "amx",
    "asimd": "neon",
    "sve": "sve",
}


def detect(torch_device: str | None = None) -> Device | None:
    """Return this machine's CPU, unless another device was asked for."""
    if torch_device not in (None, "cpu"):
        return None
    arch = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    name, flags = _cpuinfo()
    features = frozenset(feature for flag, feature in _FLAGS.items() if flag in flags)
    return Device("cpu", arch, name or platform.processor(), features, torch_device="cpu")


def _cpuinfo() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: the features stay unknown, which no backend of ours minds
        return "", frozenset()
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return fields.get("model name", ""), frozenset(
        (fields.get("flags") or fields.get("Features") or "").split()
    )


def compiler() -> str | None:
    """Return why torch.compile can't build C++ here, or None."""
    named = os.environ.get("CXX")
    if named:
        return None if shutil.which(named) else f"CXX={named!r} is not an executable"
    if any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return None
    return "torch.compile needs a C++ compiler and none of g++, clang++, c++ is on the PATH"
