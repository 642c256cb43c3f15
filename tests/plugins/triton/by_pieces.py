"""RG-LRU and linear attention with a normaliser on TRITON_TOKEN_SCAN, interpreted, against float64.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the largest errors
of outputs and states, relative to the largest element, and into how many pieces the step was cut.
"""

from __future__ import annotations

import json

import torch
from polyattn import Batch, LayerSpec, Recurrent, select
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_state
from polyattn.kernel import RecurrentSpec

SPECS = {
    "rg_lru": LayerSpec(
        kind="rg_lru", num_heads=40, head_size=1, dtype="float32", recurrent=RecurrentSpec(state_size=1)
    ),
    **{
        f"phi {name}": LayerSpec(
            kind="phi_linear", num_heads=2, num_kv_heads=1, head_size=20, v_head_size=24, dtype=dtype,
            recurrent=RecurrentSpec(state_size=20, feature_map=name),
        )
        for name, dtype in (("elu+1", "float32"), ("relu", "float16"))
    },
}  # fmt: skip
STEPS = {
    "whole": ([19, 63, 1, 0], [19, 83, 9, 5]),
    "pieces": ([700], [701]),
}


def errors(spec: LayerSpec, step: str) -> tuple[float, float, int]:
    queries, lens = STEPS[step]
    generator = torch.Generator().manual_seed(3)
    params = {}
    if spec.kind == "rg_lru":
        params["Lambda"] = torch.randn(spec.num_heads, generator=generator)
    layer = Recurrent(select(spec, "cpu", backend="TRITON_TOKEN_SCAN"), **params)
    states = layer.group.allocate_states(len(lens) + 1)
    states.data.copy_(recurrent_state(spec, tuple(states.data.shape), generator))
    slots = torch.randperm(len(lens) + 1, generator=generator)[: len(lens)]
    batch = Batch.from_lens(queries, lens, state_slots=slots)
    inputs = recurrent_inputs(spec, sum(queries), generator)
    named = dict(zip(layer.form.inputs, inputs, strict=True))
    out, after = reference.forward(spec, named, params, states.data, batch)
    found = layer(*inputs, states=states, plan=batch)
    pieces = [call.plan.pieces for call in layer.group.plan(batch).calls]
    return (
        float((found - out).abs().max() / out.abs().max()),
        float((states.data - after).abs().max() / after.abs().max()),
        sum(each.count for each in pieces if each is not None),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({
        f"{name}, {step}": errors(spec, step) for name, spec in SPECS.items() for step in STEPS
    }))  # fmt: skip
