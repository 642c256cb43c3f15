"""Random batches through every backend that a CPU runs, NaN and infinities beside sound requests.

10,000 of each backend in CI, 100,000 by hand: `python benchmarks/random_batches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from defined_flex import without_compiler
from liars import functions, latents, masks, recurrences, services, shapes, steps
from liars.declare import Plugin, info
from polyattn import discover, register, resolve_device, unregister
from polyattn.conformance.random_batches.compose import Composition, Requests
from polyattn.conformance.random_batches.run import random_batches
from polyattn.registry.capabilities import ANY_PLATFORM
from polyattn.registry.machine import availability

CPU = resolve_device("cpu")
BACKENDS = [
    name
    for name, info in discover().backends.items()
    if {"cpu", ANY_PLATFORM} & info.capabilities.platforms.keys()
    and availability(info, 60.0) is None
]
# What serves by name only is the reference itself: a hundred batches of it are enough.
OTHERS = [name for name in BACKENDS if not discover().backends[name].by_name_only]


@pytest.fixture
def flex_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of layers and shapes can't be compiled; the kit's cases run the compiled kernel."""
    without_compiler(monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("flex_as_defined")
@pytest.mark.parametrize("backend", OTHERS)
def test_ten_thousand(backend: str) -> None:
    tally = random_batches(discover().backends[backend], CPU, 0, 10_000)
    assert not tally.failed, "\n".join(tally.failures)
    assert tally.batches >= 10_000 and tally.layers >= 100 and tally.spoilt > 3_000


@pytest.mark.usefixtures("flex_as_defined")
@pytest.mark.parametrize("backend", BACKENDS)
def test_some(backend: str) -> None:
    tally = random_batches(discover().backends[backend], CPU, 1, 100)
    assert not tally.failed, "\n".join(tally.failures)
    assert tally.batches >= 100 and tally.spoilt


def test_a_seed_gives_the_same_batches() -> None:
    backend = discover().backends["TORCH_SDPA"]
    first, second = (random_batches(backend, CPU, 5, 100) for _ in range(2))
    assert first == second and first.worst > 0.0
    assert random_batches(backend, CPU, 6, 100).worst != first.worst


LIARS: list[type[Any]] = [
    masks.AlwaysCausal, masks.NothingIsNothingWritten, shapes.HeadsInTurn, shapes.LastBlockWhole,
    steps.NanInTheBatch, latents.LatentNan, latents.SparseNan, latents.IgnoresTheRope,
    recurrences.StatesTogether, recurrences.AlwaysFresh, recurrences.ClearsOtherSlots,
    services.StoresTheSkipped, services.ClearsTheBlock, services.LargestLse,
]  # fmt: skip


@pytest.fixture(scope="module")
def liars() -> Iterator[None]:
    register(Plugin(), "liars")
    yield
    unregister("liars")


@pytest.mark.usefixtures("liars")
@pytest.mark.parametrize("kind", LIARS, ids=[kind.__name__ for kind in LIARS])
def test_a_liar_is_counted(kind: type[Any]) -> None:
    tally = random_batches(discover().backends[info(kind).name], CPU, 2, 300)
    assert tally.failed and info(kind).name in tally.failures[0]


@pytest.mark.usefixtures("liars")
@pytest.mark.parametrize("kind", [functions.IgnoresTheVariant, functions.HeadOfTheGroup])
def test_a_liar_about_functions_is_counted(kind: type[Any]) -> None:
    tally = random_batches(discover().backends[info(kind).name], CPU, 3, 1500)
    assert tally.failed and info(kind).name in tally.failures[0]


def test_a_composition_is_of_its_pool() -> None:
    """Each token's source, slot and batch, told apart by hand."""
    pool = Requests.of([(1, 5), (3, 3), (1, 0), (0, 4)])
    made = Composition(pool, 200, np.random.default_rng(3))
    table, blocks = made.blocks(4)
    slots = made.slots(table, 4)
    assert len(set(slots.tolist())) == len(slots) and slots.min() >= 4 and slots.max() < 4 * blocks
    first = [0, 5, 8, 8]
    token = row = 0
    for seq, request in enumerate(made.request.tolist()):
        length, query = int(pool.lens[request]), int(pool.queries[request])
        for at in range(length):
            assert made.token_of[token + at] == first[request] + at
            assert slots[token + at] == table[seq, at // 4] * 4 + at % 4
        token, row = token + length, row + query
    assert (token, row) == (len(made.token_of), len(made.row_of))
    new, own = made.new_tokens()
    assert new.sum() == made.queries[~made.padding].sum()
    assert all(new[own[~np.repeat(made.padding, made.queries)]])
