"""Fused QKV, normed, rotated and stored: beside its bytes, storing alone, and torch's norm first."""

from __future__ import annotations

from polyattn.spec.norm import NormSpec
from polyattn.spec.rope import RopeSpec
from table import LLAMA, Bar, Other, Row

ROPE = {
    "rotary_size": 128, "base": 500000.0, "scaling": "llama3", "factor": 8.0, "original_length": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
CACHES = {"e4m3": "fp8_e4m3", "bf16": "auto"}
PAIRINGS = ("neox", "gptj")
TURNED, ALONE, APART = "rotated and stored", "stored alone", "normed by torch, rotated and stored"
BACKENDS = {"cuda": "TRITON_ATTN", "cpu": "NATIVE_ATTN"}
"""Whose cache it is; the store is the group's choice."""
BY = {
    device: (Other(TURNED, name, part="rotate and store"), Other(ALONE, name, part="store"))
    for device, name in BACKENDS.items()
}
NORMED = {
    device: (Other("normed, rotated and stored", name, part="rotate and store"),
             Other(APART, name, part="norm apart"))
    for device, name in BACKENDS.items()
}  # fmt: skip


def row(
    what: str, text: str, pairing: str, cache: str, bar: Bar, norm: NormSpec | None = None
) -> Row:
    rope = RopeSpec(**ROPE, pairing=pairing)
    spec = LLAMA.replace(block_size=16, rope=rope, kv_cache_dtype=CACHES[cache], qk_norm=norm)
    by = BY if norm is None else NORMED
    return Row(f"{what}, {pairing}, {cache}", spec, text, by, bar, ["machine.copy_of_store"])


ROWS = [
    *(row("8192 tokens", "q8k", pairing, cache, Bar(1.15, "machine.copy_of_store"))
      for cache in CACHES for pairing in PAIRINGS),
    *(row(f"{count} x 1 token", f"{count}q1s5k", "neox", cache, Bar(1.02, ALONE))
      for cache in CACHES for count in (1, 16, 64, 256)),
    *(row(f"{what}, normed", text, "neox", cache, Bar(0.6, APART), NormSpec())
      for cache in CACHES for what, text in (("8192 tokens", "q8k"), ("64 x 1 token", "64q1s5k"))),
]  # fmt: skip
