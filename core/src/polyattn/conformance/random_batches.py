"""Many small random batches of requests with known answers, some with NaN beside them.

A round is a layer of the claims and a pool of requests: one `Workload`, whose answers the reference
computes once. A request's result depends neither on its place nor on the other requests. So one answer
serves every batch of the request.

    pytest --pyargs polyattn.conformance --polyattn-backend NAME --polyattn-batches 10000 -k batches
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyattn.conformance.boundaries import draw_turning, numbers_of, turning
from polyattn.conformance.checks.services import STATES, merge_error, over_all
from polyattn.conformance.derive import derive
from polyattn.conformance.draws import (
    Draw,
    UnclaimedError,
    drawn,
    drawn_group,
    drawn_numbers,
    require,
)
from polyattn.conformance.harness.base import Harness
from polyattn.conformance.harness.services import MergeHarness, StoreHarness
from polyattn.device import Device
from polyattn.errors import PolyattnError
from polyattn.registry.info import BackendInfo
from polyattn.runtime.group import LayerGroup
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.workload.base import Workload
from polyattn.workload.compare import lse_error
from polyattn.workload.dice import Dice
from polyattn.workload.steps import pairs

ROUND = 50
"""Batches of one layer."""
WIDEST_ROW = 512
"""Most elements of a query that is drawn: the reference is slow."""
POOL = 32
"""Requests of a pool."""
TURNING = 4
"""Requests of a pool, its first, with a length at which the backend's own sources turn."""
SIZES = (1, 2, 2, 3, 3, 4, 5, 6, 9, 0)
"""How many requests a batch has, each as likely: 0 is a step without any."""
SPOILT = 0.15
"""How many of the requests hold NaN or infinities."""
MOST_PARTS = 6
"""States that are merged."""
MOST_MESSAGES = 20
"""How many failures are described; all are counted."""


@dataclass
class Tally:
    """The numbers of batches and layers that ran, and the failures.

    - `spoilt`: how many had a request with NaN or infinities beside sound ones.
    - `worst`: the largest error, as a part of the tolerance; `where` is its layer.
    """

    batches: int = 0
    layers: int = 0
    spoilt: int = 0
    worst: float = 0.0
    where: str = ""
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, who: str, what: str, error: float, allowed: float, where: str) -> None:
        """Count an error of a batch; `where` describes the batch."""
        if error / allowed > self.worst:
            self.worst, self.where = error / allowed, f"{what} of {who}"
        if not error <= allowed:
            self.fail(f"{what} of {who}: off by {error:.3g} (allowed {allowed:g}), {where}")

    def fail(self, message: str) -> None:
        """Count a failure. Only the first messages are stored."""
        self.failed += 1
        if len(self.failures) < MOST_MESSAGES:
            self.failures.append(message)


def random_batches(info: BackendInfo, device: Device, seed: int, count: int) -> Tally:
    """Run at least `count` random batches through a backend, as many for each layer it claims.

    A layer of the kit's cases says what the drawn ones are like: one for each role or kind, and for
    a store or a merge every one. The same seed gives the same batches. What is wrong is counted and
    described in the tally; a backend's own exception is raised.
    """
    rounds: dict[str, tuple[type[Any], Callable[..., None]]] = {
        "search": (Harness, _attending),
        "latent_search": (Harness, _attending),
        "recurrent_search": (Harness, _attending),
        "store": (StoreHarness, _storing),
        "merge": (MergeHarness, _merging),
    }
    cases = {c.spec: c for c in derive(info, device) if c.check in rounds}
    tally = Tally()
    for case in cases.values():
        build, run = rounds[case.check]
        harness = build(info.name, device, (seed + zlib.crc32(case.id.encode())) % 2**31)
        each = -(-count // len(cases))
        size = min(ROUND, each)

        def once(draw: Draw) -> None:
            run(draw, harness, case.spec, size, tally)  # noqa: B023
            tally.layers += 1

        drawn(harness, once, -(-each // size))
    return tally


def draw_lengths(
    dice: Dice, spec: LayerSpec, block: int, at: tuple[int, ...], count: int = POOL
) -> list[tuple[int, int]]:
    """Return (query, sequence) lengths: decodes, chunks, whole prompts, empty ones and padding rows.

    The first `TURNING` are `at` these lengths.
    """
    rows = draw_turning(dice, at, TURNING, dice.choice((140, 140, 140, 1100)))
    longest = min(3 * block + 3, 70)
    for _ in range(count - TURNING):
        query = dice.choice((1, 1, 1, 1, 2, 3, 5, 9, block + 1 if block < 17 else 7, 0))
        context = dice.choice([0, 1, *dice.integers(0, longest, 2)])
        rows.append((1, 0) if dice.integer(0, 25) == 0 else (query, query + context))
    if spec.recurrent is not None or spec.cached or spec.latent is not None:
        return rows
    if spec.role not in (Role.DECODER, Role.CROSS):
        first = [min(length, 140) for _, length in rows[:TURNING]]
        queries = [*first, *(query for query, _ in rows[TURNING:])]
        return [(query, query) for query in queries]  # the keys are the queries' own
    return [*rows[:TURNING], *((query, dice.integer(0, 40)) for query, _ in rows[TURNING:])]


def _drawn_batch(dice: Dice, lengths: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return a batch's requests, and which of them hold NaN."""
    requests = dice.integers(0, len(lengths), dice.choice(SIZES))
    spoilt = (dice.chance(len(requests)) < SPOILT).tolist()
    real = [i for i, n in enumerate(requests) if lengths[n] != (1, 0)]  # no padding row
    return requests, [i for i in real if spoilt[i]]


def _attending(draw: Draw, harness: Harness, base: LayerSpec, count: int, tally: Tally) -> None:
    group = drawn_group(draw, harness, base, with_variants=True)
    spec, form = group.spec, group.cache_format
    if base.latent is None and base.recurrent is None:
        require(spec.num_heads * spec.head_size <= WIDEST_ROW)
    numbers, dice = drawn_numbers(draw, spec), harness.dice
    layer = harness.layer(spec, group=group, **numbers)
    block = form.block_size if form else 16
    at = turning(numbers_of(harness.info.path), spec, block)
    lengths = draw_lengths(dice, spec, block, at)
    pool = harness.step(layer, lengths, **numbers).remembered()
    who = f"{harness.backend}, {spec}, seed {harness.seed}"
    spoils = not _mixes_tails(group)
    for _ in range(count):
        requests, spoilt = _drawn_batch(dice, lengths)
        spoilt = spoilt if spoils else []
        _one_batch(pool.picked(requests, spoilt), spoilt, who, tally)


def _mixes_tails(group: LayerGroup) -> bool:
    """Whether keys are passed whole to a kernel that lets NaN and infinities through."""
    spec, serving = group.spec, dict(group.selection.backends).values()
    whole = spec.latent is not None or not spec.cached
    return whole and any(info is not None and info.capabilities.mixes_tails for info in serving)


def _one_batch(step: Workload, spoilt: Sequence[int], who: str, tally: Tally) -> None:
    """Run a batch; count its errors where nothing was spoilt."""
    batch = step.batch
    sound = torch.ones(batch.num_tokens, dtype=torch.bool)
    for index in spoilt:
        sound[batch.starts[index] : batch.starts[index + 1]] = False
    tally.batches += 1
    tally.spoilt += bool(spoilt)
    step.remembered().run()
    where = f"(query, length) {pairs(batch)}, spoilt {list(spoilt)}"
    for what, error, allowed in step.errors(sound.nonzero().flatten()):
        tally.add(who, what, error, allowed, where)
    try:
        step.check_memory()
    except AssertionError as error:
        tally.fail(f"{who}: {error}; {where}")


def _storing(draw: Draw, harness: StoreHarness, base: LayerSpec, count: int, tally: Tally) -> None:
    layouts = harness.info.capabilities.layouts
    try:
        group, store = harness.store(base, draw.choice(layouts))
    except PolyattnError:  # such a block size in such a layout, say
        raise UnclaimedError from None
    who = f"{harness.backend}, {base}, seed {harness.seed}"
    for _ in range(count):
        new = harness.tokens(group, harness.dice.choice((0, 1, 2, 5, 16, 37)))
        spoilt = [i for i in range(len(new.slots)) if harness.dice.integer(0, 7) == 0]
        for tensor in (new.key,) if new.cache.value_in_key else (new.key, new.value):
            for row in spoilt:
                tensor[row] = (torch.nan, torch.inf)[harness.dice.integer(0, 2)]
        tally.batches += 1
        tally.spoilt += bool(spoilt)
        try:
            harness.check(store, new)
        except AssertionError as error:
            tally.fail(f"{who}: {error}; {len(new.slots)} tokens, spoilt {spoilt}")


def _merging(draw: Draw, harness: MergeHarness, base: LayerSpec, count: int, tally: Tally) -> None:
    merge, dice = harness.merge(base), harness.dice
    precise = torch.float64 if base.dtype == "float64" else torch.float32
    limit = STATES * (1.0 if precise is torch.float32 else 0.1)
    for _ in range(count):
        parts = harness.states(base, dice.integer(2, MOST_PARTS + 1), dice.integer(5, 45))
        who = f"{harness.backend}, {base}, {len(parts)} parts, seed {harness.seed}"
        expected, expected_lse = over_all(parts)
        sound = dice.chance(len(expected)) >= SPOILT
        for out, _ in parts:
            out[~sound] = torch.nan
        total, total_lse = (t.to(precise, copy=True) for t in parts[0])
        for out, lse in parts[1:]:
            merge.run(total, total_lse, out, lse.to(precise))
        where = f"{len(expected)} rows, {int((~sound).sum())} of them NaN"
        tally.batches += 1
        tally.spoilt += bool((~sound).any())
        error = merge_error(total[sound], expected[sound], expected_lse[sound], len(parts) - 1)
        tally.add(who, "output", error, limit, where)
        tally.add(who, "LSE", lse_error(total_lse[sound], expected_lse[sound]), 1e-4, where)
