"""The suite. Each test is one kind of check; the plugin gives it the cases that the claims imply."""

from __future__ import annotations

import pytest
import torch

from polyattn.conformance.case import Case
from polyattn.conformance.cases import batches
from polyattn.conformance.harness import Harness
from polyattn.errors import SelectionError
from polyattn.runtime.cuda_graph import DecodeGraph


@pytest.mark.conformance("numeric")
def test_numeric(case: Case, harness: Harness) -> None:
    """Output and LSE agree with the float64 reference; unused cache is NaN throughout."""
    layer = harness.layer(case.spec)
    harness.check(layer, harness.inputs(layer, case.batch))


@pytest.mark.conformance("refusal")
def test_refusal(case: Case, harness: Harness) -> None:
    """What isn't claimed is refused, with a rejection that says what and why."""
    with pytest.raises(SelectionError) as caught:
        harness.select(case.spec)
    assert "wanted" in str(caught.value) and "supported" in str(caught.value)


@pytest.mark.conformance("layout")
def test_layout(case: Case, harness: Harness) -> None:
    """Every claimed physical layout works."""
    layer = harness.layer(case.spec, layout=case.label)
    inputs = harness.inputs(layer, case.batch)
    assert inputs.cache is not None and inputs.cache.layout == case.label
    harness.check(layer, inputs)


@pytest.mark.conformance("packed")
def test_packed(case: Case, harness: Harness) -> None:
    """K and V may be views into one storage, packed per block."""
    layer = harness.layer(case.spec)
    harness.check(layer, harness.inputs(layer, case.batch, packed=True))


@pytest.mark.conformance("out")
def test_out(case: Case, harness: Harness) -> None:
    """`out=` may be a view into a larger tensor; its surroundings stay untouched."""
    layer = harness.layer(case.spec)
    inputs = harness.inputs(layer, case.batch)
    expected = harness.check(layer, inputs).clone()
    wide = torch.full((expected.shape[0] + 2, *expected.shape[1:]), 7.0).to(expected)
    layer(inputs.query, inputs.key, inputs.value, inputs.cache, inputs.batch, out=wide[1:-1])
    torch.testing.assert_close(wide[1:-1], expected, rtol=1e-2, atol=1e-2)
    assert bool((wide[0] == 7).all()) and bool((wide[-1] == 7).all())


@pytest.mark.conformance("strided")
def test_strided(case: Case, harness: Harness) -> None:
    """Query, key and value may be slices of one fused projection."""
    layer = harness.layer(case.spec)
    inputs = harness.inputs(layer, case.batch)
    assert inputs.key is not None and inputs.value is not None
    fused = torch.cat([inputs.query, inputs.key, inputs.value], dim=1)
    heads, kv = case.spec.num_heads, case.spec.num_kv_heads
    inputs.query, inputs.key, inputs.value = fused.split([heads, kv, kv], dim=1)
    assert not inputs.query.is_contiguous()
    harness.check(layer, inputs)


@pytest.mark.conformance("replan")
def test_replan(case: Case, harness: Harness) -> None:
    """Plans follow each other: a second batch, then the first again."""
    layer = harness.layer(case.spec)
    first = harness.inputs(layer, case.batch)
    block = layer.selection.decision.block_size or 16
    second = harness.inputs(layer, batches(case.batch, block)[::-1][:3])
    before = harness.check(layer, first, "first plan: ").clone()
    harness.check(layer, second, "second plan: ")
    after = harness.check(layer, first, "first plan again: ")
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)


@pytest.mark.conformance("isolation")
def test_isolation(case: Case, harness: Harness) -> None:
    """Changing one request's cache never changes another's output, bit for bit."""
    layer = harness.layer(case.spec)
    inputs = harness.inputs(layer, case.batch)
    before = harness.check(layer, inputs).clone()
    batch, cache = inputs.batch, inputs.cache
    assert cache is not None and batch.block_table is not None
    victim = max(range(batch.num_seqs), key=lambda i: batch.lens[i] - batch.query_lens[i])
    used = -(-batch.lens[victim] // cache.block_size)
    blocks = batch.block_table[victim, :used].long()
    cache.key[blocks] = 3.0
    cache.value[blocks] = -2.0
    after, _ = harness.run(layer, inputs)
    rows = slice(batch.starts[victim], batch.starts[victim + 1])
    changed = torch.ones(len(before), dtype=torch.bool)
    changed[rows] = False
    assert torch.equal(after[changed], before[changed])
    assert not torch.equal(after[rows], before[rows]), "the victim's own output must change"


@pytest.mark.conformance("deterministic")
def test_deterministic(case: Case, harness: Harness) -> None:
    """The same inputs give the same bits."""
    layer = harness.layer(case.spec)
    inputs = harness.inputs(layer, case.batch)
    first = harness.check(layer, inputs).clone()
    for _ in range(3):
        assert torch.equal(harness.run(layer, inputs)[0], first)


@pytest.mark.conformance("batch_invariant")
def test_batch_invariant(case: Case, harness: Harness) -> None:
    """A request gives the same bits alone as in company."""
    layer = harness.layer(case.spec)
    inputs = harness.inputs(layer, case.batch)
    together = harness.check(layer, inputs).clone()
    batch = inputs.batch
    for index in range(batch.num_seqs):
        rows = slice(batch.starts[index], batch.starts[index + 1])
        if batch.query_lens[index] == 0:
            continue
        assert inputs.key is not None and inputs.value is not None
        alone = layer(
            inputs.query[rows], inputs.key[rows], inputs.value[rows], inputs.cache,
            batch.part(index, index + 1),
        )  # fmt: skip
        assert torch.equal(alone, together[rows]), f"sequence {index} differs"


@pytest.mark.conformance("graph")
def test_graph(case: Case, harness: Harness) -> None:
    """A captured step, re-planned with other lengths and block tables, equals eager bit for bit.

    So it does after a larger batch was captured too, for which a backend may have grown its
    workspace: the first graph must not go on writing to memory that is somebody else's by now.
    """
    layer = harness.layer(case.spec)
    first = harness.inputs(layer, case.batch)
    assert first.cache is not None
    block, count = layer.selection.decision.block_size or 16, first.batch.num_seqs
    graph, larger = (
        DecodeGraph(layer, first.cache, size, 8 * block, block) for size in (count, 8 * count)
    )
    graph.capture()
    larger.capture()
    others = [
        torch.full((size,), 7.0, device=harness.torch_device)
        for size in (1 << 13,) * 128 + (1 << 19,) * 32
    ]
    for lengths in (batches("decode", block), batches("decode", block)[::-1]):
        step = harness.inputs(layer, lengths)
        assert step.cache is not None and step.key is not None and step.value is not None
        first.cache.key[: step.cache.num_blocks] = step.cache.key
        first.cache.value[: step.cache.num_blocks] = step.cache.value
        eager, _ = harness.run(layer, step)
        replayed = graph.replay(step.query, step.key, step.value, step.batch)
        assert torch.equal(replayed, eager)
        assert all(bool((other == 7).all()) for other in others), "it wrote beside its own memory"


def test_claims_are_tested(conformance_cases: list[Case], harness: Harness) -> None:
    """A backend must claim something that this device can test."""
    numeric = [c for c in conformance_cases if c.check in ("numeric", "latent", "recurrence")]
    assert numeric, f"{harness.backend} claims nothing that {harness.device} can test"
