"""Launches a kernel's compiled variant without asking Triton again which one it is.

Triton's own launch binds and classifies some forty arguments each time, 30 µs of host time on the
machine where it was measured; a decode step is shorter than that on the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

Key = tuple[Any, ...]


class Launcher:
    """One kernel's compiled variants, by everything that Triton specialises on.

    Arguments go by position: tensors, floats, integers, free integers, constants. Integers are part
    of the key, since Triton specialises on 1 and on multiples of 16; so are the pointers'
    alignments and the device. Free integers change from step to step (a block table's width): the
    kernel declares them `do_not_specialize`.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.variants: dict[Key, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        floats: tuple[float, ...],
        ints: tuple[int, ...],
        free: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        aligned = 0
        for tensor in tensors:
            aligned |= tensor.data_ptr()
        which = 0 if not aligned & 15 else tuple(t.data_ptr() & 15 for t in tensors)
        dtypes = tuple([t.dtype for t in tensors])
        key: Key = (ints, constants, dtypes, which, tensors[0].device, *options.values())
        variant = self.variants.get(key)
        if variant is None:
            variant = self.kernel[grid](*tensors, *floats, *ints, *free, *constants, **options)
            if hasattr(variant, "__getitem__"):  # the interpreter compiles nothing
                self.variants[key] = variant
            return
        variant[grid](*tensors, *floats, *ints, *free, *constants)
