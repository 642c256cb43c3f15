"""Lies about a variant's functions and the masks that steps bring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.kernel import Frame
from polyattn_cpu import pointwise
from polyattn_cpu.gather import Span
from polyattn_cpu.sdpa import TorchSDPA
from torch import Tensor


class Functions(TorchSDPA):
    """TORCH_SDPA, honest but for what a liar changes of its `Pointwise` or its places."""

    by = ("functions",)

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lie()

    def lie(self) -> None:
        """Change what the functions are."""

    def places(self, places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the functions are called with instead."""
        return places

    def run(self, plan: Any, frame: Frame) -> None:
        liar, honest = self, pointwise.Places.of

        def of(self: Any, first: int, count: int, span: Span) -> tuple[Tensor, ...]:
            return liar.places(honest(self, first, count, span))

        pointwise.Places.of = of  # type: ignore[method-assign]
        try:
            super().run(plan, frame)
        finally:
            pointwise.Places.of = honest  # type: ignore[method-assign]


class IgnoresTheVariant(Functions):
    def lie(self) -> None:
        if self.pointwise is not None:
            self.pointwise = replace(self.pointwise, score_mod=None)


class IgnoresTheStepMask(Functions):
    def lie(self) -> None:
        if self.pointwise is not None and self.spec.mask == "custom":
            self.pointwise = replace(self.pointwise, mask_mods=())


class IgnoresBlocks(Functions):
    def lie(self) -> None:
        if self.pointwise is not None and self.spec.mask == "block_sparse":
            self.pointwise = replace(self.pointwise, mask_mods=())


class TakesASoftmaxAnyway(Functions):
    def lie(self) -> None:
        if self.pointwise is not None:
            self.pointwise = replace(self.pointwise, softmax=True)


class CountsQueriesFromTheStep(Functions):
    """q_idx is the token's place among the new ones, not in its sequence."""

    def places(self, places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        b, h, q, k = places
        return b, h, q - q.min(), k


class HeadOfTheGroup(Functions):
    """h is the KV head."""

    def places(self, places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        b, h, q, k = places
        return b, h // self.spec.gqa_ratio, q, k


class SequenceOfThePart(Functions):
    """b counts a phase's sequences, not the step's."""

    def run(self, plan: Any, frame: Frame) -> None:
        plan.batch = plan.batch.copy()
        plan.batch.__dict__["seq_ids"] = list(range(plan.batch.num_seqs))
        super().run(plan, frame)


class ForgetsItsOwnMask(Functions):
    """A step's mask replaces the causal one, instead of coming beside it."""

    def _by_functions(self, functions: Any, *args: Any) -> Any:
        if self.spec.mask is None:
            return super()._by_functions(functions, *args)
        *others, call = args
        return super()._by_functions(functions, *others, _Unmasked(call))


class _Unmasked:
    """A call whose spec has no mask of its own."""

    def __init__(self, call: Any):
        self._call, self.spec = call, call.spec.replace(causal=False, sliding_window=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
