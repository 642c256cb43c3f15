"""One step over a cache whose call may name the keys that each token attends to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.group import StepPlan
from polyattn.workload.base import Workload
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.judge import judge
from polyattn.workload.pages import same_cache
from polyattn.workload.tolerance import tolerance_of


class ChoosingWorkload(Workload):
    """A step of a layer whose `run` takes a choice, or None, after the cache.

    - `choice` int32 (num_tokens, ..., K): what each token attends to, -1 for none.
    """

    query: Tensor
    cache: KVCache
    held: Any
    choice: Tensor | None

    def run(self, plan: StepPlan | None = None) -> Tensor:
        self.__dict__.pop("out", None)
        self.lse = None
        if self.spec.needs_lse:
            self.lse = torch.full(self.out.shape[:2], torch.nan, device=self.device)
        self.layer.run(plan or self.plan, *self.inputs, self.choice, self.out, self.lse)
        return self.out

    def errors(self, rows: Tensor | None = None) -> Iterator[tuple[str, float, float]]:
        rows = torch.arange(len(self.query)) if rows is None else rows
        limit = tolerance_of(self.spec)
        at = rows.to(self.device)
        yield "output", output_error(self.out[at], self.expected[0][rows]), limit.output
        lse = self.expected[1]
        if self.lse is not None and lse is not None:
            yield "LSE", lse_error(self.lse[at], lse[rows]), limit.lse

    def check_memory(self) -> None:
        same_cache(self.cache, self.held, self.batch.slot_mapping)

    def compare(self, out: Tensor, lse: Tensor | None, label: str = "") -> None:
        judge(self.who, self.spec, self.batch, out, lse, self.expected, label)
