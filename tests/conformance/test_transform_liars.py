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


def left_out(role: str) -> Changed:
    def changed(self: Transforms, name: str, given: Tensor, *where: Any) -> Tensor:
        return given if name == role else Transforms.changed(self, name, given, *where)

    return changed


def twice(self: Transforms, name: str, given: Tensor, *where: Any) -> Tensor:
    for _ in range(2 if name == "output" else 1):
        given = Transforms.changed(self, name, given, *where)
    return given


def counted_in_step(self: Transforms, name: str, given: Tensor, at: Places, inputs: Any) -> Tensor:
    own = torch.arange(len(at.place))[:, None, None]
    return Transforms.changed(self, name, given, Places(at.seq, own), inputs)


def first_sequence(self: Transforms, name: str, given: Tensor, at: Places, inputs: Any) -> Tensor:
    return Transforms.changed(self, name, given, Places(at.seq * 0, at.place), inputs)


LIES: dict[str, Changed] = {
    **{f"no_{role}": left_out(role) for role in ("query", "key", "value", "output")},
    "twice_the_output": twice,
    "counts_tokens_from_the_step": counted_in_step,
    "forgets_the_sequence": first_sequence,
}


def run(case: Case) -> None:
    run_case(case, "TORCH_SDPA", DEVICE, seed=20, budget=30.0)


def test_there_is_a_case_for_each_kind_of_layer() -> None:
    roles = {(case.spec.role.value, case.spec.cached) for case in cases()}
    assert {("decoder", True), ("decoder", False), ("encoder_only", False)} <= roles


def test_the_honest_one_passes() -> None:
    for case in cases():
        run(case)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lie = type(name, (Transforms,), {"changed": LIES[name]})

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
    assert caught, f"{name} passed every case of transforms"
