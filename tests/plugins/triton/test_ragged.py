"""TRITON_ATTN over uneven steps, beside the float64 reference, in Triton's interpreter.

As a program, since Triton reads TRITON_INTERPRET when it is imported, it prints the ways that were run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from interpreting import interpreted
from polyattn import Device, LayerSpec, RopeSpec
from polyattn.conformance.harness.base import Harness
from polyattn.kernel import AttentionBackend

pytest.importorskip("triton")
DEVICE = Device("cpu", "x86_64", torch_device="cpu")
BASE = LayerSpec(
    num_heads=8, num_kv_heads=2, head_size=32, dtype="float32", needs_lse=True, block_size=16
)
TURNED = {"rotary_size": 32, "base": 100.0, "positions": "cache"}
STREAM = BASE.replace(sliding_window=32, sink_tokens=4)
YARN = {
    "scaling": "yarn", "factor": 4.0, "original_length": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "attention_factor": 1.1,
}  # fmt: skip
SPECS = {
    "soft cap, sinks": BASE.replace(num_heads=10, logit_soft_cap=1.5, learned_sinks=True),
    "captured": BASE.replace(graph_capture="single_token_decode"),
    "wide groups": BASE.replace(num_heads=20, num_kv_heads=1, head_size=264),
    # Cached keys turn by their places: where a tile has kept tokens and others, too.
    "turned, int8": BASE.replace(rope=RopeSpec(**TURNED | YARN), kv_cache_dtype="int8"),
    "turned, kept tokens": STREAM.replace(
        sink_tokens=20, rope=RopeSpec(**TURNED | {"pairing": "gptj", "rotary_size": 16})
    ),
}
TWICE = ("soft cap, sinks", "captured")
"""Layers that go every way, whose steps run twice."""
STEPS: dict[str, list[tuple[int, int]]] = {
    "one long decode": [(1, 600), (1, 5), (1, 0), (1, 70)],
    "equal decodes": [(1, 290), (1, 300)],
    "few tokens": [(4, 260), (3, 3), (0, 9), (1, 1), (9, 40)],
    "drafts": [(16, 150), (3, 3), (0, 9), (14, 40)],  # of large groups: two tiles a sequence
    "long prefill": [(20, 900), (3, 9), (0, 5)],
    "prompts": [(40, 100), (60, 60)],
    "nothing": [(0, 7), (0, 0)],
}


def check(name: str, step: str, splits: int = 0) -> str:
    """Run a step; raise if it is wrong. Returns the way.

    `splits`: of even lengths, and no program merges any.
    """
    harness = Harness("TRITON_ATTN", DEVICE, 7)
    layer = harness.layer(SPECS[name])
    if splits:
        form = layer.group.kernel_format(layer.group.selection.backend("decode"))
        backend: Any = layer.group.backend("decode", AttentionBackend, cache=form)
        backend.splits, backend.by_one = lambda batch: splits, 0
    work = harness.step(layer, STEPS[step])
    first = work.check(f"{name}, {step}: ")
    assert name not in TWICE or torch.equal(first, work.run()), "other bits"
    return " ".join(str(call.plan.way) for call in work.plan.calls)


@cache
def lines() -> list[str]:
    """Return a line for each step. A process imports for longer than a layer's steps take."""
    return interpreted(__file__, seconds=1400).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_uneven_steps(name: str) -> None:
    """Decode, few tokens and prefill, with padding, empty rows and NaN elsewhere in the cache."""
    said = "\n".join(line for line in lines() if line.rpartition(", ")[0] == name)
    assert said
    if name == "captured":
        assert "listed" in said
    elif name == "wide groups":  # of more rows than a tile has: several tiles a decode
        assert "one long decode: few" in said and "listed" not in said
    elif name.startswith("turned"):
        assert all(f": {way}" in said for way in ("listed", "many", "few", "prefill"))
    else:
        assert all(way in said for way in ("listed", "split", "many", "few", "pieces"))
        assert "drafts: few" in said


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in SPECS:
        for step in STEPS if name != "captured" else ("one long decode",):
            print(f"{name}, {step}: {check(name, step)}", flush=True)
        for splits in () if name == "captured" else (3, 8):
            way = check(name, "equal decodes", splits)
            print(f"{name}, equal decodes in {splits}: {way}", flush=True)
