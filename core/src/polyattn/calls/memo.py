"""What does a caller that keeps nothing find again at its next call? Its group, and its bound call.

Groups are few, cost the most and have what captured graphs read, so calls of many lengths don't make
them go. What was read from a tensor is stored on it (`host_copies.stored`), and goes with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from threading import Lock, get_ident
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from polyattn.api import select
from polyattn.errors import BatchError, finite
from polyattn.registry.discovery import generation
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.workspaces import Workspaces
from polyattn.settings import Settings, current_settings
from polyattn.spec.layer import LayerSpec

P = ParamSpec("P")
T = TypeVar("T")

MOST = 4096
"""Bound calls and plans that are remembered; the oldest one goes where there are more."""
memo: dict[Any, Any] = {}
"""Bound calls and plans, by all that they were made from."""
_lock = Lock()


def remember(key: Any, value: T) -> T:
    """Put a value into the memo, and return it."""
    with _lock:
        memo[key] = value
        if len(memo) > MOST:
            del memo[next(iter(memo))]
    return value


def remembered(make: Callable[P, T]) -> Callable[P, T]:
    """Return `make` with a memo: equal arguments return the same result."""

    @wraps(make)
    def find(*args: P.args, **named: P.kwargs) -> T:
        key = make, args, tuple(named.items())
        value = memo.get(key, _lock)  # which is no value
        return remember(key, make(*args, **named)) if value is _lock else value

    return find


def call_key(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    """Return the key of a bound call: all that decides how it attends to tensors like these.

    The shape of a contiguous tensor locates each element. Strides of dimensions of size 1 don't matter.
    `modes`: what records torch's operators, as `make_fx` does, misses kernels, so it's refused each time.
    """
    modes = torch._C._len_torch_dispatch_stack()
    place = place_of(query.device) if query.is_cuda else get_ident()
    return (
        options, current_settings(), generation(), place, modes, query.__class__, query.device,
        query.dtype,
        query.shape, query.is_contiguous() or query.stride(), key.__class__, key.device, key.dtype,
        key.shape, key.is_contiguous() or key.stride(), value.__class__, value.device, value.dtype,
        value.shape, value.is_contiguous() or value.stride(),
    )  # fmt: skip


def group_for(
    device: torch.device, backend: str | None = None, *, layout: str | None = None, **fields: Any
) -> LayerGroup:
    """Return the group that serves a layer, for a caller that keeps nothing between calls.

    The same arguments get the same group. Each thread, and on CUDA each stream, has groups of its own,
    which share workspaces.

    Args:
        device: where the tensors are.
        backend: the backend that must serve, by name; None: the selection decides.
        layout: of the caller's cache, `"NHD"` or `"HND"`; None: the selection decides.
        fields: the fields of `LayerSpec`; `dtype` is torch's, and a `scale` of None the default.

    Raises:
        BatchError: the scale is 0.
        SpecError, SelectionError: as `select`.

    Examples:
        >>> group = group_for(torch.device("cpu"), num_heads=4, head_size=64, dtype=torch.float32)
        >>> group is group_for(torch.device("cpu"), num_heads=4, head_size=64, dtype=torch.float32)
        True

    """
    settings = current_settings()
    if layout is not None and layout != settings.layout:
        settings = replace(settings, layout=layout)
    place = place_of(device)
    return group_of(_for_layer, settings, generation(), place, device, backend, **fields)


@lru_cache(maxsize=1024)
def group_of(make: Callable[..., LayerGroup], *args: Any, **fields: Any) -> LayerGroup:
    """Return the one group that a function makes of equal arguments."""
    return make(*args, **fields)


def place_of(device: torch.device) -> Any:
    """Return the key of calls that may share workspaces: a thread, and on CUDA its stream.

    A capture shares the workspaces of the thread's last call before it. A graph's own memory is written
    only when the graph is replayed, which is too late for what a kernel expects there.
    """
    thread = get_ident()
    if device.type != "cuda":
        return thread
    index = torch.cuda.current_device() if device.index is None else device.index
    # As Inductor's own code: making a torch.cuda.Stream takes half of a small call's host time.
    place = thread, torch._C._cuda_getCurrentRawStream(index)
    if torch.cuda.is_current_stream_capturing():
        return _before_capture.get((thread, device), place)
    _before_capture[thread, device] = place
    return place


_before_capture: dict[Any, Any] = {}
_workspaces: weakref.WeakValueDictionary[Any, Workspaces] = weakref.WeakValueDictionary()
"""By place, for as long as a group there has them."""


def _for_layer(
    settings: Settings,
    plugins: int,
    place: Any,
    device: torch.device,
    backend: str | None,
    **fields: Any,
) -> LayerGroup:
    for name in ("num_kv_heads", "v_head_size"):
        if fields.get(name) == 0:  # a spec's 0 is the default, a tensor's is none
            raise BatchError(
                f"key or value has {name}=0; a key needs a head, and a value an element"
            )
    dtype, scale = str(fields.pop("dtype")).removeprefix("torch."), fields.pop("scale", None)
    if finite(scale) and scale == 0:  # a spec's 0 is the default, which a call's None is
        raise BatchError("scale=0: every key weighs the same; leave it out for 1 / sqrt(head_size)")
    spec = LayerSpec(dtype=dtype, scale=0.0 if scale is None else scale, **fields)
    selection = select(spec, device, backend=backend, settings=settings)
    return LayerGroup(selection, workspaces=_workspaces.setdefault(place, Workspaces()))
