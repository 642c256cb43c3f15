"""Which function runs which check?"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from polyattn.conformance.case import Case
from polyattn.conformance.checks import (
    attention,
    captured,
    forests,
    index,
    invariance,
    lasting,
    mla,
    published,
    recurrent,
    search,
    services,
    sparse,
)
from polyattn.conformance.harness.base import Harness
from polyattn.conformance.harness.index import IndexHarness
from polyattn.conformance.harness.rotation import RotationHarness
from polyattn.conformance.harness.services import MergeHarness, StoreHarness
from polyattn.conformance.snapshot import runs_alone
from polyattn.device import Device
from polyattn.registry.discovery import discover
from polyattn.registry.info import load_object

Check = Callable[[Case, Any], None]

_ATTENTION: tuple[Check, ...] = (
    attention.numeric, attention.layout, attention.packed, attention.shared,
    attention.skipped, attention.stale, attention.out, attention.strided, attention.plans,
    attention.layers, attention.rescaled, attention.isolation, attention.deterministic,
    captured.graph, captured.reuse, captured.mixed_graph, captured.mixed_reuse, captured.bounds,
    attention.addressed, attention.context, search.search,
    invariance.regrouped, invariance.planned_alike, invariance.chunked, invariance.drafted,
    invariance.hits, invariance.given_alike, invariance.divided, invariance.specified,
    forests.forest, forests.forest_reuse, forests.forest_graph,
    published.published, published.masks, published.pairs, published.twins,
    lasting.strided_out, lasting.strided_heads, lasting.wide_table, lasting.far_blocks,
    lasting.many_calls, lasting.many_lengths, lasting.reassigned, lasting.loaded_later, lasting.process,
)  # fmt: skip
_LATENT: tuple[Check, ...] = (
    mla.latent, mla.latent_plans, mla.latent_shared, mla.latent_absorbed, mla.latent_isolation,
)  # fmt: skip
_RECURRENT: tuple[Check, ...] = (
    recurrent.recurrence, recurrent.pieces, recurrent.state_isolation, recurrent.state_targets,
    recurrent.rejected_drafts, recurrent.recurrent_out, recurrent.recurrent_strided,
    recurrent.recurrent_plans, recurrent.recurrent_graph, recurrent.recurrent_reuse,
    recurrent.recurrent_mixed_graph, recurrent.recurrent_mixed_reuse,
)  # fmt: skip
_SPARSE: tuple[Check, ...] = (
    sparse.sparse, sparse.sparse_plans, sparse.sparse_others, sparse.sparse_search,
)  # fmt: skip
_INDEX: tuple[Check, ...] = (index.index, index.index_ranked, index.index_regrouped)
_STORE: tuple[Check, ...] = (services.store, services.store_plans, services.store_ties)
_ROTATED: tuple[Check, ...] = (services.store_rotated, services.store_rotated_plans)
_MERGE: tuple[Check, ...] = (services.merge, services.merge_many)

CHECKS: dict[str, tuple[type[Harness], Check]] = {
    "refusal": (Harness, attention.refusal),
    "batches": (Harness, search.batches),
    **dict.fromkeys(("functions", "combined"), (Harness, attention.numeric)),
    **dict.fromkeys(("latent_search", "recurrent_search"), (Harness, search.search)),
    "latent_stale": (Harness, attention.stale),
    **{
        check.__name__: (Harness, check) for check in (*_ATTENTION, *_LATENT, *_RECURRENT, *_SPARSE)
    },
    **{check.__name__: (IndexHarness, check) for check in _INDEX},
    **{check.__name__: (StoreHarness, check) for check in _STORE},
    **{check.__name__: (RotationHarness, check) for check in _ROTATED},
    **{check.__name__: (MergeHarness, check) for check in _MERGE},
}
"""A check's name in `Case.check` and in test ids: what builds its inputs, and what asserts."""


def run_case(
    case: Case, backend: str, device: Device, seed: int, budget: float = 5.0
) -> tuple[int, int]:
    """Run one case of `backend`. An `AssertionError` names the mistake.

    Returns how many plans its steps had, and how many of them the checker of plans could read.

    `budget`: seconds for each search. Each case has random numbers of its own, from `seed`.
    """
    build, check = CHECKS[case.check]

    def run() -> tuple[int, int]:
        harness = build(backend, device, (seed + zlib.crc32(case.id.encode())) % 2**31)
        harness.budget = budget
        check(case, harness)
        return sum(c.plans for c in harness.checks), sum(c.checked for c in harness.checks)

    load_object(discover().backend(backend).path)  # changes by an import don't count as the step's
    return runs_alone(run)
