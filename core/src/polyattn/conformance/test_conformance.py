"""The suite: one test, which runs the cases that the backend's claims imply."""

from __future__ import annotations

from collections.abc import Callable

from polyattn.conformance.case import Case


def test_case(case: Case, run: Callable[[Case], None]) -> None:
    """A claim holds, or an unclaimed feature is refused. `case.check` names the function."""
    run(case)


def test_claims_are_tested(conformance_cases: list[Case], conformance_lacks: str) -> None:
    """A backend must claim something that this device can test."""
    numeric = {"numeric", "latent", "recurrence", "store", "merge", "index"}
    assert [c for c in conformance_cases if c.check in numeric], (
        f"the backend claims nothing that this device can test; nearest is {conformance_lacks}"
    )
