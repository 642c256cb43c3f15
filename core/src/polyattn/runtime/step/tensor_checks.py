"""Do a batch's tensors have the dtypes, the shapes and the device that kernels read? Not their values."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.errors import BatchError, shown
from polyattn.runtime.inputs import as_wide, check_is_tensor, same_device, torch_device


def device_of(device: torch.device | str | None, *tensors: Any) -> torch.device:
    """Return a device that a caller names, else the first tensor's, else the CPU. Raises `BatchError`."""
    if device is None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                return tensor.device
    return torch_device("cpu" if device is None else device)


def check_tensors(batch: Any) -> None:
    """Check a batch's tensors, their dtypes, shapes and devices; put numbers that lie apart side by side.

    Raises `BatchError`.
    """
    rows, device = len(batch.lens), batch.device
    for name, tensor, dtype, dims, count in (
        ("block_table", batch.block_table, torch.int32, 2, rows),
        ("slot_mapping", batch.slot_mapping, torch.int64, 1, batch.num_tokens),
        ("state_slots", batch.state_slots, torch.int64, 1, rows),
        ("state_targets", batch.state_targets, torch.int64, 0, rows),
    ):
        if tensor is None:
            continue
        if (
            tensor.__class__ is torch.Tensor
            and tensor.dtype is dtype
            and tensor.is_contiguous()
            and tensor.device == device
            and tensor.dim() == dims
            and tensor.shape[0] == count
        ):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(f"{name}={shown(tensor)} must be a tensor of {dtype}")
        dims = dims or min(max(tensor.dim(), 1), 2)
        shape = (count, None)[:dims]
        fits = tensor.dim() == dims and tensor.shape[0] == count
        if not (tensor.dtype == dtype or as_wide(tensor)) or not fits:
            free = "tokens" if name == "state_targets" else "max_blocks"
            wanted = ", ".join(free if n is None else str(n) for n in shape)
            raise BatchError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtype} of shape "
                f"({wanted})"
            )
        if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise BatchError(
                f"{name}'s columns are {tensor.stride(1)} apart; kernels need adjacent columns: "
                f"pass {name}.contiguous()"
            )
        if not same_device(tensor.device, batch.device):
            raise BatchError(f"{name} is on {tensor.device}, the batch on {batch.device}; move one")
        if name != "block_table" and not tensor.is_contiguous():
            setattr(batch, name, tensor.contiguous())  # kernels go by address from the first one on
    if batch.positions is not None:
        _check_shape_of_positions(batch)


def _check_shape_of_positions(batch: Any) -> None:
    positions = batch.positions
    check_is_tensor("positions", positions)
    whole = positions.dtype in (torch.int64, torch.int32)
    fits = positions.dim() in (1, 2) and positions.shape[-1] == batch.num_tokens
    if not whole or not fits:
        raise BatchError(
            f"positions is {positions.dtype} of shape {tuple(positions.shape)}; it must be torch.int64 "
            f"or torch.int32 of shape ({batch.num_tokens},), or (axes, {batch.num_tokens})"
        )
    if not same_device(positions.device, batch.device):
        raise BatchError(
            f"positions is on {positions.device}, the batch on {batch.device}; move one"
        )
