"""What changes queries, keys, values and outputs? A variant's transforms, by torch's operators.

They come before attention and after it, so that every backend serves them: keys and values are cached as
they leave their transforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polyattn.registry.discovery import generation
from polyattn.registry.variants import variant_of
from polyattn.runtime.functions.pointwise import Function, function_of
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec

NAMES = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Transforms:
    """A variant's functions of elements, by what they change."""

    functions: dict[str, Function]

    @classmethod
    def of(cls, spec: LayerSpec) -> Transforms | None:
        """Return a layer's, None where it has none. Raises `SpecError`."""
        return _transforms(spec, generation())

    def changed(
        self, name: str, tensor: Tensor, places: Places, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the transform of the tensor `name` (tokens, heads, size), in its dtype."""
        function = self.functions.get(name)
        if function is None:
            return tensor
        device = tensor.device
        heads = torch.arange(tensor.shape[1], device=device)[:, None]
        at = (places.seq, heads, places.place, torch.arange(tensor.shape[2], device=device))
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        result = torch.as_tensor(function(wide, *at, inputs=inputs), device=device)
        return result.to(tensor.dtype).expand_as(tensor)


@lru_cache(maxsize=256)
def _transforms(spec: LayerSpec, generation: int) -> Transforms | None:
    variant = variant_of(spec)
    if variant is None or not variant.transforms:
        return None
    functions = {name: function_of(variant, f"{name}_mod") for name in NAMES}
    return Transforms(
        {name: function for name, function in functions.items() if function is not None}
    )


@dataclass(frozen=True)
class Places:
    """Each token's sequence in the step, and its place in that: int64 (tokens, 1, 1)."""

    seq: Tensor
    place: Tensor

    @classmethod
    def of_queries(cls, batch: Batch) -> Places:
        """Those of the step's new tokens."""
        counts = torch.tensor(batch.query_lens, dtype=torch.int64, device="cpu")
        seq = torch.tensor(batch.seq_ids, dtype=torch.int64, device="cpu").repeat_interleave(counts)
        place = torch.from_numpy(batch.host_positions).long()
        return cls(*(t.to(batch.device)[:, None, None] for t in (seq, place)))

    @classmethod
    def of_keys(cls, batch: Batch, count: int) -> Places:
        """Positions of `count` keys that are passed whole. Keys between sequences have the first's."""
        seq, place = torch.zeros(2, count, dtype=torch.int64, device="cpu")
        ranges = zip(batch.seq_ids, batch.key_starts, batch.lens, strict=True)
        for number, start, length in ranges:
            seq[start : start + length] = number
            place[start : start + length] = torch.arange(length, device="cpu")
        return cls(*(t.to(batch.device)[:, None, None] for t in (seq, place)))
