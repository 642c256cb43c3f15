"""Random steps through a store and through a merge."""

from __future__ import annotations

import torch

from polyattn.conformance.checks.services import STATES, over_all
from polyattn.conformance.harness.services import MergeHarness, NewTokens, StoreHarness
from polyattn.conformance.random_batches.compose import (
    Composition,
    Requests,
    draw_lengths,
    worst_by_batch,
    worst_lse_by_batch,
)
from polyattn.conformance.random_batches.pages import Pages
from polyattn.conformance.random_batches.tally import Job
from polyattn.runtime.backend import MergeBackend, StoreBackend
from polyattn.runtime.group import LayerGroup

MOST_PARTS = 6


def store_round(
    group: LayerGroup,
    store: StoreBackend,
    harness: StoreHarness,
    job: Job,
) -> None:
    """Store `job.count` steps' tokens, some NaN, into one cache and look at every slot of it."""
    spec, form = group.spec, group.cache_format
    assert form is not None
    made = Composition(Requests.of(draw_lengths(job.dice, form.block_size)), job.count, job.dice)
    key, value = harness.rows(form, spec, len(made.token_of))
    parts = [(key, made.token_starts)]
    made.spoil(parts if form.value_in_key else [*parts, (value, made.token_starts)])
    params = harness.params(form, spec)
    pages = Pages.of(made, form, key, value, (params.k_scale, params.v_scale))
    assert pages.stored is not None
    for rows, batch in pages.batches(made):
        assert batch.slot_mapping is not None
        plan = store.plan(batch.slot_mapping)
        store.run(plan, pages.key[rows], pages.value[rows], pages.cache, params)
    what = f"{harness.backend}, {spec}, seed {harness.seed}"
    job.tally.add(what, torch.zeros(made.count), 1.0, made)
    new = NewTokens(pages.key, pages.value, pages.stored, pages.cache, params)
    try:
        harness.compare(new, pages.held)
    except AssertionError as error:
        job.tally.fail(f"{what}: {error}")


def merge_round(
    group: LayerGroup,
    merge: MergeBackend,
    harness: MergeHarness,
    job: Job,
) -> None:
    """Merge `job.count` steps' states, two to six parts each, some rows NaN."""
    spec = group.spec
    made = Composition(Requests.of(draw_lengths(job.dice, 16)), job.count, job.dice)
    parts = harness.states(spec, int(job.dice.integers(2, MOST_PARTS + 1)), len(made.row_of))
    expected, expected_lse = over_all(parts)
    made.spoil([(out, made.row_starts) for out, _ in parts])
    precise = torch.float64 if spec.dtype == "float64" else torch.float32
    total, total_lse = (t.to(precise, copy=True) for t in parts[0])
    for index in range(made.count):
        _, rows = made.batch(index)
        for out, lse in parts[1:]:
            merge.run(total[rows], total_lse[rows], out[rows], lse[rows].to(precise))
    sound, batch = made.sound_rows(), made.batch_of_rows()
    limit = STATES * (1.0 if precise is torch.float32 else 0.1)
    what = f"{harness.backend}, {spec}, {len(parts)} parts, seed {harness.seed}"
    batch = batch[sound.numpy()]
    errors = worst_by_batch(total[sound], expected[sound], batch, made.count)
    job.tally.add(what, errors, limit, made)
    errors = worst_lse_by_batch(total_lse[sound], expected_lse[sound], batch, made.count)
    job.tally.add(f"LSE of {what}", errors, 1e-4, made, again=True)
