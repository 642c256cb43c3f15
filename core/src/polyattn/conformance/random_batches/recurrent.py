"""Random batches through a recurrent backend."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.harness.base import bits
from polyattn.conformance.harness.recurrent import RecurrentHarness
from polyattn.conformance.random_batches.compose import (
    Composition,
    Requests,
    draw_lengths,
    worst_by_batch,
)
from polyattn.conformance.random_batches.tally import Job, Tally
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.inputs import recurrent_state
from polyattn.families.recurrent.layer import Recurrent
from polyattn.families.recurrent.planning import RecurrentStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.cache.state_cache import StateCache
from polyattn.runtime.step.batch import Batch

BLOCK = 16
"""Of what `draw_lengths` draws contexts: a recurrence has no blocks."""


def recurrent_round(
    layer: Recurrent, harness: RecurrentHarness, job: Job, numbers: str = "usual"
) -> None:
    """Run `job.count` batches of one layer; outputs and states of all are compared with the reference."""
    spec, device = layer.spec, harness.torch_device
    requests = Requests.of(draw_lengths(job.dice, BLOCK))
    pool = harness.tokens(layer, int(requests.queries.sum()), numbers)
    starts = layer.group.allocate_states(len(requests.lens)).data
    starts.copy_(recurrent_state(spec, starts.shape, harness.generator))
    slots = torch.arange(len(requests.lens)).masked_fill(torch.from_numpy(requests.padding), -1)
    batch = Batch.from_lens(
        requests.queries.tolist(),
        requests.lens.tolist(),
        state_slots=slots.to(device),
        device=device,
    )
    named = dict(zip(layer.form.inputs, pool, strict=True))
    expected, ends = reference.forward(spec, named, layer.params, starts, batch)

    made = Composition(requests, job.count, job.dice)
    rows = torch.from_numpy(made.row_of).to(device)
    inputs = [tensor[rows] for tensor in pool]
    total = len(made.request) + 2
    order = torch.from_numpy(job.dice.permutation(total)[: len(made.request)])
    of = torch.from_numpy(made.request).to(device)
    continues = torch.from_numpy(made.lens > made.queries)
    states = layer.group.allocate_states(total)
    states.data.fill_(torch.nan)
    held = starts[of]
    ones = np.arange(len(made.request) + 1)
    made.spoil([*((tensor, made.row_starts) for tensor in inputs), (held, ones)])
    states.data[order[continues].to(device)] = held[continues.to(device)]
    before = states.data.clone()
    out = inputs[0].new_full(
        layer.output_shape(len(rows)), torch.nan, dtype=STORAGE_DTYPES[spec.dtype]
    )
    _run(layer, made, order, inputs, states, out)
    _compare(layer, harness, made, job.tally, (out, expected), (states.data, before, ends, order))


def _run(
    layer: Recurrent,
    made: Composition,
    order: Tensor,
    inputs: list[Tensor],
    states: StateCache,
    out: Tensor,
) -> None:
    slots = order.masked_fill(torch.from_numpy(made.padding), -1).to(out.device)
    for index in range(made.count):
        seqs, rows = made.batch(index)
        starts = (made.row_starts[seqs.start : seqs.stop + 1] - rows.start).tolist()
        batch = Batch(starts, made.lens[seqs].tolist(), state_slots=slots[seqs], device=out.device)
        step = layer.group.plan(batch)
        assert isinstance(step, RecurrentStep)
        layer.run(step, tuple(tensor[rows] for tensor in inputs), states, out[rows])


def _compare(
    layer: Recurrent,
    harness: RecurrentHarness,
    made: Composition,
    tally: Tally,
    outputs: tuple[Tensor, Tensor],
    states: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    spec, limit = layer.spec, tolerance_of(layer.spec).output
    what = f"{harness.backend}, {spec}, seed {harness.seed}"
    real = made.sound_rows() & torch.from_numpy(~np.repeat(made.padding, made.queries))
    at, batch = torch.from_numpy(made.row_of)[real], made.batch_of_rows()[real.numpy()]
    errors = worst_by_batch(_row(outputs[0].cpu()[real]), _row(outputs[1][at]), batch, made.count)
    tally.add(what, errors, limit, made)
    now, before, ends, order = (t.cpu() for t in states)
    ran = (made.queries > 0) & ~made.padding
    sound = np.flatnonzero(ran & ~made.spoilt)
    batch = np.repeat(np.arange(made.count), np.diff(made.bounds))[sound]
    own, right = now[order[torch.from_numpy(sound)]], ends[torch.from_numpy(made.request[sound])]
    errors = worst_by_batch(_row(own), _row(right), batch, made.count)
    tally.add(f"states of {what}", errors, limit, made, again=True)
    kept = torch.ones(len(now), dtype=torch.bool)
    kept[order[torch.from_numpy(np.flatnonzero(ran))]] = False
    if not torch.equal(bits(now[kept]), bits(before[kept])):
        tally.fail(f"{what}: a slot that no sequence of its step has was written")


def _row(tensor: Tensor) -> Tensor:
    """One head of all that a token or a slot has: (rows, 1, size)."""
    return tensor.flatten(1)[:, None]
