"""Captured steps: a graph of a layer's call beside one of the backends' own calls."""

from __future__ import annotations

from polyattn.spec.layer import LayerSpec
from table import LLAMA, Bar, Contender, Other, Row

SPEC = LLAMA.replace(block_size=16)
BACKENDS = {"cuda": ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"), "cpu": ("NATIVE_ATTN",)}


def by(name: str) -> tuple[Contender, ...]:
    return (
        Other(f"{name} in a graph", name, part="graph"),
        Other(f"{name}'s own calls in a graph", name, part="own graph"),
        Other(f"{name}, host of a call", name, part="host of a call"),
        Other(f"{name}, host of its own calls", name, part="host of own calls"),
    )


def rows(device: str, name: str, text: str, what: str, spec: LayerSpec = SPEC) -> Row:
    bar = Bar(1.01, f"{name}'s own calls in a graph")
    return Row(f"{name}: {what}", spec, text, {device: by(name)}, bar)


ROWS = [
    *(rows(device, name, f"{count}q1s4k", f"decode {count} x 4096")
      for device, names in BACKENDS.items()
      for name in names
      for count in (8, 32, 64)),
    *(rows(device, name, "16q1s4k", "decode 16 x 4096, e4m3", SPEC.replace(kv_cache_dtype="fp8"))
      for device, name in (("cuda", "TRITON_ATTN"), ("cpu", "NATIVE_ATTN"))),
    *(rows(device, name, "16q4s4k", "16 x 4 drafts after 4092")
      for device, name in (("cuda", "TRITON_ATTN"), ("cpu", "NATIVE_ATTN"))),
]  # fmt: skip
