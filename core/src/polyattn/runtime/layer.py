"""What have layers of all families in common? A group, its plans, and a number for compiled graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyattn.errors import SpecError, flag
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import output_dtype
from polyattn.runtime.graphs import torch_compile
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import capturing, check_tensor
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_on_device
from polyattn.runtime.step.chosen_pages import check_ids
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


class Layer(nn.Module, ABC):
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

    @abstractmethod
    def output_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of the output.

        Args:
            tokens: the step's tokens.

        """

    @abstractmethod
    def run(
        self,
        step: Any,
        inputs: Sequence[Tensor | None],
        cache: Any,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Check the tensors and run the step: a compiled graph calls this. Writes `out` and `lse`.

        Args:
            step: the plan.
            inputs: the tensors that `forward` takes, in its order; the choice last, where it takes one.
            cache: the cache, or the states.
            out: `output_shape(num_tokens)`.
            lse: float32 (num_tokens, num_heads), or None.

        Raises:
            BatchError: a tensor has another shape, dtype or device.
            CacheError: the cache isn't of the group's form.

        """

    def _called(
        self,
        name: str,
        inputs: Sequence[Tensor | None],
        cache: Any,
        plan: StepPlan | Batch | None,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Make what the caller doesn't bring, and run. `name`: the first input's, which must be there."""
        step, first = self.group.plan_for(plan), inputs[0]
        check_tensor(name, first, self.group.torch_device)
        assert first is not None
        out, lse = self.outputs(first, step.batch.num_tokens, out)
        self.run(step, inputs, cache, out, lse)
        return out if lse is None else (out, lse)

    def outputs(
        self, first: Tensor, tokens: int, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a step's output, the caller's or a new one, and room for its LSE, if the layer has one.

        Args:
            first: the first input, of whose device they are.
            tokens: the step's tokens.
            out: the caller's output, or None.

        """
        shape = self.output_shape(tokens)
        if out is None:
            out = first.new_empty(shape, dtype=output_dtype(self.spec))
        lse = None
        if self.spec.needs_lse:
            lse = first.new_empty(shape[:2], dtype=torch.float32)
        return out, lse

    def _check_values(self, batch: Batch, cache: KVCache, choice: Tensor | None) -> None:
        """Check, where the layer does so, what costs a copy to the host. Raises `BatchError`."""
        if not self.checks or capturing(cache.key):
            return
        sparse = self.spec.sparse
        if sparse is None or sparse.tokens_per_entry == 1:
            check_on_device(batch, cache.num_blocks, cache.block_size)
        # A captured step's buffers may hold ids of no row.
        if sparse is not None and choice is not None and not batch.lens_are_bounds:
            check_ids(sparse, choice, cache)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = torch_compile.handle(self)

    def extra_repr(self) -> str:
        """Return the layer's description for `print(model)`."""
        return f"{self.spec}; {self.group.selection.decision.summary()}"
