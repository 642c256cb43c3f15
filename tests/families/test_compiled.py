"""Layers inside torch.compile: the eager bits, and what is wrong is refused as outside of it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from families.steps import FAMILIES, Attending, Latent, Recurring
from polyattn import (
    Attention,
    Batch,
    KVCache,
    LatentAttention,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    StateCache,
    StepPlan,
    attention,
    select,
)
from polyattn.errors import BatchError, PolyattnError
from polyattn.settings import current_settings


@FAMILIES
def test_compiled_without_a_break(family: type[Any]) -> None:
    """One graph for any step, whose plan is made outside; the eager bits."""
    step = family()

    def model(plan: StepPlan, *inputs: torch.Tensor) -> torch.Tensor:
        out = step.run(step.layer, plan, inputs[0] * 1.5, *inputs[1:])
        return out + 1  # type: ignore[no-any-return]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        plan = step.layer.plan(step.batch)
        eager = model(plan, *step.inputs)
        if isinstance(step, Recurring):
            step.states.data.copy_(step.start)
        assert torch.equal(compiled(plan, *step.inputs), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@FAMILIES
def test_a_batch_inside_a_compiled_function_is_refused(family: type[Any]) -> None:
    step = family()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *inputs: step.run(step.layer, step.batch, *inputs), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="takes a plan that was made before"):
        compiled(*step.inputs)


@FAMILIES
def test_another_thread_that_compiles_changes_no_eager_call(family: type[Any]) -> None:
    """Torch's flag is one for all threads."""
    step, seen = family(), []
    expected = step.run(step.layer, step.batch, *step.inputs)
    if isinstance(step, Recurring):
        step.states.data.copy_(step.start)

    def meanwhile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(step.run, step.layer, step.batch, *step.inputs).result())
        return graph

    torch._dynamo.reset()
    torch.compile(torch.neg, backend=meanwhile)(torch.ones(1))
    assert torch.equal(seen[0], expected)


@FAMILIES
def test_a_compiled_step_s_inputs_are_checked(family: type[Any]) -> None:
    step = family()
    plan = step.layer.plan(step.batch)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda plan, *inputs: step.run(step.layer, plan, *inputs), fullgraph=True, backend="eager"
    )
    compiled(plan, *step.inputs)
    first, *rest = step.inputs
    for wrong, says in (
        ([first[:3], *(t[:3] for t in rest)], "3 tokens"),
        ([first.to(torch.float64), *rest], "float64"),
        ([first.repeat(1, 2, *(1,) * (first.dim() - 2)), *rest], "it must be"),
    ):
        with pytest.raises(PolyattnError, match=says):
            compiled(plan, *wrong)


@pytest.mark.parametrize("family", [Attending, Latent])
def test_a_compiled_step_s_cache_is_checked(family: type[Any]) -> None:
    step = family()
    plan, cache = step.layer.plan(step.batch), step.cache
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda plan, cache: step.layer(*step.inputs, cache, plan), fullgraph=True, backend="eager"
    )
    compiled(plan, cache)
    key = cache.key
    for other, says in (
        (key[:, :8].contiguous(), "block_size is 8"),
        (key.to(torch.bfloat16), "dtype is bfloat16"),
        (key[..., :16].contiguous(), "head_size is 16"),
    ):
        value = other[..., : cache.value.shape[3]] if cache.value_in_key else other.clone()
        with pytest.raises(PolyattnError, match=says):
            compiled(plan, KVCache(other, value))


def test_a_compiled_step_s_states_are_checked() -> None:
    step = Recurring()
    plan = step.layer.plan(step.batch)
    compiled = torch.compile(
        lambda plan, states: step.layer(*step.inputs, states=states, plan=plan),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    with pytest.raises(PolyattnError, match="states"):
        compiled(plan, StateCache(step.states.data[:, :1].contiguous()))


@FAMILIES
def test_gradients_are_refused_inside_too(family: type[Any]) -> None:
    """Else the output has none, in silence."""
    step = family()
    plan = step.layer.plan(step.batch)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *inputs: step.run(step.layer, plan, *inputs), fullgraph=True, backend="eager"
    )
    inputs = [t.clone() for t in step.inputs]
    inputs[0].requires_grad_()
    with pytest.raises(Exception, match="requires a gradient.*forward only"):
        compiled(*inputs)
    with torch.no_grad():
        compiled(*inputs)


def test_a_graph_whose_layer_died_runs_no_other_layer() -> None:
    """Nor one whose plan did: numbers are never used again."""
    step = Attending()
    plan, cache = step.layer.plan(step.batch), step.cache
    out = torch.empty(4, 4, 32)

    def call(plan_handle: torch.Tensor, layer_handle: int) -> None:
        torch.ops.polyattn.layer(
            [*step.inputs], cache.key, cache.value, out, None, plan_handle, layer_handle
        )

    handle, plan_handle = step.layer._handle, plan.handle
    call(plan_handle, handle)
    group, sinks = step.layer.group, step.sinks
    del step.layer
    gc.collect()
    others = [Attention(group, sinks=sinks) for _ in range(50)]
    with pytest.raises(BatchError, match="the layer of this compiled graph is gone"):
        call(plan_handle, handle)
    del plan, step.batch
    gc.collect()
    with pytest.raises(BatchError, match="the plan of this step is gone"):
        call(plan_handle, others[0]._handle)


def test_absorbed_latents_are_as_wide_as_the_rank() -> None:
    spec = LayerSpec(
        kind="mla", num_heads=4, head_size=48, v_head_size=32, dtype="float32",
        latent=LatentSpec(rank=64, rope_head_size=16),
    )  # fmt: skip
    group = LayerGroup(spec)
    layer, cache = LatentAttention(group), group.allocate_cache(2)
    cache.key.normal_()
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    plan = group.plan(Batch.from_lens([1, 1], [5, 9], table, cache.block_size))
    given = torch.randn(2, 4, 80), torch.randn(2, 64), torch.randn(2, 16)
    compiled = torch.compile(lambda *t: layer(*t, cache, plan), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), layer(*given, cache, plan))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [("contiguous", {}), ("HND", {}), ("NHD", {"kv_cache_dtype": "int8_rows"})],
)
def test_compiled_over_any_cache(layout: str, changes: dict[str, Any]) -> None:
    """The graph holds tensors, from which not every format can be told."""
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
    settings = replace(current_settings(), layout=layout)
    layer = Attention(LayerGroup(select(spec.replace(**changes), "cpu", settings=settings)))
    cache, table = layer.group.allocate_cache(3), torch.tensor([[2], [0]], dtype=torch.int32)
    plan = layer.group.plan(Batch.from_lens([3, 1], [3, 1], table, 16))
    inputs = [torch.randn(4, heads, 32) for heads in (4, 2, 2)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: layer(*x, cache, plan), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), layer(*inputs, cache, plan))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_s_operator_is_what_it_declares(packed: bool, lse: bool) -> None:
    """By torch's own checks: mutation and aliasing as the schema says, a fake of the outputs' form."""
    query, key = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 16)
    value, lens = torch.randn(2, 5, 2, 24), ([2, 4], [7, 3]) if packed else (None, None)
    if packed:
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
    queries, keys = lens
    sinks = torch.randn(4)
    result = attention(
        query, key, value, sinks=sinks, query_lens=queries, key_lens=keys, scale=0.3,
        sliding_window=4, logit_soft_cap=5.0, sink_tokens=1, return_lse=lse,
    )  # fmt: skip
    options = (False, 0.3, 4, None, 5.0, None, lse, None, 1, "none")
    arguments = (query, key, value, None, sinks, None, queries, keys, None, *options)
    operator = torch.ops.polyattn.attention.default
    for output, expected in zip(operator(*arguments), result if lse else [result], strict=True):
        assert torch.equal(output, expected)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
