"""torch tensors as JAX arrays and back, by DLPack, without copying where both share a device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

FP8: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
}
"""DLPack carries no fp8 between these two: such a tensor travels as bytes and is read as fp8."""


def to_jax(tensor: Tensor) -> Any:
    """Return a JAX array over the same memory.

    The array must not outlive the next write to the tensor: JAX takes arrays for immutable.
    """
    if tensor.dtype in FP8:
        raw = jax.dlpack.from_dlpack(tensor.view(torch.uint8))
        return jax.lax.bitcast_convert_type(raw, FP8[tensor.dtype])
    return jax.dlpack.from_dlpack(tensor.detach())


def to_torch(array: Any) -> Tensor:
    """Return a torch tensor over the same memory, once the array is computed."""
    return torch.from_dlpack(array)
