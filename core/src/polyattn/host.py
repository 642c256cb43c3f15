"""What an integration imports: all that an embedding host calls.

Beside it, an integration imports `polyattn` and `polyattn.errors`.

A host calls attention without a layer, brings caches of its own, or shares a sequence among ranks.
`API_VERSION` covers these names, as it covers those of `polyattn.plugin` and `polyattn.kernel`.
"""

from polyattn.calls.caller_cache import CallerCache as CallerCache
from polyattn.calls.caller_cache import NewKeys as NewKeys
from polyattn.calls.caller_cache import RotaryTables as RotaryTables
from polyattn.calls.caller_cache import attend_cached as attend_cached
from polyattn.calls.dense import attend_dense as attend_dense
from polyattn.calls.ledger import Ledger as Ledger
from polyattn.calls.ledger import Report as Report
from polyattn.calls.memo import group_for as group_for
from polyattn.calls.packed import PackedKeys as PackedKeys
from polyattn.calls.packed import attend_packed as attend_packed
from polyattn.calls.packed import packed_gradients as packed_gradients
from polyattn.calls.plans import CallOptions as CallOptions
from polyattn.calls.plans import flash_window as flash_window
from polyattn.calls.plans import group_for_call as group_for_call
from polyattn.calls.plans import plan_lengths as plan_lengths
from polyattn.calls.plans import run_plan as run_plan
from polyattn.calls.recurrence import recurrence as recurrence
from polyattn.calls.sdpa import sdpa as sdpa
from polyattn.calls.sdpa import sdpa_operator as sdpa_operator
from polyattn.calls.stand_in import StandIns as StandIns
from polyattn.calls.views import joined_pages as joined_pages
from polyattn.families.attention.alibi import alibi_slopes as alibi_slopes
from polyattn.registry.info import API_VERSION as API_VERSION
from polyattn.registry.integrations import Integration as Integration
from polyattn.registry.integrations import integrations as integrations
from polyattn.registry.integrations import warn_of_other_releases as _warn_of_other_releases
from polyattn.runtime.backend import MergeBackend as MergeBackend
from polyattn.runtime.backend import StoreBackend as StoreBackend
from polyattn.runtime.cache.kv_cache import raw as raw
from polyattn.runtime.decompositions import by_phase as by_phase
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers as MixedBuffers
from polyattn.runtime.inputs import asks_gradients as asks_gradients
from polyattn.runtime.inputs import capturing as capturing
from polyattn.runtime.inputs import compiling as compiling
from polyattn.runtime.inputs import own_precision as own_precision
from polyattn.runtime.inputs import refuse as refuse
from polyattn.runtime.inputs import refuse_gradients as refuse_gradients
from polyattn.runtime.inputs import untraced as untraced
from polyattn.runtime.merge import MergeBuffers as MergeBuffers
from polyattn.runtime.merge import with_sinks as with_sinks
from polyattn.runtime.program import Frame as Frame
from polyattn.runtime.program import Op as Op
from polyattn.runtime.program import Rows as Rows
from polyattn.runtime.step.batch_checks import check_on_device as check_on_device
from polyattn.runtime.step.host_copies import lens_between as lens_between
from polyattn.runtime.step.host_copies import values_of as values_of
from polyattn.settings import current_settings as current_settings
from polyattn.spec.key_ranges import key_ranges as key_ranges

_warn_of_other_releases()
