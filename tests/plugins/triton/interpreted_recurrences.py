"""Recurrences of TRITON_SCAN and TRITON_TOKEN_SCAN, interpreted, against float64.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints the largest errors
of outputs, relative to the largest element, and of states, relative to their sequence's; and into how
many pieces a step was cut. With PLAIN_INTERPRETER, Triton's interpreter stays as it is.
"""

from __future__ import annotations

import json
import math
import os
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from polyattn import Batch, LayerSpec, Recurrent, select
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params, recurrent_state
from polyattn.kernel import RecurrentSpec
from polyattn.spec.recurrence import form_of
from polyattn_triton import interpreter, walk
from torch import Tensor

if "PLAIN_INTERPRETER" in os.environ:
    interpreter.hasten = lambda: None

SPECS = {
    "kda": LayerSpec(
        kind="kda", num_heads=4, num_kv_heads=2, head_size=20, v_head_size=24, dtype="float32",
        recurrent=RecurrentSpec(qk_norm=True),
    ),
    **{
        kind: LayerSpec(
            kind=kind, num_heads=2, head_size=16, dtype="float32", recurrent=RecurrentSpec()
        )
        for kind in ("rwkv6", "rwkv7")
    },
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
    **{
        kind: LayerSpec(
            kind=kind, num_heads=2, num_kv_heads=2, head_size=24, v_head_size=40, dtype="float32",
            recurrent=RecurrentSpec(state_size=24, qk_norm=kind == "gdn"),
        )
        for kind in ("linear", "gdn")
    },
}  # fmt: skip
SPECS["mamba2"] = LayerSpec(
    kind="mamba2", num_heads=2, head_size=24, dtype="float32",
    recurrent=RecurrentSpec(state_size=24, dt_softplus=False),
)  # fmt: skip
# Chunks are long where products are of 16 bits.
SPECS["gdn float16"] = SPECS["gdn"].replace(num_heads=4, dtype="float16")
SPECS |= {f"{kind} float16": SPECS[kind].replace(dtype="float16") for kind in ("kda", "rwkv7")}
STEPS = {
    "long chunks": ([70, 64, 1, 0], [70, 90, 9, 5]),
    "chunks": ([19, 16, 1, 0], [19, 20, 9, 5]),
    "decode": ([1, 1], [1, 40]),
    "whole": ([19, 63, 1, 0], [19, 83, 9, 5]),
    "pieces": ([700], [701]),
    "long ago": ([11, 8, 7, 40], [113, 244, 60, 40]),
    "pieces of 64": ([256, 193, 129, 64, 1, 0], [256, 200, 129, 80, 9, 5]),
    "pieces of 128": ([256, 300, 127], [256, 310, 127]),
}


def every_seventh(rate: float, inputs: dict[str, Tensor], params: dict[str, Tensor]) -> None:
    """Set every seventh token's log decays in every second channel."""
    rates = inputs["g" if "g" in inputs else "w"]
    rates[::7, ..., ::2] = rate


def long_steps(size: float, inputs: dict[str, Tensor], params: dict[str, Tensor]) -> None:
    """Let Mamba-2 take a long step, of nothing, at every seventh token."""
    inputs["dt"][3::7], inputs["x"][3::7] = size, 0.0


def all_forget(inputs: dict[str, Tensor], params: dict[str, Tensor]) -> None:
    """Have each token forget all that was before it."""
    for decay in (inputs.get("g"), params.get("decay")):
        if decay is not None:
            decay -= 40.0


def all_remember(inputs: dict[str, Tensor], params: dict[str, Tensor]) -> None:
    """Have tokens forget next to nothing, so that what several pieces leave counts."""
    inputs["g" if "g" in inputs else "w"] *= 1e-3
    for name in ("beta", "b"):
        if name in inputs:
            inputs[name] *= 0.2


def gates_in_float32(inputs: dict[str, Tensor], params: dict[str, Tensor]) -> None:
    """Have log decays in float32, of digits that 16 bits don't hold."""
    inputs["g"] = inputs["g"].float() * 1.001


CASES = [
    *((kind, step, None) for step in ("chunks", "decode") for kind in ("kda", "rwkv6", "rwkv7")),
    *((k, "chunks", partial(every_seventh, rate)) for k in ("kda", "rwkv7") for rate in (-900.0, 0.0)),
    *((k, step, None) for k in ("rg_lru", "phi elu+1", "phi relu") for step in ("whole", "pieces")),
    *((kind, "long ago", all_forget) for kind in ("linear", "gdn")),
    *(("gdn float16", "long chunks", change)
      for change in (None, all_forget, partial(every_seventh, -math.inf))),
    *((f"{kind} float16", "long chunks", change) for kind in ("kda", "rwkv7")
      for change in (None, partial(every_seventh, -math.inf), partial(every_seventh, 0.0))),
    ("kda float16", "long chunks", gates_in_float32),
    *(("gdn", "long chunks", partial(every_seventh, rate)) for rate in (-900.0, -1e6, -math.inf)),
    *((kind, "pieces of 64", None) for kind in ("mamba2", "linear")),
    *((f"{kind} float16", "pieces of 64", change) for kind in ("gdn", "kda", "rwkv7")
      for change in (all_remember, partial(every_seventh, -math.inf))),
    ("gdn float16", "pieces of 128", None),
    *(("mamba2", "long chunks", partial(long_steps, size)) for size in (900.0, 1e30)),
]  # fmt: skip


def errors(spec: LayerSpec, step: str, change: Any, seed: int) -> tuple[float, float, int]:
    queries, lens = STEPS[step]
    generator = torch.Generator().manual_seed(seed)
    params = recurrent_params(spec, generator)
    inputs = recurrent_inputs(spec, sum(queries), generator)
    named = dict(zip(form_of(spec).inputs, inputs, strict=True))
    if change is not None:
        change(named, params)
    token = spec.kind.value in ("rg_lru", "phi_linear", "rwkv6")
    backend = "TRITON_TOKEN_SCAN" if token else "TRITON_SCAN"
    cut = walk.tokens_of_piece
    if "pieces of" in step:
        cut = lambda *_: int(step.split()[-1])  # noqa: E731
    with patch.object(walk, "tokens_of_piece", cut):
        layer = Recurrent(select(spec, "cpu", backend=backend), **params)
        states = layer.group.allocate_states(len(lens) + 1)
        states.data.copy_(recurrent_state(spec, tuple(states.data.shape), generator))
        slots = torch.randperm(len(lens) + 1, generator=generator)[: len(lens)]
        batch = Batch.from_lens(queries, lens, state_slots=slots)
        out, after = reference.forward(spec, named, params, states.data, batch)
        found = layer(*named.values(), states=states, plan=batch)
        wrong = (states.data - after).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1)
        plans = [call.plan for call in layer.group.plan(batch).calls]
        pieces = [plan.pieces if token else plan.walked for plan in plans]
    count = sum(some.count for some in pieces if some is not None)
    return float((found - out).abs().max() / out.abs().max()), float(wrong.max()), count


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([
        (f"{kind}, {step}", errors(SPECS[kind], step, change, seed))
        for kind, step, change in CASES for seed in (3, *((4,) if change is all_forget else ()))
    ]))  # fmt: skip
