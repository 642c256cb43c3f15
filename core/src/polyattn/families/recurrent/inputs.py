"""Random steps of a recurrence that look like a model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of


def input_dtype(spec: LayerSpec, name: str) -> torch.dtype:
    """Return the dtype that an input of a layer has; of gates, the narrower one that they may have."""
    assert spec.recurrent is not None
    wide = spec.recurrent.bc_in_float32 and name in ("B", "C") and spec.dtype != "float64"
    return torch.float32 if wide else STORAGE_DTYPES[spec.dtype]


def recurrent_inputs(
    spec: LayerSpec, tokens: int, generator: torch.Generator, device: str | torch.device = "cpu"
) -> list[Tensor]:
    """Return inputs of a recurrent layer in its form's order: steps short, gates within (0, 1)."""
    found: list[Tensor] = []
    for name, letters in form_of(spec).inputs.items():
        tensor = torch.randn(shape_of(spec, letters, tokens), generator=generator)
        if name == "dt":
            tensor = tensor * 0.5 - 1.0
            if spec.recurrent and not spec.recurrent.dt_softplus:  # then it is the step itself
                tensor = torch.nn.functional.softplus(tensor)
        elif name in ("g", "w"):
            tensor = -torch.nn.functional.softplus(tensor - 2.0)
        elif name == "beta":
            tensor = torch.sigmoid(tensor)
        elif name in ("q", "k") and spec.kind in (AttentionKind.GDN, AttentionKind.KDA):
            tensor = normalize(tensor, dim=-1)
        elif name == "a":
            tensor = -normalize(tensor, dim=-1)
        elif name == "b":  # what a model writes in place of what it removed: as much at most
            tensor = -found[-1].to("cpu", tensor.dtype) * torch.sigmoid(tensor)
        elif name in ("r", "k", "B", "C"):
            tensor = tensor / math.sqrt(tensor.shape[-1])
        found.append(tensor.to(input_dtype(spec, name)).to(device))
    return found


def recurrent_state(spec: LayerSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return states (…, as the form says) that earlier tokens may have left, in float32."""
    state = torch.randn(shape, generator=generator) * 0.5
    if spec.kind is AttentionKind.PHI_LINEAR:  # the last column sums up weights, none negative
        state[..., -1] = state[..., -1].abs() + 1.0
    return state


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
