"""Converts a kernel's output to the layer's dtype and strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from polyattn.kernel import STORAGE_DTYPES, Frame, write_output


def quantized_after(run: Callable[[Any, Any, Frame], None]) -> Callable[[Any, Any, Frame], None]:
    """Make a backend's `run` write a tensor in the layer's dtype, and quantise it afterwards."""

    @wraps(run)
    def through(self: Any, plan: Any, frame: Frame) -> None:
        if frame.out.dtype.itemsize > 1:
            run(self, plan, frame)
            return
        wide = torch.empty_like(frame.out, dtype=STORAGE_DTYPES[self.spec.dtype])
        run(self, plan, frame.but(out=wide))
        write_output(frame.out, wide, frame.params.out_scale)

    return through


def contiguous_after(run: Callable[[Any, Any, Frame], None]) -> Callable[[Any, Any, Frame], None]:
    """Give a kernel that takes only an address a contiguous output, and copy it to the layer's."""

    @wraps(run)
    def through(self: Any, plan: Any, frame: Frame) -> None:
        if frame.out.is_contiguous():
            run(self, plan, frame)
            return
        whole = torch.empty_like(frame.out, memory_format=torch.contiguous_format)
        run(self, plan, frame.but(out=whole))
        frame.out.copy_(whole)

    return through
