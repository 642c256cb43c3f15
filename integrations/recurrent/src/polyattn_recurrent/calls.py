"""What the functions share: gradients refused, gates, one number a head."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import PolyattnError
from torch import Tensor
from torch.nn.functional import silu, softplus


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Refuse a call that asks for gradients, of parameters too. Raises `PolyattnError`."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise PolyattnError(
            "gradients are asked for, and recurrences here are forward only; run under torch.no_grad(), "
            "or train after polyattn_recurrent.uninstall() and importing the model's file again"
        )


def per_head(name: str, tensor: Tensor, dims: int) -> Tensor:
    """Return what is one number for each head and was expanded over `dims` last sizes, not copied."""
    for _ in range(dims):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 0:
            raise PolyattnError(
                f"{name} {tuple(tensor.shape)} differs within a head; expand one number over its sizes"
            )
        tensor = tensor[..., 0]
    return tensor


def limited(dt: Tensor, bias: Tensor | None, softplus_: bool, limit: tuple[float, float]) -> Tensor:
    """Return Mamba's step size as it is in the end, float32, within `limit`."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return (softplus(dt) if softplus_ else dt).clamp(*limit)


def gated(out: Tensor, z: Tensor | None) -> Tensor:
    """Return the output times its gate."""
    return out if z is None else (out.float() * silu(z.float())).to(out.dtype)


def given(**params: Tensor | None) -> dict[str, Any]:
    """Return the parameters that there are."""
    return {name: tensor for name, tensor in params.items() if tensor is not None}
