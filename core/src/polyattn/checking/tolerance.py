"""How close is right? The one table of tolerances, and the error they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class Tolerance:
    """`output`: see `output_error`; `lse`: largest absolute difference, natural logarithm."""

    output: float
    lse: float


TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(1e-12, 5e-6),
    "float32": Tolerance(2e-5, 1e-4),
    "bfloat16": Tolerance(1.5e-2, 4e-3),
    "float16": Tolerance(3e-3, 3e-3),
}
"""By the layer's dtype. The inputs, a quantised cache included, are what the reference reads too,
so only the backend's own rounding counts: half a unit in the last place of bf16 is 3.9e-3, of
fp16 4.9e-4, and a kernel rounds the weights and the output. The LSE is float32 by contract, whatever
the dtype."""


FP8_COMPUTE = Tolerance(1e-1, 1e-1)
"""Where queries and weights are rounded to e4m3 too: half a unit in its last place is 6.25e-2. The
query's rounding moves a logit, the weight's the output, and the two add up in the worst row."""


def tolerance_of(spec: LayerSpec) -> Tolerance:
    """Return what a layer's results are held to."""
    return FP8_COMPUTE if spec.fp8_compute else TOLERANCES[spec.dtype]


def output_error(out: Tensor, reference: Tensor) -> float:
    """Return the largest relative error of any (token, head) row, `|out - ref| / |ref|` in L2.

    Rows whose reference is smaller than a hundredth of the largest are measured against that, so
    that cancellation to almost nothing doesn't count. Infinite where `out` isn't finite.
    """
    if reference.numel() == 0:
        return 0.0
    out, reference = out.detach().to("cpu", torch.float64), reference.to("cpu", torch.float64)
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    norms = reference.norm(dim=-1)
    floor = torch.clamp(norms.max() * 1e-2, min=1e-30)
    return float(((out - reference).norm(dim=-1) / torch.maximum(norms, floor)).max())


def lse_error(lse: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; infinite where only one of them is -inf."""
    if reference.numel() == 0:
        return 0.0
    lse, reference = lse.detach().to("cpu", torch.float64), reference.to("cpu", torch.float64)
    empty = reference == -torch.inf
    if bool(torch.isnan(lse).any()) or not torch.equal(lse == -torch.inf, empty):
        return float("inf")
    return float((lse - reference)[~empty].abs().max()) if bool((~empty).any()) else 0.0
