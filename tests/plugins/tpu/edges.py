"""Runs steps of PALLAS_ATTN that the kit's lengths don't reach, interpreted, beside the reference.

A program of its own, since the interpreter is asked for by the environment.
"""

from __future__ import annotations

from polyattn import LayerSpec, resolve_device
from polyattn.conformance.harness.base import Harness
from polyattn_tpu.configs import BLOCKS, KEYS, block_tokens

BASE = LayerSpec(
    num_heads=16, num_kv_heads=1, head_size=64, dtype="float32", block_size=128, needs_lse=True
)
FULL = BLOCKS * block_tokens(BASE.gqa_ratio)
STEPS = [
    # A tile whose blocks are all full, beside others.
    (BASE, [(FULL, FULL + 8), (3, 9), (5, 5)]),
    # Kept tokens that lie before the first step of the window's keys.
    (BASE.replace(sliding_window=21, sink_tokens=4), [(1, KEYS + 188), (3, 2 * KEYS + 76)]),
]

if __name__ == "__main__":
    for spec, step in STEPS:
        harness = Harness("PALLAS_ATTN", resolve_device("cpu"), 0)
        harness.step(harness.layer(spec), step).check()
