"""Which group serves a caller that keeps nothing between calls? One for each way of calling."""

from __future__ import annotations

import threading
import weakref
from functools import lru_cache
from typing import Any

import torch

from polyattn.api import select
from polyattn.registry.discovery import generation
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.workspaces import Workspaces
from polyattn.settings import Settings, current
from polyattn.spec.layer import LayerSpec


def group_for(device: torch.device, backend: str | None = None, **fields: Any) -> LayerGroup:
    """Return the group that serves a layer, for a caller that keeps nothing between calls.

    The same arguments get the same group. Each thread, and on CUDA each stream, has groups of its own,
    which share workspaces.

    Args:
        device: where the tensors are.
        backend: the backend that must serve, by name; None: the selection decides.
        fields: the fields of `LayerSpec`; `dtype` is torch's.

    Returns:
        The group.

    Raises:
        SpecError, SelectionError: as `select`.

    Examples:
        >>> group = group_for(torch.device("cpu"), num_heads=4, head_size=64, dtype=torch.float32)
        >>> group is group_for(torch.device("cpu"), num_heads=4, head_size=64, dtype=torch.float32)
        True

    """
    return _group(current(), generation(), place_of(device), device, backend, **fields)


def place_of(device: torch.device) -> Any:
    """Return the key of what may share workspaces: a thread, and on CUDA its stream.

    A capture shares those of the thread's last call before, because a graph's own memory is written
    only when it is replayed, too late for what a kernel expects to find there.
    """
    thread = threading.get_ident()
    if device.type != "cuda":
        return thread
    place = thread, _raw_stream(_index(device))
    if torch.cuda.is_current_stream_capturing():
        return _before_capture.get((thread, device), place)
    _before_capture[thread, device] = place
    return place


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _raw_stream(index: int) -> int:
    # What Inductor's own code asks: a torch.cuda.Stream is made at half of a small call's host time.
    return torch._C._cuda_getCurrentRawStream(index)


_before_capture: dict[Any, Any] = {}
_workspaces: weakref.WeakValueDictionary[Any, Workspaces] = weakref.WeakValueDictionary()
"""By place, for as long as a group there has them."""


@lru_cache(maxsize=1024)
def _group(
    settings: Settings, plugins: int, place: Any, device: torch.device, backend: str | None,
    **fields: Any,
) -> LayerGroup:  # fmt: skip
    dtype = str(fields.pop("dtype")).removeprefix("torch.")
    spec = LayerSpec(dtype=dtype, **fields)
    selection = select(spec, device, backend=backend, settings=settings)
    return LayerGroup(selection, workspaces=_workspaces.setdefault(place, Workspaces()))
