"""What must an MLA backend do?"""

from __future__ import annotations

import torch

from polyattn.conformance.case import Case
from polyattn.conformance.cases.mla import further
from polyattn.conformance.harness.base import Harness, block_size
from polyattn.workload.pages import copied, spoiled
from polyattn.workload.steps import Lengths, batches


def latent(case: Case, harness: Harness) -> None:
    """Expanded prefill, absorbed decode and merged context agree with the plain definition."""
    layer = harness.layer(case.spec)
    harness.step(layer, case.batch).check()
    if case.batch == "long":
        caps = harness.info.capabilities
        for spec in further(caps, case.spec, harness.device):
            harness.step(harness.layer(spec), [(1, 2100), (1, 4099)]).check("another layer: ")


def latent_absorbed(case: Case, harness: Harness) -> None:
    """A layer without weights takes absorbed queries and gives latents."""
    layer = harness.layer(case.spec, weights=False)
    harness.step(layer, case.batch).check()


def latent_plans(case: Case, harness: Harness) -> None:
    """Plans and layers in turn: each plan's own batch, each layer's own weights and cache."""
    few: Lengths = [(1, 3), (1, 40), (1, 25)]
    steps, plans = harness.interleaved(case.spec, (case.batch, few, few))
    for index in (0, 1, 2, 0, 2, 1):
        for number, step in enumerate(steps[index], 1):
            step.check(f"plan {index + 1}, layer {number}, interleaved: ", plans[index])


def latent_shared(case: Case, harness: Harness) -> None:
    """Sequences may have their first blocks in common."""
    layer = harness.layer(case.spec)
    lengths = [(1, length) for _, length in batches("shared", block_size(layer))]
    harness.step(layer, lengths, shared=2).check()


def latent_isolation(case: Case, harness: Harness) -> None:
    """Whatever one request's latents and queries hold never reaches another, bit for bit."""
    inputs, how = harness.work(case), case.label.split()[-1]
    batch = inputs.batch
    before = inputs.check().clone()
    assert batch.block_table is not None
    choice = inputs.choice  # some tokens have no id

    def reads(sequence: int) -> bool:
        own = slice(batch.starts[sequence], batch.starts[sequence + 1])
        return own.stop > own.start and (choice is None or bool((choice[own] >= 0).any()))

    victim = max(range(batch.num_seqs), key=lambda i: (reads(i), batch.lens[i]))
    rows = slice(batch.starts[victim], batch.starts[victim + 1])
    used = -(-batch.lens[victim] // inputs.cache.block_size)
    blocks = batch.block_table[victim, :used].long()
    for part in ("cache", "latent", "query"):
        changed = inputs.but(cache=copied(inputs.cache))
        if part == "cache":
            changed.cache.key[blocks] = spoiled(changed.cache.key[blocks], how)
        else:
            changed = changed.spoil(how, (part,), rows)
        after = changed.run()
        others = torch.ones(len(before), dtype=torch.bool)
        others[rows] = False
        what = f"sequence {victim}'s {part} ({how})"
        assert torch.equal(after[others], before[others]), f"{what} reached another sequence"
        # A sparse layer may not have chosen its own new token.
        if part != "latent" or inputs.choice is None:
            assert not torch.equal(after[rows], before[rows]), f"{what} must change its own output"
