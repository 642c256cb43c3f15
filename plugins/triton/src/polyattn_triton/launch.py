"""Launches a kernel's compiled variant without asking Triton again which one it is.

Triton's own launch binds and classifies some forty arguments each time and asks the driver about
every pointer, 30 µs of host time on the machine where it was measured; a decode step is shorter
than that on the device. A compiled variant's own launch tells the profilers' hooks, for half of its
host time: that is left out while nobody listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
from polyattn.device import arch_matches
from torch import Tensor
from triton import knobs
from triton.runtime import driver

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this Triton's `CompiledKernel.run` takes what is passed to it here."""
Key = tuple[Any, ...]


def launches_early(arch: str) -> bool:
    """Whether a kernel may be scheduled while the one before runs (Hopper's dependent launch)."""
    return arch_matches("sm_90+", arch)


def power(size: int) -> int:
    """Return the tile that holds `size`; a matrix product wants 16 at least."""
    return triton.next_power_of_2(max(16, size))


def merge_block(splits: int) -> int:
    """Return the merge kernel's tile for so many splits: few sizes, each compiles while serving."""
    return next(size for size in (8, 32, 64, 128) if splits <= size)


def merge_constants(
    heads: int, width: int, splits: int, sinks: bool, lse: bool, early: bool
) -> tuple[Any, ...]:
    """Return `merge_kernel`'s constants, in its order. `width`: of a head's output."""
    return (heads, width, power(width), merge_block(splits), sinks, lse, early)


def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; a few where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _listening() -> bool:
    """Whether a profiler is told of launches."""
    runtime = knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )


class Kept:
    """Tensors that stay the same from launch to launch, with their addresses."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors
        self.pointers = [tensor.data_ptr() for tensor in tensors]
        self.low = reduce(or_, self.pointers, 0)


NONE = Kept()


class Site:
    """A kernel with all that it is specialised on but the pointers' alignments.

    Whoever holds one vouches for the tensors' dtypes and device: they are looked at on the first
    call alone. Those kept come after the others.
    """

    def __init__(self, kernel: Any, ints: tuple[int, ...], constants: Key, options: dict[str, Any]):
        self.kernel, self.options = kernel, options
        self.ints, self.constants = ints, constants
        self.variants: dict[Any, Any] = {}
        self.device: int | None = None

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        floats: tuple[float, ...],
        free: tuple[int, ...],
        kept: Kept = NONE,
    ) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        low = kept.low
        for pointer in pointers:
            low |= pointer
        pointers += kept.pointers
        which = 0 if not low & 15 else tuple([pointer & 15 for pointer in pointers])
        variant = self.variants.get(which)
        if variant is not None:
            if not KNOWN or _listening():
                variant[grid](*pointers, *floats, *self.ints, *free, *self.constants)
                return
            variant.run(
                *grid, driver.active.get_current_stream(self.device), variant.function,
                variant.packed_metadata, None, None, None,
                *pointers, *floats, *self.ints, *free, *self.constants,
            )  # fmt: skip
            return
        variant = self.kernel[grid](
            *tensors, *kept.tensors, *floats, *self.ints, *free, *self.constants, **self.options
        )
        if hasattr(variant, "__getitem__"):  # the interpreter compiles nothing
            self.variants[which] = variant
            self.device = tensors[0].device.index


class Launcher:
    """One kernel's sites, by everything that Triton specialises on.

    Arguments go by position: tensors, floats, integers, free integers, constants. Integers are part
    of the key, since Triton specialises on 1 and on multiples of 16; so is the device. Free integers
    change from step to step (a block table's width): the kernel declares them `do_not_specialize`.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.sites: dict[Key, Site] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        floats: tuple[float, ...],
        ints: tuple[int, ...],
        free: tuple[int, ...],
        constants: Key,
        options: dict[str, Any],
    ) -> None:
        dtypes = tuple([tensor.dtype for tensor in tensors])
        key: Key = (ints, constants, dtypes, tensors[0].device, *options.values())
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = Site(self.kernel, ints, constants, options)
        site(grid, tensors, floats, free)
