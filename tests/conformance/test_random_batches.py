"""Random batches through every backend that a CPU runs, NaN and infinities beside sound requests.

250 of each backend in CI, 10,000 in a sweep, 100,000 by `python benchmarks/random_batches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from defined_flex import without_compiler
from liars import functions, latents, masks, recurrences, services, shapes, steps
from liars.declare import Plugin, info
from polyattn import (
    Batch,
    LayerGroup,
    LayerSpec,
    RecurrentSpec,
    discover,
    register,
    resolve_device,
    row_formats,
    select,
    unregister,
)
from polyattn.conformance.case import Case
from polyattn.conformance.derive import derive
from polyattn.conformance.random_batches import Tally, random_batches
from polyattn.kernel import sizes_of
from polyattn.registry.capabilities import ANY_PLATFORM
from polyattn.registry.machine import availability
from polyattn.spec.row_format import known_formats
from polyattn.workload.base import workload

CPU = resolve_device("cpu")
BACKENDS = [
    name
    for name, info in discover().backends.items()
    if {"cpu", ANY_PLATFORM} & info.capabilities.platforms.keys()
    and "index" not in info.capabilities.phases  # whose steps hold index keys, in its kit alone
    and availability(info, 60.0) is None
]
# What serves by name only is the reference itself: fifty batches of it are enough.
BY_NAME = [name for name in BACKENDS if discover().backends[name].by_name_only]
OTHERS = [name for name in BACKENDS if name not in BY_NAME]


@pytest.fixture
def flex_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of layers and shapes can't be compiled; the kit's cases run the compiled kernel."""
    without_compiler(monkeypatch)


@pytest.mark.usefixtures("flex_as_defined")
@pytest.mark.parametrize(
    "count",
    [pytest.param(250, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("backend", OTHERS)
def test_thousands(backend: str, count: int) -> None:
    tally = random_batches(discover().backends[backend], CPU, 0, count)
    assert not tally.failed, "\n".join(tally.failures)
    assert tally.batches >= count and tally.layers >= count // 100 and tally.spoilt > count * 0.3


@pytest.mark.parametrize("backend", BY_NAME)
def test_some(backend: str) -> None:
    tally = random_batches(discover().backends[backend], CPU, 1, 50)
    assert not tally.failed, "\n".join(tally.failures)
    assert tally.batches >= 50 and tally.spoilt


def test_a_seed_gives_the_same_batches() -> None:
    backend = discover().backends["TORCH_SDPA"]
    first, second = (random_batches(backend, CPU, 5, 20) for _ in range(2))
    assert first == second and first.worst > 0.0
    assert random_batches(backend, CPU, 6, 20).worst != first.worst


def test_one_layer_alone_is_any() -> None:
    """Hypothesis begins with the simplest one, which on a GPU was drawn 439 times in 439 pieces."""
    backend = discover().backends["TORCH_SDPA"]
    said = [random_batches(backend, CPU, seed, 20).where for seed in range(4)]
    assert len({text.partition(" of ")[2].rpartition(", seed")[0] for text in said}) > 2


LIARS: list[type[Any]] = [
    masks.AlwaysCausal, masks.NothingIsNothingWritten, shapes.HeadsInTurn, shapes.LastBlockWhole,
    steps.NanInTheBatch, latents.LatentNan, latents.SparseNan, latents.IgnoresTheRope,
    recurrences.StatesTogether, recurrences.AlwaysFresh, recurrences.ClearsOtherSlots,
    services.StoresTheSkipped, services.ClearsTheBlock, services.LargestLse,
]  # fmt: skip


MANY = (services.StoresTheSkipped, services.ClearsTheBlock)
"""Stores, of whose many layers each has a batch."""


@contextmanager
def few_layers() -> Iterator[None]:
    """One in eight of a backend's many layers has batches: a liar lies about most of them."""

    def few(*of: Any) -> list[Case]:
        return [case for case in derive(*of) if case.check in ("search", "store")][::8]

    with patch("polyattn.conformance.random_batches.derive", few):
        yield


@pytest.fixture(scope="module")
def liars() -> Iterator[None]:
    register(Plugin(), "liars")
    yield
    unregister("liars")


def counted(kind: type[Any], seed: int, most: int) -> Tally:
    """Return the failures of a few batches of a liar's, or, where there are none, of `most`."""
    backend = discover().backends[info(kind).name]
    few = random_batches(backend, CPU, seed, most // 10)
    return few if few.failed else random_batches(backend, CPU, seed, most)


@pytest.mark.usefixtures("liars")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__, marks=[pytest.mark.slow] if kind in MANY else [])
        for kind in LIARS
    ],
)
def test_a_liar_is_counted(kind: type[Any]) -> None:
    with few_layers() if kind in MANY else nullcontext():
        tally = counted(kind, 3, 300)
    assert tally.failed and info(kind).name in tally.failures[0]


@pytest.mark.slow
@pytest.mark.usefixtures("liars")
@pytest.mark.parametrize("kind", [functions.IgnoresTheVariant, functions.HeadOfTheGroup])
def test_a_liar_about_functions_is_counted(kind: type[Any]) -> None:
    tally = counted(kind, 2, 1500)
    assert tally.failed and info(kind).name in tally.failures[0]


def test_a_picked_step_is_of_its_pool() -> None:
    """Each sequence brings its own tokens, wherever it lies; what was spoilt is not finite."""
    spec = LayerSpec(num_heads=2, head_size=8, dtype="float32", block_size=4)
    lengths = [(1, 5), (3, 3), (1, 0), (0, 4)]
    pool: Any = workload(LayerGroup(select(spec, "cpu", backend="TORCH_SDPA")), lengths, 3)
    requests = [3, 0, 1, 0, 2]
    step = pool.remembered().picked(requests)
    assert step.lengths == [lengths[i] for i in requests]
    tokens = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4]
    assert torch.equal(step.keys, pool.keys[tokens])
    assert torch.equal(step.query, pool.query[[0, 1, 2, 3, 0, 4]])
    slots = Batch.from_lens([4, 5, 3, 5], [4, 5, 3, 5], step.batch.block_table[:4], 4).slot_mapping
    assert slots is not None and len(set(slots.tolist())) == len(slots) and slots.min() >= 4
    assert torch.equal(step.held.key.flatten(0, 1)[slots], step.keys)
    step.run()
    assert next(step.errors())[1] < 1e-6
    spoilt = pool.picked(requests, [1])
    spoilt.run()
    assert not all(t.isfinite().all() for t in (spoilt.query, spoilt.keys, spoilt.values))
    others = torch.tensor([1, 2, 3, 4, 5])  # the first row is the spoilt one's
    assert next(spoilt.errors(others))[1] < 1e-6


@pytest.mark.parametrize("name", [n for n, f in known_formats().items() if sizes_of(f)[0] <= 128])
def test_a_spoilt_row_is_stored_as_nan_or_saturates(name: str) -> None:
    """Whatever a format's codes of NaN are: a build, or a device, may choose others."""
    format = row_formats()[name]
    size = 128 if format.row_bytes(128) else sizes_of(format)[0]
    spec = LayerSpec(
        num_heads=6, num_kv_heads=3, head_size=size, dtype="bfloat16", kv_cache_dtype=name,
        block_size=16,
    )  # fmt: skip
    lengths = [(1, 27), (5, 65), (2, 3), (7, 7)]
    group = LayerGroup(select(spec, "cpu", backend="NATIVE_ATTN"))
    pool: Any = workload(group, lengths, 3)
    pool.remembered()
    for _ in range(12):
        step = pool.picked([0, 1, 2, 3, 1], [1, 3])
        step.run()
        step.check_memory()


def test_picking_leaves_float64_states_as_they_start() -> None:
    """The states that a step must end with are no view of those that it starts with."""
    recurrent = RecurrentSpec(state_size=8)
    spec = LayerSpec(kind="linear", num_heads=2, head_size=8, dtype="float64", recurrent=recurrent)
    pool: Any = workload(LayerGroup(select(spec, "cpu", backend="TORCH_SCAN")), [(3, 9), (2, 2)], 3)
    step = pool.remembered().picked([0, 1])
    assert torch.equal(step.states.data[step.slots[0]], pool.starts[0].double())
