"""What are lengths in tensors on the host? A copy, stored on the tensor until it changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyattn.errors import BatchError, shown
from polyattn.runtime.inputs import capturing

T = TypeVar("T")


def stored(
    tensor: Tensor, name: str, values: bool, state: object, make: Callable[..., T], *args: Any
) -> T:
    """Return what `make` made of a tensor in this state. The tensor keeps it as an attribute, so it
    must not hold the tensor.

    `values`: `make` reads the tensor's numbers, so it runs again where they may have changed. A tensor
    of `torch.inference_mode` counts no changes, and none counts what NumPy writes to the same memory:
    so the numbers themselves tell for lengths and block tables on the host, and their hash for larger
    tensors that share memory. `make(*args)` makes it.
    """
    version: object = None
    if values:
        if tensor.is_cpu and tensor.dim() == 1:
            version = tensor.tolist()
        elif tensor.is_inference():
            return make(*args)
        elif tensor.is_cpu and tensor.dim() == 2:
            version = tensor.numpy().tobytes()
        elif tensor.is_cpu and tensor.dim() and not tensor.untyped_storage().resizable():
            version = hash(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        else:
            version = tensor._version
    known: tuple[object, object, T] | None = getattr(tensor, name, None)
    if known is None or known[0] != version or known[1] != state:
        known = version, state, make(*args)
        setattr(tensor, name, known)
    return known[2]


def values_of(tensor: Tensor) -> list[int]:
    """Return a tensor's integers on the host. A tensor is copied again only after it has changed.

    On a GPU torch counts what its operators write, not what other kernels and replayed graphs do.

    Args:
        tensor: integers (values,), on any device.

    Raises:
        BatchError: it is no tensor of integers, or a graph is being captured.

    Examples:
        >>> values_of(torch.tensor([3, 1]))
        [3, 1]

    """
    _check(tensor)
    if tensor.is_cpu:
        return _integers(tensor)
    return stored(tensor, "_polyattn_host", True, None, _integers, tensor)


def lens_between(cumulative: Tensor, gap: bool = False) -> tuple[int, ...]:
    """Return the lengths between cumulative starts, on the host, copied as `values_of` does it.

    Args:
        cumulative: integers (num_seqs + 1,), where each sequence starts, and where the last one ends.
        gap: whether something may lie before the first sequence.

    Raises:
        BatchError: it is no tensor of integers, the first start isn't 0 and `gap` isn't set, or a graph
            is being captured.

    Examples:
        >>> lens_between(torch.tensor([0, 5, 6]))
        (5, 1)

    """
    _check(cumulative)
    return stored(cumulative, "_polyattn_lens", True, gap, _differences, cumulative, gap)


def _differences(cumulative: Tensor, gap: bool) -> tuple[int, ...]:
    starts = values_of(cumulative)
    if not gap and starts[0] != 0:
        raise BatchError(f"cumulative lengths begin with {starts[0]}; they must begin with 0")
    return tuple([b - a for a, b in pairwise(starts)])


def _check(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise BatchError(f"lengths are {shown(tensor)}; they must be a tensor of integers")
    if capturing(tensor):  # known values, too: a replay would go on with them, whatever it holds
        raise BatchError(
            "this call reads lengths on the host, and a graph is being captured; run it outside "
            "the capture, or use the call whose lengths stay on the device"
        )


def _integers(tensor: Tensor) -> list[int]:
    if tensor.dtype.is_floating_point:
        raise BatchError(f"lengths are {tensor.dtype}; they must be integers: int32")
    return tensor.tolist()
