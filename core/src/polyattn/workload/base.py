"""What is one step of a layer? Its inputs, ready to run, its right answer, and its cost.

Verification, the conformance kit, `bench`, `tune` and the benchmarks run the same steps:

    work = workload(LayerGroup(select(spec)), [(1, 300), (37, 50)], seed)
    work.check()                                     # against the float64 reference
    layer(*work.inputs, work.plan, out=work.out)     # what is timed: `work.call`
    work.cost

Each family has a class of its own, `families/<family>/workload.py`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyattn.registry.info import load_object
from polyattn.runtime.cache.scales import output_dtype
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost, batch_cost
from polyattn.spec.layer import LayerSpec
from polyattn.workload.dice import Dice
from polyattn.workload.pages import spoiled, unchanged
from polyattn.workload.steps import Lengths

BATCH = ("block_table", "slot_mapping", "state_slots", "state_targets")
"""A step's tensors that aren't written."""


class Workload(ABC):
    """One step of one layer.

    - `layer`: what runs; `batch`, `lengths`: the step.
    - `inputs`: what `layer(*inputs, plan, out=out)` takes, by `names` attributes of their own.
    - `out`, `lse`: what `run` wrote.

    Context is in a cache, or in states, whose other places hold NaN.
    """

    names: ClassVar[tuple[str, ...]] = ()
    known: ClassVar[tuple[str, ...]] = ("plan", "expected", "held", "lse", "out")
    """Attributes that are computed once, and again for a changed copy."""
    layer: Any
    batch: Batch
    lengths: Lengths
    dice: Dice

    @abstractmethod
    def picked(self, requests: Sequence[int], spoilt: Sequence[int] = ()) -> Self:
        """Return a step of some of this one's sequences, elsewhere in another cache.

        A sequence's result depends neither on its place nor on the others, so it is known. `spoilt`:
        which of the new step's sequences hold NaN or infinities.
        """

    @property
    @abstractmethod
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of the layer before the plan."""

    @cached_property
    @abstractmethod
    def held(self) -> Any:
        """The expected cache after the step, or the states before it."""

    @cached_property
    @abstractmethod
    def expected(self) -> tuple[Tensor, Tensor | None]:
        """The float64 reference's output, and its LSE or its states; computed before the step runs."""

    @abstractmethod
    def run(self, plan: StepPlan | None = None) -> Tensor:
        """Run the step into a poisoned output, which is returned, and a poisoned LSE."""

    @abstractmethod
    def errors(self, rows: Tensor | None = None) -> Iterator[tuple[str, float, float]]:
        """Yield each result of the last run, its error and the allowed error; of some `rows`."""

    @abstractmethod
    def check_memory(self) -> None:
        """Assert that the cache, or the states, are right after a run."""

    @abstractmethod
    def compare(self, out: Tensor, lse: Tensor | None, label: str = "") -> None:
        """Assert that results are the reference's."""

    @property
    def group(self) -> LayerGroup:
        """The layer's group."""
        group: LayerGroup = self.layer.group
        return group

    @property
    def spec(self) -> LayerSpec:
        """The layer's spec."""
        return self.group.spec

    @property
    def device(self) -> torch.device:
        """The device of the inputs: the dice's."""
        return self.dice.device

    @cached_property
    def plan(self) -> StepPlan:
        """The step's plan."""
        return self.group.plan(self.batch)

    @property
    def cost(self) -> Cost:
        """The operations and bytes that the step costs at least."""
        return batch_cost(self.spec, self.batch)

    @property
    def who(self) -> str:
        """The backends that serve the layer."""
        return self.group.selection.decision.summary()

    def tensors(self) -> dict[str, Tensor]:
        """Return the step's input tensors by name."""
        named = {name: getattr(self, name) for name in self.names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def but(self, **changes: Any) -> Self:
        """Return the same step with other attributes, from which its right result follows."""
        other = copy.copy(self)
        for name in self.known:
            other.__dict__.pop(name, None)
        other.__dict__.update(changes)
        return other

    def remembered(self) -> Self:
        """Compute the step's right results and cache, before the step changes the cache."""
        _ = self.held, self.expected
        return self

    def call(self) -> Any:
        """Call the layer as a model does; `out` is written. What benchmarks time."""
        return self.layer(*self.inputs, self.plan, out=self.out)

    @cached_property
    def out(self) -> Tensor:
        """The tensor for the output; NaN at first."""
        shape = self.layer.output_shape(self.batch.num_tokens)
        return torch.full(shape, torch.nan, dtype=torch.float32, device=self.device).to(
            output_dtype(self.spec)
        )

    def error(self) -> float:
        """Run, and return the largest error of the output."""
        self.remembered().run()
        return next(self.errors())[1]

    def check(self, label: str = "", plan: StepPlan | None = None) -> Tensor:
        """Run, compare, and look at what must not change; returns the output.

        Raises `AssertionError`, which names the difference.
        """
        batch = {name: getattr(self.batch, name) for name in BATCH}
        read = self.tensors() | {n: t for n, t in batch.items() if t is not None}
        before = {name: tensor.clone() for name, tensor in read.items()}
        self.remembered().run(plan)
        for name, tensor in read.items():
            unchanged(name, tensor, before[name])
        self.check_memory()
        self.compare(self.out, self.__dict__.get("lse"), label)
        return self.out

    def spoil(self, how: str, names: Sequence[str], rows: slice) -> Self:
        """Return a copy in which rows of some inputs hold `numbers`, `nan` or infinities (`inf`)."""
        changes = {name: getattr(self, name).clone() for name in names}
        for tensor in changes.values():
            tensor[rows] = spoiled(tensor[rows], how)
        return self.but(**changes)


def family_of(spec: LayerSpec) -> Any:
    """Return the class of a kind of layer's workloads.

    `layer_of(group, dice, **how)` is a class method of it, and gives a layer with random parameters.
    """
    return load_object(f"polyattn.families.{spec.kind.family}.workload:WORKLOAD")


def workload(
    layer: Any,
    lengths: Lengths,
    seed: int | Dice = 0,
    *,
    step: dict[str, Any] | None = None,
    **how: Any,
) -> Workload:
    """Return a step of a layer, or of a new layer of a group.

    `lengths`: (query length, sequence length) of each sequence. `how`: how a new layer is built; `step`:
    how the step is drawn. Both are the family's own.
    """
    group = layer if isinstance(layer, LayerGroup) else layer.group
    dice = seed if isinstance(seed, Dice) else Dice(seed, group.torch_device)
    kind = family_of(group.spec)
    if layer is group:
        layer = kind.layer_of(group, dice, **how)
    made: Workload = kind(layer, lengths, dice, **(step or {}))
    return made


def picked_rows(lengths: Sequence[int], requests: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows of some requests, int64, one request after another."""
    starts = torch.tensor([0, *lengths], device="cpu").cumsum(0).tolist()
    rows = [torch.arange(starts[i], starts[i + 1], device="cpu") for i in requests]
    return (torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device="cpu")).to(device)


def spoil_requests(
    parts: Sequence[tuple[Tensor, Sequence[int]]], spoilt: Sequence[int], dice: Dice
) -> None:
    """Put NaN or infinities into one part of each spoilt request: into all of its rows, or one.

    `parts`: a tensor, and how many of its rows each request has.
    """
    for request in spoilt:
        tensor, counts = parts[dice.integer(0, len(parts))]
        first = sum(counts[:request])
        rows = tensor[first : first + counts[request]]
        if not len(rows):
            continue
        if dice.integer(0, 2):
            rows = rows[dice.integer(0, len(rows))]
        number = (torch.nan, torch.inf, -torch.inf)[dice.integer(0, 3)]
        rows.fill_(torch.nan if rows.dtype.itemsize == 1 else number)  # e4m3 has no infinities
