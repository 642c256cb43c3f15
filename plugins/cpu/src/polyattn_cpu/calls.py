"""TORCH_SDPA's inputs for one sequence besides its queries."""

from __future__ import annotations

import torch
from polyattn.kernel import KVCache, LayerParams, LayerSpec
from torch import Tensor

from polyattn_cpu.gather import PagedReader, Span
from polyattn_cpu.pointwise import Places


class Given:
    """Keys and values of the call, (KV heads, keys, size)."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        keys, values = (
            [each[:, slice(*part)] for part in span.ranges] for each in (self.keys, self.values)
        )
        return (
            (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 1), torch.cat(values, 1))
        )


class Paged:
    """Keys and values in the cache."""

    def __init__(self, reader: PagedReader, cache: KVCache, index: int, dtype: torch.dtype):
        self.reader, self.cache, self.index, self.dtype = reader, cache, index, dtype

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        return self.reader.read(self.cache, self.index, span, self.dtype)


Source = Given | Paged


class Call:
    """The arguments of one sequence's attention beside its queries."""

    __slots__ = ("k_scale", "length", "params", "places", "source", "spec", "v_scale")

    def __init__(
        self,
        spec: LayerSpec,
        source: Source,
        length: int,
        params: LayerParams,
        k_scale: float | Tensor,
        v_scale: float | Tensor,
        places: Places | None,
    ):
        self.spec, self.source, self.length, self.params = spec, source, length, params
        self.k_scale, self.v_scale, self.places = k_scale, v_scale, places
