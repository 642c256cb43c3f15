"""Runs TRITON_ATTN over uneven steps in Triton's interpreter, beside the float64 reference.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the ways that
were run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from polyattn import Device, LayerSpec, RopeSpec
from polyattn.conformance.harness.base import Harness
from polyattn.kernel import AttentionBackend

torch.set_num_threads(1)
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
WARM = {"temperature": 0.1, "temperature_length": 8, "pairing": "gptj"}
SPECS = {
    "plain": BASE,
    "groups of 7": BASE.replace(num_heads=14),
    "window, sink tokens": BASE.replace(sliding_window=21, sink_tokens=3),
    "window": BASE.replace(sliding_window=60),
    "chunks": BASE.replace(chunk_size=70),
    "soft cap, sinks": BASE.replace(num_heads=10, logit_soft_cap=1.5, learned_sinks=True),
    "ALiBi": BASE.replace(alibi=True),
    "not causal": BASE.replace(causal=False),
    "int8": BASE.replace(kv_cache_dtype="int8"),
    "captured": BASE.replace(graph_capture="single_token_decode"),
    "wide groups": BASE.replace(num_heads=20, num_kv_heads=1, head_size=264),
    # Cached keys turn by their places: where a tile has kept tokens and others, too.
    "turned, int8": BASE.replace(rope=RopeSpec(**TURNED | YARN), kv_cache_dtype="int8"),
    "turned, kept tokens": STREAM.replace(
        sink_tokens=20, rope=RopeSpec(**TURNED | {"pairing": "gptj", "rotary_size": 16})
    ),
    "turned, warm": STREAM.replace(rope=RopeSpec(**TURNED | WARM)),
}
TWICE = ("soft cap, sinks", "captured")
"""Layers that go every way, whose steps run twice. The others' do where one is run alone."""
STEPS: dict[str, list[tuple[int, int]]] = {
    "one long decode": [(1, 600), (1, 5), (1, 0), (1, 70)],
    "equal decodes": [(1, 290), (1, 300)],
    "few tokens": [(4, 260), (3, 3), (0, 9), (1, 1), (9, 40)],
    "drafts": [(16, 150), (3, 3), (0, 9), (14, 40)],  # of large groups: two tiles a sequence
    "long prefill": [(20, 900), (3, 9), (0, 5)],
    "prompts": [(40, 100), (60, 60)],
    "nothing": [(0, 7), (0, 0)],
}


def check(name: str, step: str, again: bool, splits: int = 0) -> str:
    """Run a step; raise if it is wrong. Returns the way.

    `again`: run it twice, and raise if the bits aren't the same.
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
    assert not again or torch.equal(first, work.run()), "other bits"
    return " ".join(str(call.plan.way) for call in work.plan.calls)


if __name__ == "__main__":
    names = sys.argv[1].split(";") if len(sys.argv) > 1 else list(SPECS)
    for name in names:
        again = name in TWICE or len(names) == 1
        for step in STEPS:
            if name == "captured" and step != "one long decode":
                continue
            print(f"{name}, {step}: {check(name, step, again)}", flush=True)
        if name != "captured":
            for splits in (3, 8):
                way = check(name, "equal decodes", again, splits)
                print(f"{name}, equal decodes in {splits}: {way}", flush=True)
