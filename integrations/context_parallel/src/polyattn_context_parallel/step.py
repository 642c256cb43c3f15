"""What is a step of several ranks? What each of them does for one layer, in an order that all keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from polyattn import Attention, KVCache, LatentAttention
from torch import Tensor

Layer = Attention | LatentAttention
"""What a `ContextAttention` wraps. For MLA, `key` and `value` stand for the latent and the rope key."""

Found = tuple[Tensor, Tensor | None]
"""The output, and the LSE, float32, where there is one."""


class ContextStep(ABC):
    """One rank's part in a step. A value: made once, run by each layer."""

    @abstractmethod
    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        """Store, attend and bring the ranks' results together."""


def width_of(layer: Layer, cache: KVCache) -> int:
    """Return the size of an output's head: an MLA layer without weights gives latents."""
    if isinstance(layer, LatentAttention) and layer.w_uk is None:
        return cache.format.v_head_size
    return layer.spec.v_head_size


def attend(
    layer: Layer, step: Any, query: Tensor, cache: KVCache | None, out: Tensor, lse: Tensor
) -> None:
    """Run a plan of one rank's own over keys that its cache holds by now. Writes `out`, `lse`.

    A learned sink isn't part of it: it counts once over all ranks.
    """
    if isinstance(layer, LatentAttention):
        assert cache is not None
        layer.run(step, query, None, None, cache, None, out, lse)
    else:
        step.call(query, None, None, cache, replace(layer.params, sinks=None), out, lse)


def sinks_of(layer: Layer) -> Tensor | None:
    """Return a layer's learned sinks (num_heads,), None where it has none."""
    return layer.params.sinks


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, uint8: what collectives take, whatever they are."""
    return tensor.contiguous().view(torch.uint8).flatten()
