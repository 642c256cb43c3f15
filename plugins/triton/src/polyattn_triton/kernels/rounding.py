"""Rounds as torch's store does: IEEE division, saturation, halves to even."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rounded(x, scale, limit, INTEGER: tl.constexpr):
    """Divide by IEEE's rule, saturate, and round to integers with halves to even. NaN stays NaN."""
    x = tl.div_rn(x.to(tl.float32), scale)
    x = tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    if INTEGER:
        # At 1.5 * 2^23 float32's last place is 1, so the sum is rounded as every sum is.
        x = (x + 12582912.0) - 12582912.0
    return x


@triton.jit
def scale_of(number, SCALE, head, HEADS: tl.constexpr, SCALES: tl.constexpr):
    """A head's scale: a number, or a tensor's element; `SCALES` as in `softmax.logit_scale`."""
    if SCALES > 0:
        number = tl.load(SCALE + head * (SCALES - 1), mask=head < HEADS, other=1.0)
    return number


def limit_of(stored: torch.dtype, source: torch.dtype) -> float:
    """Return the largest number that a cache of `stored` takes, or 0 for unscaled dtypes."""
    if stored == source:
        return 0.0
    return 127.0 if stored == torch.int8 else torch.finfo(stored).max
