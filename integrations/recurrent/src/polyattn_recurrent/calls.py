"""What the functions share: checks of their inputs, pools of states, one number a head."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import PolyattnError
from polyattn.host import asks_gradients
from torch import Tensor
from torch.nn.functional import softplus


def check_inputs(*tensors: Tensor | None) -> None:
    """Refuse complex numbers, and a call that asks for gradients, of parameters too.

    Raises `PolyattnError`.
    """
    for tensor in tensors:
        if tensor is not None and tensor.is_complex():
            raise PolyattnError(
                f"a tensor {tuple(tensor.shape)} is {tensor.dtype}, and recurrences here are real; run "
                "this model after polyattn_recurrent.uninstall() and importing its file again"
            )
    if asks_gradients(*tensors):
        raise PolyattnError(
            "gradients are asked for, and recurrences here are forward only; run under torch.no_grad(), "
            "or train after polyattn_recurrent.uninstall() and importing the model's file again"
        )


def is_per_head(tensor: Tensor | None, dims: int) -> bool:
    """Whether a tensor is one number a head, expanded over its `dims` last sizes and not copied."""
    return tensor is None or all(
        tensor.shape[-1 - i] == 1 or tensor.stride(-1 - i) == 0 for i in range(dims)
    )


def per_head(name: str, tensor: Tensor, dims: int) -> Tensor:
    """Return one number a head of a tensor expanded over its last `dims` sizes.

    Raises `PolyattnError`.
    """
    if not is_per_head(tensor, dims):
        raise PolyattnError(
            f"{name} {tuple(tensor.shape)} differs within a head; expand one number over its sizes"
        )
    for _ in range(dims):
        tensor = tensor[..., 0]
    return tensor


def limited(dt: Tensor, bias: Tensor | None, softplus_: bool, limit: tuple[float, float]) -> Tensor:
    """Return Mamba's step size as it is in the end, float32, within `limit`."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return (softplus(dt) if softplus_ else dt).clamp(*limit)


def widths(inputs: list[Tensor], z: Tensor | None) -> tuple[list[Tensor], bool]:
    """Return x, dt, B, C and `z` in dtypes that Mamba takes, and whether B and C alone are float32.

    `z` is left out where it is None. Nothing is rounded: what is not in `x`'s dtype becomes float32, and
    `x` is as wide as `z`.
    """
    x, dt, B, C = inputs
    gate = [] if z is None else [z.to(torch.promote_types(x.dtype, z.dtype))]
    x = x.to(gate[0].dtype) if gate else x
    wide = x.dtype in (torch.bfloat16, torch.float16) and not B.dtype == C.dtype == x.dtype
    dtype = torch.float32 if wide else x.dtype
    dt = dt if dt.dtype == x.dtype else dt.float()
    return [x, dt, B.to(dtype), C.to(dtype), *gate], wide


def states_of(pool: Tensor, slots: Tensor | None) -> Tensor:
    """Return each row's state. A padding row, whose slot is negative, gets any slot's."""
    return pool if slots is None else pool[slots.clamp(min=0)]


def leave(pool: Tensor, slots: Tensor | None, states: Tensor) -> None:
    """Write each row's state to its slot, and a padding row's nowhere. Never waits for the device."""
    if slots is None:
        pool.copy_(states)
    elif len(slots):
        live = slots >= 0
        # A padding row repeats what a live row writes. Without a live row, slot 0 keeps its state.
        rows = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
        at = slots[rows].clamp(min=0)
        pool[at] = torch.where(live.any(), states[rows].to(pool.dtype), pool[at])


def blank_padding(out: Tensor, slots: Tensor | None) -> Tensor:
    """Return the output (batch, …), 0 in padding rows."""
    if slots is None:
        return out
    return out.masked_fill((slots < 0).view(-1, *[1] * (out.dim() - 1)), 0)


def given(**params: Tensor | None) -> dict[str, Any]:
    """Return the parameters that there are."""
    return {name: tensor for name, tensor in params.items() if tensor is not None}
