"""How do many random batches run through a backend? In rounds: a layer of its claims, and fifty.

pytest --pyargs polyattn.conformance --polyattn-backend NAME --polyattn-batches 10000 -k batches
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from polyattn.conformance.case import Case
from polyattn.conformance.checks.search import (
    NUMBERS,
    attention_specs,
    drawn,
    drawn_group,
    latent_specs,
    recurrences,
)
from polyattn.conformance.derive import derive
from polyattn.conformance.harness.attention import AttentionHarness
from polyattn.conformance.harness.base import Harness
from polyattn.conformance.harness.mla import LatentHarness
from polyattn.conformance.harness.recurrent import RecurrentHarness
from polyattn.conformance.harness.services import MergeHarness, StoreHarness
from polyattn.conformance.random_batches.attention import attention_round
from polyattn.conformance.random_batches.functions import with_functions
from polyattn.conformance.random_batches.latent import latent_round
from polyattn.conformance.random_batches.recurrent import recurrent_round
from polyattn.conformance.random_batches.services import merge_round, store_round
from polyattn.conformance.random_batches.tally import Job, Tally
from polyattn.device import Device
from polyattn.errors import PolyattnError
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import MergeBackend
from polyattn.spec.layer import LayerSpec

ROUND = 50
"""Batches of one layer."""
CASE = 1000
"""Batches of one of the kit's cases."""
WIDEST_ROW = 512
"""Most elements of a query that is drawn: the reference is slow."""

Round = Callable[[st.DataObject, Any, Capabilities, LayerSpec, Job], None]


def _attention(
    data: st.DataObject, harness: AttentionHarness, caps: Capabilities, base: LayerSpec, job: Job
) -> None:
    spec = data.draw(attention_specs(caps, base))
    spec = data.draw(with_functions(discover().backend(harness.backend), spec))
    assume(spec.num_heads * spec.head_size <= WIDEST_ROW)
    layer = harness.layer(spec, group=drawn_group(data, harness, caps, spec))
    attention_round(layer, harness, job)


def _latent(
    data: st.DataObject, harness: LatentHarness, caps: Capabilities, base: LayerSpec, job: Job
) -> None:
    spec = data.draw(latent_specs(caps, base))
    sizes = caps.block_sizes.examples((1, 8, 16, 64)) or [caps.preferred_block_size]
    block = data.draw(st.sampled_from(sizes))
    layer = _built(lambda: harness.layer(spec.replace(block_size=block)))
    latent_round(layer, harness, job)


def _recurrent(
    data: st.DataObject, harness: RecurrentHarness, caps: Capabilities, base: LayerSpec, job: Job
) -> None:
    spec, numbers = data.draw(recurrences(caps, base)), data.draw(NUMBERS)
    layer = _built(lambda: harness.layer(spec, numbers))
    recurrent_round(layer, harness, job, numbers)


def _store(
    data: st.DataObject, harness: StoreHarness, caps: Capabilities, base: LayerSpec, job: Job
) -> None:
    layout = data.draw(st.sampled_from(caps.layouts))
    group, store = _built(lambda: harness.store(base, layout))
    store_round(group, store, harness, job)


def _merge(
    data: st.DataObject, harness: MergeHarness, caps: Capabilities, base: LayerSpec, job: Job
) -> None:
    group = harness.group(base)
    merge_round(group, group.backend("merge", MergeBackend), harness, job)


def _built(build: Callable[[], Any]) -> Any:
    try:
        return build()
    except PolyattnError:  # what is excluded, such a block size in such a layout, say
        assume(False)
        raise


ROUNDS: dict[str, tuple[type[Harness], Round]] = {
    "search": (AttentionHarness, _attention),
    "latent_search": (LatentHarness, _latent),
    "recurrent_search": (RecurrentHarness, _recurrent),
    "store": (StoreHarness, _store),
    "merge": (MergeHarness, _merge),
}
"""By the check whose cases say like which layers: what builds the inputs, and what runs a round."""


def random_batches(info: BackendInfo, device: Device, seed: int, count: int) -> Tally:
    """Run at least `count` random batches through a backend, as many for each layer it claims.

    A layer of the kit's cases says what the drawn ones are like: one for each role or kind, and for
    a store or a merge every one. The same seed gives the same batches. What is wrong is counted and
    described in the tally; a backend's own exception is raised.
    """
    cases = {c.spec: c for c in derive(info, device) if c.check in ROUNDS}
    tally = Tally()
    for case in cases.values():
        _run(case, info, device, seed, -(-count // len(cases)), tally)
    return tally


def _run(
    case: Case, info: BackendInfo, device: Device, seed: int, count: int, tally: Tally
) -> None:
    build, run_round = ROUNDS[case.check]
    harness = build(info.name, device, (seed + zlib.crc32(case.id.encode())) % 2**31)
    job = Job(np.random.default_rng(harness.seed), min(ROUND, count), tally)
    drawn(
        harness,
        lambda data: run_round(data, harness, info.capabilities, case.spec, job),
        -(-count // job.count),
    )


def batches(case: Case, harness: Harness) -> None:
    """A thousand random batches, composed of requests with known answers, NaN beside them."""
    info = discover().backend(harness.backend)
    tally = random_batches(info, harness.device, harness.seed, CASE)
    assert not tally.failed, f"{tally.failed} failures: " + "\n".join(tally.failures)
