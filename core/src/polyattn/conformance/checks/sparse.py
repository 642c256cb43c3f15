"""What must a backend of sparse layers do?"""

from __future__ import annotations

import torch

from polyattn.conformance.case import Case
from polyattn.conformance.cases.sparse import serves
from polyattn.conformance.draws import Draw, drawn, require
from polyattn.conformance.harness.base import Harness
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import SCOPES, SparseSpec
from polyattn.workload.pages import copied, spoiled
from polyattn.workload.steps import pairs


def sparse(case: Case, harness: Harness) -> None:
    """Chosen keys alone count, each as often as it was named; twice the same bits."""
    step = harness.work(case)
    before = step.check().clone()
    assert torch.equal(step.run(), before), "the same choice twice gave other bits"


def sparse_plans(case: Case, harness: Harness) -> None:
    """Plans and layers in turn, each with a choice of its own; then one over another cache too."""
    steps, plans = harness.interleaved(case.spec, (case.batch, [(1, 3), (7, 40), (1, 25)]))
    for index in (0, 1, 0):
        for number, step in enumerate(steps[index], 1):
            step.check(f"plan {index + 1}, layer {number}, interleaved: ", plans[index])
    first, second = steps[0]
    elsewhere = harness.step(second.layer, pairs(first.batch))
    first.run(plans[0])
    elsewhere.but(choice=first.choice).check("the choice of the layer before it: ")


def sparse_others(case: Case, harness: Harness) -> None:
    """Keys that aren't chosen, and keys of other requests, reach no output."""
    step = harness.work(case)
    before = step.check().clone()
    other = harness.step(step.layer, step.lengths, like=step)
    few = step.but(choice=step.choice.clone())
    few.choice[:, :, 1:] = -1
    one = few.check("one group a token: ").clone()
    spoilt = few.but(cache=copied(few.cache), choice=few.choice)
    group, size = spoilt.part.granularity, spoilt.cache.block_size
    table = few.batch.block_table
    assert table is not None
    chosen = torch.zeros(spoilt.cache.num_blocks * size, dtype=torch.bool)
    for token, index in enumerate(_sequences(few.batch)):
        for first in few.choice[token, :, 0].tolist():
            for entry in range(first * group, (first + 1) * group) if first >= 0 else ():
                if entry // size < table.shape[1]:
                    chosen[int(table[index, entry // size]) * size + entry % size] = True
    at = (~chosen).nonzero()[:, 0].to(spoilt.cache.key.device)
    places = at // size, at % size
    for stored in (spoilt.cache.key, spoilt.cache.value):
        if stored.dtype.itemsize > 1:
            stored[places] = spoiled(stored[places], "nan")
    assert torch.equal(spoilt.but(key=None, value=None).run(), one), (
        "a key that isn't chosen counts"
    )
    other.check("another layer's step: ")
    assert torch.equal(step.run(), before)


def _sequences(batch: Batch) -> list[int]:
    """Return each token's sequence."""
    return [index for index, count in enumerate(batch.query_lens) for _ in range(count)]


def sparse_search(case: Case, harness: Harness) -> None:
    """Any choice over any batch: heads, scopes, granularities, block sizes, entries."""
    caps = harness.info.capabilities

    def example(draw: Draw) -> None:
        spec = _drawn_spec(draw, case.spec, sorted(caps.dtypes))
        require(serves(caps, spec, harness.device))
        draw.said.append(str(spec))
        layer = harness.layer(spec)
        harness.step(layer, draw.lengths()[:4]).check("drawn: ")

    drawn(harness, example)


def _drawn_spec(draw: Draw, base: LayerSpec, dtypes: list[str]) -> LayerSpec:
    group = draw.choice((1, 1, 2, 3, 4, 16, 64, 128))
    scope, heads = draw.choice(SCOPES), draw.integer(1, 5)
    latent = heads == 1 and draw.integer(0, 2) == 1
    choice = SparseSpec(
        budget=draw.integer(1, 21),
        granularity=group,
        scope=scope,
        tokens_per_entry=draw.choice((1, 1, 2, 4, 128)),
        physical=group == 1 and draw.integer(0, 2) == 1,
        value_in_key=latent,
    )
    return LayerSpec(
        kind=base.kind,
        num_heads=heads * draw.integer(1, 5),
        num_kv_heads=heads,
        head_size=base.head_size,
        dtype=draw.choice(dtypes),
        block_size=draw.choice((None, 1, 16, 48, 128)),
        sparse=choice,
    )
