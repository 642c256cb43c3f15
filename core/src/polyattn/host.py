"""What an integration imports: all that an embedding host calls.

Beside it, an integration imports `polyattn` and `polyattn.errors`.

A host calls attention without a layer, brings caches of its own, or shares a sequence among ranks.
`API_VERSION` covers these names, as it covers those of `polyattn.plugin` and `polyattn.kernel`.
"""

from polyattn.calls.caller_cache import (
    CallerCache,
    NewKeys,
    RotaryTables,
    attend_cached,
)
from polyattn.calls.dense import attend_dense
from polyattn.calls.ledger import Ledger, Report
from polyattn.calls.memo import group_for
from polyattn.calls.packed import (
    PackedKeys,
    attend_packed,
    attend_rows,
    packed_gradients,
)
from polyattn.calls.plans import (
    CallOptions,
    flash_window,
    group_for_call,
    plan_lengths,
    run_plan,
)
from polyattn.calls.recurrence import recurrence
from polyattn.calls.sdpa import sdpa, sdpa_operator
from polyattn.calls.stand_in import StandIns
from polyattn.calls.views import joined_pages
from polyattn.registry.info import API_VERSION
from polyattn.registry.integrations import Integration, integrations
from polyattn.runtime.backend import MergeBackend, StoreBackend
from polyattn.runtime.cache.kv_cache import raw
from polyattn.runtime.decompositions import by_phase
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.inputs import capturing, own_precision, refuse, refuse_gradients
from polyattn.runtime.merge import MergeBuffers
from polyattn.runtime.program import Frame, Op, Rows
from polyattn.runtime.step.batch_checks import check_on_device
from polyattn.runtime.step.host_copies import lens_between, values_of
from polyattn.settings import current as current_settings
from polyattn.spec.key_ranges import key_ranges

__all__ = [
    "API_VERSION",
    "CallOptions",
    "CallerCache",
    "Frame",
    "Integration",
    "Ledger",
    "MergeBackend",
    "MergeBuffers",
    "MixedBuffers",
    "NewKeys",
    "Op",
    "PackedKeys",
    "Report",
    "RotaryTables",
    "Rows",
    "StandIns",
    "StoreBackend",
    "attend_cached",
    "attend_dense",
    "attend_packed",
    "attend_rows",
    "by_phase",
    "capturing",
    "check_on_device",
    "current_settings",
    "flash_window",
    "group_for",
    "group_for_call",
    "integrations",
    "joined_pages",
    "key_ranges",
    "lens_between",
    "own_precision",
    "packed_gradients",
    "plan_lengths",
    "raw",
    "recurrence",
    "refuse",
    "refuse_gradients",
    "run_plan",
    "sdpa",
    "sdpa_operator",
    "values_of",
]
