"""What must a step cost at least? Operations and bytes, by any kernel."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.registry.info import load_object
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and bytes when each input is read once and the output written."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


def batch_cost(spec: LayerSpec, batch: Batch) -> Cost:
    """Return what one layer of `spec` must do for `batch`. A multiply-add counts as two."""
    cost = load_object(f"polyattn.families.{spec.kind.family}.roofline:step_cost")(spec, batch)
    assert isinstance(cost, Cost)
    return cost
