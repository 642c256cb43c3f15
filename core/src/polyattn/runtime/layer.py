"""What have layers of all families in common? A group, its plans, and a number for compiled graphs."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from polyattn.errors import SpecError, flag
from polyattn.runtime.graphs import torch_compile
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.selection.selection import Selection
from polyattn.settings import current_settings
from polyattn.spec.layer import LayerSpec

NAMES = {
    "attention": "Attention",
    "mla": "LatentAttention",
    "recurrent": "Recurrent",
    "sparse": "SparseAttention",
}
"""The layer of each family."""


class Layer(nn.Module):
    """One layer on the selected backends; `family` is whose. Raises `SpecError` for another's spec.

    `group` and `checks` as `Attention` takes them; raises what `LayerGroup` raises, too.
    """

    family: ClassVar[str]

    def __init__(self, group: LayerGroup | Selection | LayerSpec, checks: bool | None):
        super().__init__()
        self.group = group if isinstance(group, LayerGroup) else LayerGroup(group)
        self.spec = self.group.spec
        needed = self.spec.kind.family
        if needed != self.family:
            raise SpecError(
                f"{self.spec} is no layer for {NAMES[self.family]}; use {NAMES[needed]}"
            )
        if checks is not None:
            flag("checks", checks)
        self.checks = current_settings().checks if checks is None else checks
        self._handle = torch_compile.handle(self)

    def plan(self, batch: Batch) -> StepPlan:
        """Return a step's plan for all layers of the group: what `forward` takes as `plan`.

        Args:
            batch: the step's sequences.

        Raises:
            BatchError: the batch doesn't fit the group's layers.

        """
        return self.group.plan(batch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = torch_compile.handle(self)

    def extra_repr(self) -> str:
        """Return the layer's description for `print(model)`."""
        return f"{self.spec}; {self.group.selection.decision.summary()}"
