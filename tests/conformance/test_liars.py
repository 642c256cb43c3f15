"""The kit catches liars: backends with one lie each, every one found by the checks that are meant to.

`liars/caught.json` names the case that catches each, which runs first: written by
`python tests/conformance/test_liars.py`. Where that case is gone or passes, all the others run.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from liars.declare import Plugin, classes, info
from liars.lasting import WrongAfter3000Calls
from polyattn import discover, register, resolve_device, unregister
from polyattn.conformance.case import Case
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.registry.variants import variants

DEVICE = resolve_device("cpu")
SEED = 20
LIARS = [kind for kind in classes() if kind.by]
OUT_OF_DATE = (AttributeError, NameError, TypeError)  # a lie about what is no longer there
HONEST = [kind for kind in classes() if not kind.by]
RECORD = Path(__file__).parent / "liars" / "caught.json"
CAUGHT: dict[str, str] = json.loads(RECORD.read_text())
QUICK = 12  # of so many liars one is tried without `-m slow`
OF_A_CASE = 2  # so many liars that the same case catches are tried in CI, the others in the sweep
TESTED = (
    "TORCH_SDPA", "TORCH_MLA", "TORCH_MLA_SPARSE", "TORCH_SCAN", "TORCH_STORE", "TORCH_MERGE",
    "NATIVE_ATTN", "NATIVE_MLA",
)  # fmt: skip
"""Backends whose whole kits other tests run, most of them the honest ones' own code."""
_derived: dict[tuple[Any, ...], list[Case]] = {}


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    """Register the liars. The first step of a process imports modules, which may change some settings."""
    register(Plugin(), "liars")
    honest = HONEST[0]
    run_case(cases_of(honest)[0], info(honest).name, DEVICE, SEED, budget=0.2)
    with patch.dict(os.environ):  # which a liar changes
        yield
    unregister("liars")


def cases_of(kind: type[Any]) -> list[Case]:
    """Return a liar's cases. They follow from its claims, which many liars share, and the variants."""
    backend = discover().backends[info(kind).name]
    known = id(backend.capabilities), *variants()
    if known not in _derived:
        _derived[known] = derive(backend, DEVICE)
    return _derived[known]


def first_failure(kind: type[Any], checks: tuple[str, ...], budget: float) -> str | None:
    """Return the id of the first case that finds something, None where none does."""
    for case in cases_of(kind):
        if {case.check, case.id} & {*checks}:
            try:
                run_case(case, info(kind).name, DEVICE, SEED, budget)
            except Exception as error:  # a backend that dies is caught as well
                getattr(kind, "undo", int)()
                if not kind.by or isinstance(error, OUT_OF_DATE):
                    raise AssertionError(f"{case.id}: {error}") from error
                return case.id
    return None


def marks(index: int, kind: type[Any]) -> list[pytest.MarkDecorator]:
    caught = CAUGHT.get(kind.__name__)
    if caught and [CAUGHT.get(k.__name__) for k in LIARS[:index]].count(caught) >= OF_A_CASE:
        return [pytest.mark.sweep]
    return [pytest.mark.slow] if index % QUICK or kind is WrongAfter3000Calls else []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__, marks=marks(index, kind))
        for index, kind in enumerate(LIARS)
    ],
)
def test_a_liar_is_caught(kind: type[Any]) -> None:
    recorded = CAUGHT.get(kind.__name__, "")
    meant = recorded.partition("-")[0] in kind.by or recorded in kind.by
    known = (recorded,) if meant else ()
    assert first_failure(kind, known, budget=30.0) or first_failure(kind, kind.by, budget=30.0), (
        f"{kind.__name__} passed every case of {', '.join(kind.by)}"
    )


@cache
def covered() -> set[Case]:
    """Return the cases of kits that other tests run."""
    return {case for name in TESTED for case in derive(discover().backends[name], DEVICE)}


def passes(kind: type[Any], cases: list[Case]) -> bool:
    return first_failure(kind, tuple(case.id for case in cases), budget=0.2) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", HONEST, ids=[kind.__name__ for kind in HONEST])
def test_the_honest_one_never(kind: type[Any]) -> None:
    """Each case that catches a liar passes, and one in three of those that no kit of `TESTED` has.

    The first honest one that has a case of this name runs it, and each whose module's liars it catches.
    """
    before = HONEST[: HONEST.index(kind)]
    known = {case for other in before for case in cases_of(other)}
    catching = {CAUGHT[liar.__name__] for liar in LIARS if liar.__name__ in CAUGHT}
    catching -= {case.id for case in known}
    here = {CAUGHT.get(liar.__name__) for liar in LIARS if liar.__module__ == kind.__module__}
    alone = {
        case
        for case in set(cases_of(kind)) - covered()
        if not zlib.crc32(case.id.encode()) % 3  # so that a new case moves no other
    }
    cases = [
        case
        for case in cases_of(kind)
        if case.id in here | catching or (case in alone and case not in known)
    ]
    assert cases and passes(kind, cases)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", HONEST, ids=[kind.__name__ for kind in HONEST])
def test_the_honest_one_passes_its_whole_kit(kind: type[Any]) -> None:
    assert passes(kind, cases_of(kind))


def test_there_are_enough_liars() -> None:
    assert len(LIARS) >= 200
    families = {kind.__module__.rpartition(".")[2] for kind in LIARS}
    assert families == {
        "masks", "shapes", "steps", "latents", "recurrences", "services", "rotations",
        "functions", "prefixes", "captures", "sizes", "lasting",
        "variances", "unseen", "indexers",
    }  # fmt: skip


if __name__ == "__main__":
    register(Plugin(), "liars")
    for liar in LIARS:
        if case := first_failure(liar, liar.by, budget=30.0):
            CAUGHT[liar.__name__] = case
            RECORD.write_text(json.dumps(CAUGHT, indent=1, sort_keys=True) + "\n")
