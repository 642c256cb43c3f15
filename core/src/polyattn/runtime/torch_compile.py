"""`Attention` inside `torch.compile`: one registered operator, so that a graph never breaks.

`Library.define`/`impl` costs a third of `torch.library.custom_op` a call, and the eager path uses
neither. The operator finds its layer by a number, because a graph can't hold the layer itself; the
step's batch is the one that was planned before the compiled function ran.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.kv_cache import KVCache

if TYPE_CHECKING:
    from polyattn.families.attention.layer import Attention

_layers: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
_library = torch.library.Library("polyattn", "DEF")
_library.define(
    "attention(Tensor query, Tensor? key, Tensor? value, Tensor(a!)? key_cache, "
    "Tensor(b!)? value_cache, Tensor(c!) out, Tensor(d!)? lse, int layer) -> ()"
)


def handle(layer: Attention) -> int:
    """Return the number under which the operator finds `layer`. Call it before compiling."""
    if layer._handle is None:
        layer._handle = max(_layers, default=0) + 1
        _layers[layer._handle] = layer
    return layer._handle


def call(
    layer: Attention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `Attention.forward` becomes while it is traced."""
    spec = layer.selection.spec
    if out is None:
        out = query.new_empty((query.shape[0], spec.num_heads, spec.v_head_size))
    lse = None
    if spec.needs_lse:
        lse = query.new_empty((query.shape[0], spec.num_heads), dtype=torch.float32)
    key_cache = None if cache is None else cache.key
    value_cache = None if cache is None else cache.value
    assert layer._handle is not None, "handle(layer) comes before torch.compile"
    torch.ops.polyattn.attention(query, key, value, key_cache, value_cache, out, lse, layer._handle)
    return out if lse is None else (out, lse)


def _run(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    layer: int,
) -> None:
    found = _layers[layer]
    batch = found.runtime.batch
    if batch is None:
        raise BatchError("no batch: call plan(batch) before the compiled function")
    if batch.num_tokens != query.shape[0]:
        raise BatchError(
            f"query has {query.shape[0]} tokens, the planned batch {batch.num_tokens}; call "
            "plan(batch) with this step's batch first"
        )
    cache = None
    if key_cache is not None and value_cache is not None:
        cache = KVCache(key_cache, value_cache)
    found.runtime.forward(query, key, value, cache, found.params, out, lse)


def _fake(*args: object) -> None:
    """Shapes are the caller's; nothing is returned."""


_library.impl("attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("polyattn::attention", _fake, lib=_library)
