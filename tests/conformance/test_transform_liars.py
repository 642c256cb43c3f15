"""The kit catches lies about transforms: one for each of what they change, and of where that stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from polyattn import discover, resolve_device
from polyattn.conformance.case import Case
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.families.attention import planning
from polyattn.families.attention.transforms import Places, Transforms
from torch import Tensor

DEVICE = resolve_device("cpu")
Changed = Callable[..., Tensor]


def cases() -> list[Case]:
    found = derive(discover().backends["TORCH_SDPA"], DEVICE)
    return [case for case in found if "transforms" in case.label]


class Lie(Transforms):
    """A layer's transforms, which change something other than what they say."""

    left_out, twice = "", ""

    def changed(self, name: str, given: Tensor, places: Places, inputs: Any) -> Tensor:
        if name == self.left_out:
            return given
        found = super().changed(name, given, places, inputs)
        return super().changed(name, found, places, inputs) if name == self.twice else found


class NoQuery(Lie):
    left_out = "query"


class NoKey(Lie):
    left_out = "key"


class NoValue(Lie):
    left_out = "value"


class NoOutput(Lie):
    left_out = "output"


class TwiceTheOutput(Lie):
    twice = "output"


class CountsTokensFromTheStep(Lie):
    def changed(self, name: str, given: Tensor, places: Places, inputs: Any) -> Tensor:
        own = torch.arange(len(places.place))[:, None, None]
        return super().changed(name, given, Places(places.seq, own), inputs)


class ForgetsTheSequence(Lie):
    def changed(self, name: str, given: Tensor, places: Places, inputs: Any) -> Tensor:
        return super().changed(name, given, Places(places.seq * 0, places.place), inputs)


LIES = (
    NoQuery, NoKey, NoValue, NoOutput, TwiceTheOutput, CountsTokensFromTheStep, ForgetsTheSequence,
)  # fmt: skip


def run(case: Case) -> None:
    run_case(case, "TORCH_SDPA", DEVICE, seed=20, budget=30.0)


def test_there_is_a_case_for_each_kind_of_layer() -> None:
    roles = {(case.spec.role.value, case.spec.cached) for case in cases()}
    assert {("decoder", True), ("decoder", False), ("encoder_only", False)} <= roles


def test_the_honest_one_passes() -> None:
    for case in cases():
        run(case)


@pytest.mark.parametrize("lie", LIES, ids=[lie.__name__ for lie in LIES])
def test_a_lie_is_caught(lie: type[Lie], monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying:
        """What a layer is planned with; the reference's own transforms stay as they are."""

        @staticmethod
        def of(spec: Any) -> Transforms | None:
            found = Transforms.of(spec)
            return None if found is None else lie(found.functions)

    monkeypatch.setattr(planning, "Transforms", Lying)
    caught = 0
    for case in cases():
        try:
            run(case)
        except AssertionError:
            caught += 1
    assert caught, f"{lie.__name__} passed every case of transforms"
