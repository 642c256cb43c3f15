"""Are captured steps of prompts beside decodes right, wherever rows stand and however long they are?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.harness.attention import AttentionHarness, Inputs
from polyattn.runtime.cuda_graph import StepGraphs
from polyattn.runtime.mixed_buffers import MixedBuffers
from polyattn.runtime.step_buffers import StepSize

SIZE = StepSize(3, prompts=3, prompt_tokens=40)
STEPS = (
    [(1, 33), (7, 40), (1, 5), (22, 22), (1, 17), (11, 50)],
    [(3, 3), (36, 60), (1, 1), (1, 64)],
    [(1, 5), (1, 6), (1, 7), (1, 8), (0, 9), (2, 60)],
)
"""(query length, length) of each row: prompts between decodes, one that fills its room, a decode too
many beside a row without a query."""


def mixed_reuse(case: Case, harness: AttentionHarness) -> None:
    """What a captured mixed step reads is refilled: the first plan, run after others were planned."""
    layer = harness.layer(case.spec)
    layer.checks = False  # the captured plan's lengths are the longest, not the step's
    form = layer.group.cache_format
    assert form is not None
    buffers = MixedBuffers(SIZE, 64, form.block_size, harness.torch_device)
    captured = layer.group.plan(buffers.longest())
    for lengths in STEPS:
        given = harness.inputs(layer, lengths)
        tokens = given.batch.num_tokens
        assert buffers.fits(given.batch)
        filled = buffers.fill(given.batch)
        layer.group.plan(filled, reuse=captured)
        places = buffers.places[:tokens]

        def wide(tensor: Tensor | None, places: Tensor = places) -> Tensor:
            assert tensor is not None
            whole = tensor.new_zeros(SIZE.tokens, *tensor.shape[1:])
            return whole.index_copy_(0, places, tensor)

        held = harness.expected_cache(layer, given)
        step = Inputs(filled, wide(given.query), wide(given.key), wide(given.value), given.cache)
        found, lse = harness.run(layer, step, captured)
        harness.compare(
            layer, replace(given, cache=held), found[places],
            None if lse is None else lse[places], "a mixed plan reused: ",
        )  # fmt: skip


def mixed_graph(case: Case, harness: AttentionHarness) -> None:
    """A captured mixed step, replayed over other rows, lengths and tables, equals eager."""
    layer = harness.layer(case.spec)
    form = layer.group.cache_format
    assert form is not None
    first = harness.inputs(layer, STEPS[0])
    cache = layer.group.allocate_cache(64)

    def step(plans, query, key, value):  # type: ignore[no-untyped-def]
        return layer(query, key, value, cache, plans[layer.group])

    graphs = StepGraphs([layer.group], step, [SIZE], 64)
    graphs.capture({name: getattr(first, name) for name in ("query", "key", "value")})
    for lengths in STEPS:
        given = harness.inputs(layer, lengths)
        assert given.cache is not None
        blocks = given.cache.num_blocks
        for stored, wanted in ((cache.key, given.cache.key), (cache.value, given.cache.value)):
            stored[:blocks] = wanted
        expected = harness.expected_cache(layer, given)
        tensors = {name: getattr(given, name) for name in ("query", "key", "value")}
        found = graphs.replay(given.batch, tensors).clone()
        harness.compare(layer, replace(given, cache=expected), found, None, "replayed: ")
        graph = graphs.find(given.batch)
        assert graph is not None
        filled = graph.buffers.fill(given.batch)
        eager = layer(*graph.inputs.values(), cache, filled)
        rows = slice(0, len(found))
        if isinstance(graph.buffers, MixedBuffers):
            eager = eager[graph.buffers.places[rows]]
        assert torch.equal(eager[rows], found), (
            "a replay has other bits than the same step run eagerly"
        )
