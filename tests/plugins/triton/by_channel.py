"""KDA and RWKV-7 on TRITON_SCAN, interpreted, against float64: chunks, tokens that forget all, decodes.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the largest errors
of outputs and states, relative to the largest element.
"""

from __future__ import annotations

import json

import torch
from polyattn import Batch, LayerSpec, Recurrent, select
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_state
from polyattn.kernel import RecurrentSpec

SPECS = {
    "kda": LayerSpec(
        kind="kda", num_heads=4, num_kv_heads=2, head_size=20, v_head_size=24, dtype="float32",
        recurrent=RecurrentSpec(qk_norm=True),
    ),
    "rwkv7": LayerSpec(
        kind="rwkv7", num_heads=2, head_size=16, dtype="float32", recurrent=RecurrentSpec()
    ),
}  # fmt: skip
STEPS = {
    "chunks": ([19, 16, 1, 0], [19, 20, 9, 5]),
    "decode": ([1, 1], [1, 40]),
}
RATES = {"usual": None, "forgets": -900.0, "keeps": 0.0}
"""What every seventh token's log decays are, in every second channel."""


def errors(spec: LayerSpec, step: str, rate: float | None) -> tuple[float, float]:
    """Return how far output and states are from the formulas."""
    queries, lens = STEPS[step]
    generator = torch.Generator().manual_seed(3)
    layer = Recurrent(select(spec, "cpu", backend="TRITON_SCAN"))
    states = layer.group.allocate_states(len(lens) + 1)
    states.data.copy_(recurrent_state(spec, tuple(states.data.shape), generator))
    slots = torch.randperm(len(lens) + 1, generator=generator)[: len(lens)]
    batch = Batch.from_lens(queries, lens, state_slots=slots)
    inputs = recurrent_inputs(spec, sum(queries), generator)
    if rate is not None:
        decay = inputs[list(layer.form.inputs).index("g" if spec.kind == "kda" else "w")]
        decay[::7, :, ::2] = rate
    named = dict(zip(layer.form.inputs, inputs, strict=True))
    out, after = reference.forward(spec, named, {}, states.data, batch)
    found = layer(*inputs, states=states, plan=batch)
    return (
        float((found - out).abs().max() / out.abs().max()),
        float((states.data - after).abs().max() / after.abs().max()),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({
        f"{kind}, {step}, {what}": errors(spec, step, rate)
        for kind, spec in SPECS.items() for step in STEPS for what, rate in RATES.items()
        if step == "chunks" or rate is None
    }))  # fmt: skip
