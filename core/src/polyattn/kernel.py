"""All that a backend's module imports: the classes to derive from and what their calls are made of."""

from polyattn.device import Device, arch_matches
from polyattn.errors import BatchError
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.families.attention.rope import inv_freq
from polyattn.families.attention.rotation import rotation_at
from polyattn.runtime.backend import (
    Addressed,
    AttentionBackend,
    IndexBackend,
    MergeBackend,
    PackedStrides,
    PageStrides,
    RecurrentBackend,
    SparseBackend,
    StoreBackend,
)
from polyattn.runtime.cache.kv_cache import (
    ALLOCATORS,
    STORAGE_DTYPES,
    KVCache,
    quantize,
    raw,
    storage_dtype,
)
from polyattn.runtime.cache.rows import decoded, encoded, sizes_of, turned
from polyattn.runtime.cache.scales import dequantized, write_output
from polyattn.runtime.conventions import (
    at_least,
    blank,
    cumulative,
    decode_window_sizes,
    empty_rows,
    store_lse,
)
from polyattn.runtime.function_backend import backend
from polyattn.runtime.functions.encoding import trace_encode
from polyattn.runtime.functions.pointwise import (
    INPUT_DTYPES,
    Function,
    Pointwise,
    feature_mod,
)
from polyattn.runtime.functions.quotients import reciprocal
from polyattn.runtime.functions.tracing import (
    OF_PLACES,
    Trace,
    UntraceableError,
    trace,
    trace_features,
    trace_rows,
    untraceable,
)
from polyattn.runtime.merge import AttentionState, merge_states
from polyattn.runtime.norm import Norms
from polyattn.runtime.program import Frame, IndexFrame, LayerParams, Plan, RecurrentFrame, StorePlan
from polyattn.runtime.reads import Items, Keys, Merges, Reads, in_turn, no_merges
from polyattn.runtime.rotation import NewTokens, Rotation, prepared
from polyattn.runtime.step.batch import Batch, upload
from polyattn.runtime.step.chosen_pages import (
    ChosenPages,
    over_chosen_pages,
    token_places,
    visible_entries,
)
from polyattn.runtime.step.shared_prefix import Levels, SharedRun
from polyattn.runtime.step.step_mask import BlockSparseMask, CustomMask
from polyattn.runtime.step.uniform_rows import UniformRows
from polyattn.selection.cache_format import CacheFormat
from polyattn.settings import current as current_settings
from polyattn.spec.decompose import absorbed
from polyattn.spec.key_ranges import KeyRanges, key_ranges, window_sizes
from polyattn.spec.kinds import AttentionKind, GraphCapture, Invariance, Role
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.spec.norm import NormSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.row_format import RowFormat
from polyattn.spec.sparse import IndexerSpec
from polyattn.spec.variant import AttentionVariant, VariantInput

__all__ = [
    "ALLOCATORS",
    "INPUT_DTYPES",
    "OF_PLACES",
    "STORAGE_DTYPES",
    "Addressed",
    "AttentionBackend",
    "AttentionKind",
    "AttentionState",
    "AttentionVariant",
    "Batch",
    "BatchError",
    "BlockSparseMask",
    "CacheFormat",
    "ChosenPages",
    "CustomMask",
    "Device",
    "Frame",
    "Function",
    "GraphCapture",
    "IndexBackend",
    "IndexFrame",
    "IndexerSpec",
    "Invariance",
    "Items",
    "KVCache",
    "KeyRanges",
    "Keys",
    "LatentSpec",
    "LayerParams",
    "LayerSpec",
    "Levels",
    "MergeBackend",
    "Merges",
    "NewTokens",
    "NormSpec",
    "Norms",
    "PackedStrides",
    "PageStrides",
    "Plan",
    "Pointwise",
    "Reads",
    "RecurrentBackend",
    "RecurrentFrame",
    "RecurrentSpec",
    "Role",
    "RopeSpec",
    "Rotation",
    "RowFormat",
    "SharedRun",
    "SparseBackend",
    "StoreBackend",
    "StorePlan",
    "Trace",
    "UniformRows",
    "UntraceableError",
    "VariantInput",
    "absorbed",
    "alibi_slopes",
    "arch_matches",
    "at_least",
    "backend",
    "blank",
    "cumulative",
    "current_settings",
    "decode_window_sizes",
    "decoded",
    "dequantized",
    "empty_rows",
    "encoded",
    "feature_mod",
    "in_turn",
    "inv_freq",
    "key_ranges",
    "merge_states",
    "no_merges",
    "over_chosen_pages",
    "prepared",
    "quantize",
    "raw",
    "reciprocal",
    "rotation_at",
    "sizes_of",
    "storage_dtype",
    "store_lse",
    "token_places",
    "trace",
    "trace_encode",
    "trace_features",
    "trace_rows",
    "turned",
    "untraceable",
    "upload",
    "visible_entries",
    "window_sizes",
    "write_output",
]
