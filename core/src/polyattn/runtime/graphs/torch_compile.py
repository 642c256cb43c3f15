"""Layers inside `torch.compile`: one registered operator a family, so that a graph never breaks.

`Library.define`/`impl` costs a third of `torch.library.custom_op` a call, and the eager path uses
neither. An operator finds its layer by a number that is never used again, since a graph can't hold
the layer itself, and its plan by a tensor, so that another step is no other graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import output_dtype
from polyattn.runtime.cache.state_cache import StateCache
from polyattn.runtime.group import StepPlan, plan_of
from polyattn.runtime.inputs import refuse_gradients
from polyattn.runtime.step.batch import Batch

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_library = torch.library.Library("polyattn", "DEF")
_SCHEMAS = {
    "attention": "(Tensor query, Tensor? key, Tensor? value, Tensor(a!)? key_cache, "
    "Tensor(b!)? value_cache, Tensor(c!) out, Tensor(d!)? lse, Tensor plan, int layer) -> ()",
    "latent": "(Tensor query, Tensor? latent, Tensor? rope_key, Tensor(a!) cache, Tensor? choice, "
    "Tensor(b!) out, Tensor(c!)? lse, Tensor plan, int layer) -> ()",
    "recurrence": "(Tensor[] inputs, Tensor(a!) states, Tensor(b!) out, Tensor plan, int layer) -> ()",
}


def handle(layer: Any) -> int:
    """Return the number under which operators find `layer`, as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def _plan_handle(plan: StepPlan | Batch | None) -> Tensor:
    if not isinstance(plan, StepPlan):
        raise BatchError(
            "inside torch.compile a layer takes a plan that was made before: plan = "
            "layer.group.plan(batch), outside the compiled function"
        )
    return plan.handle


def attention(
    layer: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None,
    plan: StepPlan | Batch | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `Attention.forward` becomes while it is traced."""
    spec = layer.spec
    _refuse_traced_gradients(query, key, value)
    if out is None:
        shape = (query.shape[0], spec.num_heads, spec.v_head_size)
        out = query.new_empty(shape, dtype=output_dtype(spec))
    lse = None
    if spec.needs_lse:
        lse = query.new_empty((query.shape[0], spec.num_heads), dtype=torch.float32)
    key_cache = None if cache is None else cache.key
    value_cache = None if cache is None else cache.value
    torch.ops.polyattn.attention(
        query, key, value, key_cache, value_cache, out, lse, _plan_handle(plan), layer._handle
    )
    return out if lse is None else (out, lse)


def latent(
    layer: Any,
    query: Tensor,
    latents: Tensor | None,
    rope_key: Tensor | None,
    cache: KVCache,
    plan: StepPlan | Batch | None,
    choice: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `LatentAttention.forward` becomes while it is traced."""
    spec = layer.spec
    _refuse_traced_gradients(query, latents, rope_key)
    if out is None:
        width = spec.v_head_size if layer.w_uk is not None else spec.latent.rank
        out = query.new_empty((query.shape[0], spec.num_heads, width))
    lse = None
    if spec.needs_lse:
        lse = query.new_empty((query.shape[0], spec.num_heads), dtype=torch.float32)
    torch.ops.polyattn.latent(
        query, latents, rope_key, cache.key, choice, out, lse, _plan_handle(plan), layer._handle
    )
    return out if lse is None else (out, lse)


def recurrence(
    layer: Any,
    inputs: tuple[Tensor, ...],
    states: StateCache,
    plan: StepPlan | Batch | None,
    out: Tensor | None,
) -> Tensor:
    """What `Recurrent.forward` becomes while it is traced."""
    _refuse_traced_gradients(*inputs)
    if out is None:
        out = inputs[0].new_empty(layer.output_shape(inputs[0].shape[0]), dtype=layer.dtype)
    torch.ops.polyattn.recurrence(list(inputs), states.data, out, _plan_handle(plan), layer._handle)
    return out


def _refuse_traced_gradients(*tensors: Tensor | None) -> None:
    refuse_gradients(**{f"input {i}": tensor for i, tensor in enumerate(tensors)})


def _found(number: int, plan: Tensor, tokens: int) -> tuple[Any, StepPlan]:
    layer, step = _layers.get(number), plan_of(plan)
    if layer is None:
        raise BatchError(
            "the layer of this compiled graph is gone; compile the model that is there"
        )
    if step is None:
        raise BatchError("the plan of this step is gone; keep it until the compiled call returns")
    if step.batch.num_tokens != tokens:
        raise BatchError(
            f"query has {tokens} tokens, the planned batch {step.batch.num_tokens}; pass the plan of "
            "this step's batch"
        )
    return layer, layer.group.plan_for(step)


def _attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    plan: Tensor,
    layer: int,
) -> None:
    module, step = _found(layer, plan, query.shape[0])
    cache = None
    if key_cache is not None and value_cache is not None:
        form = module.group.cache_format
        rows = form is not None and form.rows is not None
        cache = KVCache(key_cache, value_cache, form if rows else None)
    module.run(step, query, key, value, cache, out, lse)


def _latent(
    query: Tensor,
    latents: Tensor | None,
    rope_key: Tensor | None,
    cache: Tensor,
    choice: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    plan: Tensor,
    layer: int,
) -> None:
    module, step = _found(layer, plan, query.shape[0])
    form = module.group.cache_format
    whole = KVCache(cache, cache[..., : form.widths[1]], form if form.rows else None)
    module.run(step, query, latents, rope_key, whole, choice, out, lse)


def _recurrence(
    inputs: list[Tensor], states: Tensor, out: Tensor, plan: Tensor, layer: int
) -> None:
    module, step = _found(layer, plan, inputs[0].shape[0])
    module.run(step, tuple(inputs), StateCache(states), out)


def _fake(*args: object) -> None:
    """Shapes are the caller's; nothing is returned."""


for _name, _run in (("attention", _attention), ("latent", _latent), ("recurrence", _recurrence)):
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyattn::{_name}", _fake, lib=_library)
