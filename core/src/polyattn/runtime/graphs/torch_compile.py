"""Layers inside `torch.compile`: one registered operator for all, so that a graph never breaks.

`Library.define`/`impl` costs a third of `torch.library.custom_op` a call, and the eager path uses
neither. A graph can't hold a layer, so the operator finds it by a number that is never used again. It
finds the plan by a tensor, so that another step is no other graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.state_cache import StateCache
from polyattn.runtime.group import StepPlan, plan_of
from polyattn.runtime.inputs import refuse_gradients
from polyattn.runtime.step.batch import Batch

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
library = torch.library.Library("polyattn", "DEF")


def handle(layer: Any) -> int:
    """Return the number under which the operator finds `layer`, as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def traced(
    layer: Any,
    inputs: Sequence[Tensor | None],
    cache: KVCache | StateCache | None,
    plan: StepPlan | Batch | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the operator for a layer's `forward` in a trace. It calls `Layer.run` in the graph."""
    refuse_gradients(**{f"input {i}": tensor for i, tensor in enumerate(inputs)})
    query = inputs[0]
    assert query is not None
    out, lse = layer.outputs(query, query.shape[0], out)
    if not isinstance(plan, StepPlan):
        raise BatchError(
            "inside torch.compile a layer takes a plan that was made before: plan = "
            "layer.group.plan(batch), outside the compiled function"
        )
    held = values = None
    if isinstance(cache, StateCache):
        held = cache.data
    elif cache is not None:  # where a value is a view of its key, one tensor
        one = layer.group.cache_format.value_in_key
        held, values = cache.key, None if one else cache.value
    torch.ops.polyattn.layer(list(inputs), held, values, out, lse, plan.handle, layer._handle)
    return out if lse is None else (out, lse)


def _run(
    inputs: list[Tensor | None],
    held: Tensor | None,
    values: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    plan: Tensor,
    layer: int,
) -> None:
    module, step, query = _layers.get(layer), plan_of(plan), inputs[0]
    if module is None:
        raise BatchError(
            "the layer of this compiled graph is gone; compile the model that is there"
        )
    if step is None:
        raise BatchError("the plan of this step is gone; keep it until the compiled call returns")
    if query is not None and step.batch.num_tokens != query.shape[0]:
        raise BatchError(
            f"query has {query.shape[0]} tokens, the planned batch {step.batch.num_tokens}; pass the "
            "plan of this step's batch"
        )
    form = module.group.cache_format
    cache: KVCache | StateCache | None = None
    if held is not None and module.spec.kind.is_recurrent:
        cache = StateCache(held)
    elif held is not None:
        # What tensors alone don't tell.
        told = form is not None and form.rows is None and form.layout != "contiguous"
        view = held[..., : form.widths[1]] if values is None else values
        cache = KVCache(held, view, None if told else form)
    module.run(module.group.plan_for(step), inputs, cache, out, lse)


def _fake(*args: object) -> None:
    """Shapes are the caller's; nothing is returned."""


library.define(
    "layer(Tensor?[] inputs, Tensor(a!)? held, Tensor(b!)? values, Tensor(c!) out, Tensor(d!)? lse, "
    "Tensor plan, int layer) -> ()"
)
library.impl("layer", _run, "CompositeExplicitAutograd")
torch.library.register_fake("polyattn::layer", _fake, lib=library)
