"""Pytest plugin: an interpreted kernel reads and writes only in the tensors that its launch has.

    TRITON_INTERPRET=1 python -m pytest -p tests.plugins.triton.bounds --pyargs polyattn.conformance \
        --polyattn-backend TRITON_MLA --polyattn-device cpu

A kernel of Triton's reads any address that it forms, and what a mask hides changes no result: the kit
can't tell. A tensor ends here where its storage does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

ACCESSES = {
    "create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3),
}  # fmt: skip
"""Methods, and which arguments are the addresses and the mask."""

SMALL, LAST = 1 << 24, np.iinfo(np.int64).max
"""What no address is below (some heaps begin below 4 GiB), and the end of what has no known end."""


class Buffers:
    """The storages that a launch was given: where they begin and end."""

    def __init__(self, arguments: tuple[Any, ...]):
        tensors = flat(arguments)
        storages = [x.untyped_storage() for x in tensors]
        spans = {s.data_ptr(): s.data_ptr() + s.nbytes() for s in storages}
        for addresses in (x for x in tensors if x.dtype == torch.int64 and x.numel() < 100):
            # Where a tensor holds addresses, nothing says where what lies there ends.
            spans |= {at: LAST for at in addresses.flatten().tolist() if at > SMALL} | spans
        self.begins, self.ends = np.array(sorted(spans.items()), np.int64).reshape(-1, 2).T

    def check(self, pointers: TensorHandle, mask: TensorHandle) -> None:
        """Raise where a place that the mask lets through lies outside."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        chosen = np.broadcast_to(np.asarray(mask.data, bool), pointers.data.shape)
        first = pointers.data[chosen].astype(np.int64)
        buffer = self.begins.searchsorted(first, "right") - 1
        beyond = np.flatnonzero((buffer < 0) | (first > self.ends[buffer] - size))
        if len(beyond):
            at, of = int(first[beyond[0]]), int(buffer[beyond[0]])
            raise IndexError(
                f"an access of {size} bytes at {at} lies {at - int(self.ends[of])} bytes behind the end "
                f"of tensor {of} of the launch's {len(self.ends)}"
            )


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [x for each in value for x in flat(each)] if isinstance(value, tuple) else []


def pytest_configure() -> None:
    """Check from here on."""
    launched: Any = GridExecutor._init_args_hst
    current: list[Buffers] = []

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = launched(self, args, kwargs)
        current[:] = [Buffers((tuple(on_host[0]), on_host[1]))]
        return on_host

    GridExecutor._init_args_hst = arguments
    for name, places in ACCESSES.items():
        setattr(
            InterpreterBuilder, name, checked(getattr(InterpreterBuilder, name), places, current)
        )


def checked(access: Any, places: tuple[int, int], current: list[Buffers]) -> Any:
    def of_builder(self: Any, *arguments: Any) -> Any:
        current[0].check(*(arguments[place] for place in places))
        return access(self, *arguments)

    return of_builder
