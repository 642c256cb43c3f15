"""Random steps of a recurrence that look like a model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from polyattn.runtime.kv_cache import STORAGE_DTYPES
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of


def recurrent_inputs(
    spec: LayerSpec, tokens: int, generator: torch.Generator, device: str | torch.device = "cpu"
) -> list[Tensor]:
    """Return inputs of a recurrent layer in its form's order: steps short, gates within (0, 1)."""
    dtype = STORAGE_DTYPES[spec.dtype]
    found = []
    for name, letters in form_of(spec).inputs.items():
        tensor = torch.randn(shape_of(spec, letters, tokens), generator=generator)
        if name == "dt":
            tensor = tensor * 0.5 - 1.0
            if spec.recurrent and not spec.recurrent.dt_softplus:  # then it is the step itself
                tensor = torch.nn.functional.softplus(tensor)
        elif name == "g":
            tensor = -torch.nn.functional.softplus(tensor - 2.0)
        elif name == "beta":
            tensor = torch.sigmoid(tensor)
        elif name in ("q", "k") and spec.kind is AttentionKind.GDN:
            tensor = normalize(tensor, dim=-1)
        elif name in ("k", "B", "C"):
            tensor = tensor / math.sqrt(tensor.shape[-1])
        found.append(tensor.to(dtype).to(device))
    return found


def recurrent_params(spec: LayerSpec, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a recurrent layer's parameters: A and decay negative, as every model has them."""
    found = {}
    for name, letters in form_of(spec).params.items():
        tensor = torch.randn(shape_of(spec, letters), generator=generator)
        if name == "A":
            tensor = -torch.exp(tensor * 0.5)
        elif name == "decay":
            tensor = -torch.rand(tensor.shape, generator=generator) * 0.5
        elif name == "weight":
            tensor = tensor / math.sqrt(tensor.shape[-1])
        elif name == "dt_bias" and spec.recurrent and not spec.recurrent.dt_softplus:
            tensor = tensor.abs() * 0.1
        found[name] = tensor
    return found
