"""Linear attention and the gated delta rule on TRITON_SCAN, interpreted, where each token forgets all.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the largest errors
of states, each relative to its sequence's, against float64.
"""

from __future__ import annotations

import json

import torch
from polyattn import Batch, LayerSpec, Recurrent, select
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params, recurrent_state
from polyattn.kernel import RecurrentSpec

QUERIES, LENS = [11, 8, 7, 40], [113, 244, 60, 40]
FORGETTING = 40.0


def error(kind: str, seed: int) -> float:
    """Return how far states are from the formula's, in the worst sequence."""
    spec = LayerSpec(
        kind=kind, num_heads=2, num_kv_heads=2, head_size=24, v_head_size=40, dtype="float32",
        recurrent=RecurrentSpec(state_size=24, qk_norm=kind == "gdn"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    params = recurrent_params(spec, generator)
    if "decay" in params:
        params["decay"] -= FORGETTING
    layer = Recurrent(select(spec, "cpu", backend="TRITON_SCAN"), **params)
    states = layer.group.allocate_states(len(LENS))
    states.data.copy_(recurrent_state(spec, tuple(states.data.shape), generator))
    batch = Batch.from_lens(QUERIES, LENS, state_slots=torch.arange(len(LENS)))
    inputs = recurrent_inputs(spec, sum(QUERIES), generator)
    named = dict(zip(layer.form.inputs, inputs, strict=True))
    if "g" in named:
        named["g"] -= FORGETTING
    _, after = reference.forward(spec, named, params, states.data, batch)
    layer(*inputs, states=states, plan=batch)
    wrong = (states.data - after).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1)
    return float(wrong.max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps({kind: max(error(kind, seed) for seed in (0, 1)) for kind in ("linear", "gdn")})
    )
