"""One step of a layer that attends: its tokens in a fresh cache, its results beside the reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import Scale
from polyattn.runtime.group import StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.selection.cache_format import CacheFormat
from polyattn.workload.base import Workload, picked_rows, spoil_requests
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.judge import judge
from polyattn.workload.pages import poison, same_cache
from polyattn.workload.steps import Lengths, lens_of, new_rows
from polyattn.workload.tolerance import tolerance_of


class AttendingWorkload(Workload):
    """A step of a layer that attends to keys, most often in a cache.

    - `query`: what has a row for each new token, as have `by_token` attributes.
    - `by_key`: attributes with a row for each of a sequence's entries.
    - `offset`: the number that all logits lie near.
    """

    by_token: ClassVar[tuple[str, ...]] = ("query",)
    by_key: tuple[str, ...]
    query: Tensor
    cache: KVCache | None
    held: Any
    offset = 0.0

    @property
    def chosen(self) -> tuple[Tensor | None, ...]:
        """The choice, of a layer that takes one."""
        return ()

    @property
    def scales(self) -> tuple[Scale, Scale]:
        """The scales of the stored numbers."""
        return self.layer.params.k_scale, self.layer.params.v_scale

    def exact(self, out: Tensor) -> Tensor:
        """Return the numbers that an output encodes."""
        return out

    def entries(self, lengths: Lengths) -> list[int]:
        """Return how many entries each sequence has."""
        return lens_of(lengths)[1]

    def run(self, plan: StepPlan | None = None) -> Tensor:
        self.__dict__.pop("out", None)
        self.lse = None
        if self.spec.needs_lse:
            self.lse = torch.full(
                self.out.shape[:2], torch.nan, dtype=torch.float32, device=self.device
            )
        *inputs, cache = self.inputs
        self.layer.run(plan or self.plan, (*inputs, *self.chosen), cache, self.out, self.lse)
        return self.out

    def errors(self, rows: Tensor | None = None) -> Iterator[tuple[str, float, float]]:
        rows = torch.arange(len(self.query), device="cpu") if rows is None else rows
        limit, at = tolerance_of(self.spec, self.offset), rows.to(self.device)
        actual = self.exact(self.out[at])
        yield "output", output_error(actual, self.expected[0][rows]), limit.output
        lse = self.expected[1]
        if self.lse is not None and lse is not None:
            yield "LSE", lse_error(self.lse[at], lse[rows]), limit.lse

    def check_memory(self) -> None:
        if self.cache is not None:
            same_cache(self.cache, self.held, self.batch.slot_mapping)

    def compare(self, out: Tensor, lse: Tensor | None, label: str = "") -> None:
        real = self.exact(out)
        beside = self.expected, label, self.offset, lambda: self.mistake(real)
        judge(self.who, self.spec, self.batch, real, lse, *beside)

    def mistake(self, out: Tensor) -> str:
        """Return what a wrong output would be right for, as a message goes on; `""`: unknown."""
        return ""

    def picked(self, requests: Sequence[int], spoilt: Sequence[int] = ()) -> Self:
        queries, _ = lens_of(self.lengths)
        host = picked_rows(queries, requests, torch.device("cpu"))
        rows = host.to(self.device)
        held = picked_rows(self.entries(self.lengths), requests, self.device)
        tokens = {name: getattr(self, name) for name in self.by_token}
        work = self.but(
            lengths=[self.lengths[i] for i in requests],
            **{name: None if tensor is None else tensor[rows] for name, tensor in tokens.items()},
            **{name: getattr(self, name)[held] for name in self.by_key},
            **self.others(requests),
        )
        queries, entries = lens_of(work.lengths)[0], self.entries(work.lengths)
        parts = [(work.query, queries), *((getattr(work, name), entries) for name in self.by_key)]
        spoil_requests(parts, spoilt, self.dice)
        work.lay()
        expected, lse = self.expected
        assert lse is not None
        work.expected = expected[host], lse[host]
        return work

    def others(self, requests: Sequence[int]) -> dict[str, Any]:
        """Return some requests' further attributes."""
        return {}

    @abstractmethod
    def lay(self) -> None:
        """Lay the tokens out in a fresh cache, or with gaps that hold NaN."""

    def table(
        self, form: CacheFormat, like: AttendingWorkload | None, spare: int = 1, first: int = 1
    ) -> tuple[Tensor, int]:
        """Draw a block table, or take another step's; returns the number of blocks, too."""
        lens = self.entries(self.lengths)
        drawn = self.dice.blocks(lens, form.block_size, spare, first=first)
        if like is None or like.cache is None or like.batch.block_table is None:
            return drawn
        return like.batch.block_table, like.cache.num_blocks

    def fresh(self, form: CacheFormat, table: Tensor, num_blocks: int) -> tuple[KVCache, Tensor]:
        """Return a poisoned cache, and the slots of all entries."""
        cache = KVCache.allocate(form, num_blocks, self.device)
        poison(cache)
        lens = self.entries(self.lengths)
        slots = Batch.from_lens(lens, lens, table, form.block_size).slot_mapping
        assert slots is not None
        return cache, slots

    def new(self, every: Tensor) -> Tensor:
        """Return the step's new tokens among all; zeros where padding rows alone are in it."""
        rows = new_rows(self.lengths).to(self.device)
        return every[rows] if len(every) else every.new_zeros(len(rows), *every.shape[1:])


class ChoosingWorkload(AttendingWorkload):
    """A step of a layer whose calls take a choice, or None.

    - `choice` int32 (num_tokens, ..., K): what each token attends to, -1 for none.
    """

    choice: Tensor | None
    cache: KVCache

    @property
    def chosen(self) -> tuple[Tensor | None, ...]:
        return (self.choice,)

    def call(self) -> Any:
        return self.layer(*self.inputs, self.plan, choice=self.choice, out=self.out)
