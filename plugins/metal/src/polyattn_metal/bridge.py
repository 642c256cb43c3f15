"""torch's tensors as MLX's arrays, and back, by DLPack.

On Metal both name one buffer (MLX 0.32, github.com/ml-explore/mlx/pull/3531): nothing is copied, and each
side waits for the other's kernels. A tensor on the CPU, where tests run, is copied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Array = Any


def stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which MLX computes where tensors of this device lie."""
    chosen: AbstractContextManager[Any] = mx.stream(mx.cpu if device.type == "cpu" else mx.gpu)
    return chosen


def settle(device: torch.device) -> None:
    """Wait until torch has written what MLX is about to read."""
    if device.type == "mps":
        torch.mps.synchronize()


def to_mlx(tensor: Tensor) -> Array:
    """Return a tensor as an array."""
    return mx.from_dlpack(tensor.detach())


def write(tensor: Tensor, tokens: Any, array: Array) -> None:
    """Write an evaluated array to rows of a tensor."""
    tensor[tokens] = from_dlpack(array).to(tensor.dtype)
