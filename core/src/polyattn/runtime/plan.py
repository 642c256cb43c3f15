"""What does a step consist of? Plans are values: calls of backends and how their results combine."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import blocks_of_table

if TYPE_CHECKING:
    from polyattn.runtime.cache.kv_cache import KVCache
    from polyattn.runtime.group import LayerGroup

Rows = slice | Tensor | None
"""Which of the step's tokens a call is for: all (None), neighbours (a slice), or these (int64)."""


class Plan:
    """What one backend needs for one step. A backend derives its own; `batch` is the call's."""

    __slots__ = ("batch",)

    def __init__(self, batch: Batch):
        self.batch = batch

    @property
    def detail(self) -> str:
        """What `StepPlan.explain` says of the call beside its backend's name; "" for nothing."""
        return ""


@dataclass(frozen=True)
class StorePlan:
    """Where a step's keys and values go: `slots` int64 (num_tokens,), -1 skips."""

    slots: Tensor


class Call:
    """One backend's part of a step: which tokens, in which blocks, and its own plan."""

    __slots__ = ("backend", "block_size", "name", "phase", "plan", "rows", "saved_bytes")

    def __init__(
        self,
        phase: str,
        name: str,
        backend: Any,
        plan: Any,
        rows: Rows,
        block_size: int | None = None,
        saved_bytes: int = 0,
    ):
        self.phase, self.name, self.backend = phase, name, backend
        self.plan, self.rows = plan, rows
        # Of the blocks that it walks, where they are smaller than the cache's.
        self.block_size = block_size
        # Of the cache, by reading once what rows share.
        self.saved_bytes = saved_bytes

    def view(self, cache: KVCache | None) -> KVCache | None:
        """Return a layer's cache in the blocks that the backend walks."""
        if cache is None or self.block_size is None:
            return cache
        return cache.in_blocks_of(self.block_size)[0]

    def __repr__(self) -> str:
        return f"<Call: {self.phase} by {self.name}, {self.plan.batch!r}>"


UNKNOWN = 1 << 32
_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, StepPlan] = weakref.WeakValueDictionary()


class StepPlan(ABC):
    """A step of one group: made once, run by each of its layers. Any number may be alive at once.

    `handle` int64 () on the CPU: the number by which a compiled graph finds the plan, a tensor so
    that another step is no other graph.
    """

    def __init__(self, group: LayerGroup, batch: Batch):
        self.group, self.batch = group, batch
        number = next(_numbers)
        _alive[number] = self
        self.handle = torch.tensor(number)
        # The cache must have as many blocks; a table that only the device has isn't read.
        table = batch.block_table
        on_host = table is not None and table.device.type == "cpu"
        # A captured step's plan is refilled with other steps than its batch says.
        refilled = group.spec.graph_capture or group.spec.length_bounds
        self._num_blocks = UNKNOWN if on_host and not refilled else 0

    @property
    @abstractmethod
    def calls(self) -> tuple[Call, ...]:
        """The backends' parts, in the order in which they run."""

    def check_blocks(self, cache: KVCache | None) -> None:
        """Check that what a step's layers read of a block table on the host lies in their cache.

        Its entries are read once a step. Raises `BatchError`.
        """
        if cache is not None and self._num_blocks > cache.num_blocks:
            self._num_blocks = blocks_of_table(self.group.spec, self.batch, cache)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'; '.join(self.explain().splitlines())}>"

    def explain(self) -> str:
        """Return who runs which of the step's sequences, a line each.

        Of decodes it says which shared prefixes are read once, or why none is.
        """
        lines = []
        for call in self.calls:
            batch, detail = call.plan.batch, call.plan.detail
            lines.append(
                f"{call.phase}: {batch.num_seqs} sequences, {batch.num_tokens} query tokens, up to "
                f"{batch.max_seq_len} keys: {call.name}{f' ({detail})' if detail else ''}"
                f"{self.group.planner.note(self, call)}"
            )
        return "\n".join(lines)


def plan_of(handle: Tensor) -> StepPlan | None:
    """Return the plan behind a handle, None where it is gone."""
    return _alive.get(int(handle))
