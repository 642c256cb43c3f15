"""polyattn: one attention interface, every vendor's kernels.

    selection = polyattn.select(spec)                    # a value: who is chosen, and why
    group = polyattn.LayerGroup(selection)               # the loaded kernels, shared by layers
    layers = [polyattn.Attention(group) for _ in range(32)]

    plan = group.plan(batch)                             # once a step; a value
    out = layer(query, key, value, cache, plan)          # each layer

Names are loaded on first use, so that asking what is installed costs milliseconds.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from polyattn._version import __version__

if TYPE_CHECKING:
    from polyattn.api import check_supported, select, select_layers
    from polyattn.device import Device
    from polyattn.errors import PolyattnError
    from polyattn.families.attention.layer import Attention
    from polyattn.families.attention.quest import choose_pages, page_bounds, page_scores
    from polyattn.families.attention.stateless.function import attention
    from polyattn.families.mla.indexer import choose_tokens
    from polyattn.families.mla.layer import LatentAttention
    from polyattn.families.recurrent.layer import Recurrent
    from polyattn.registry.capabilities import Capabilities, Rejection
    from polyattn.registry.devices import resolve_device
    from polyattn.registry.discovery import discover, register, unregister
    from polyattn.registry.info import BackendInfo
    from polyattn.registry.variants import register_variant, unregister_variant, variants
    from polyattn.runtime.backend import AttentionBackend
    from polyattn.runtime.cache.kv_cache import KVCache
    from polyattn.runtime.cache.state_cache import StateCache
    from polyattn.runtime.functions.variants import deberta_buckets, t5_buckets
    from polyattn.runtime.graphs.cuda_graph import StepGraphs
    from polyattn.runtime.graphs.step_buffers import StepSize
    from polyattn.runtime.group import LayerGroup
    from polyattn.runtime.merge import AttentionState, merge_states
    from polyattn.runtime.plan import StepPlan
    from polyattn.runtime.step.batch import Batch
    from polyattn.runtime.step.beams import beam_batch
    from polyattn.runtime.step.metadata import TensorRTLLMMetadata, VLLMMetadata
    from polyattn.runtime.step.shared_prefix import SharedRun, shared_prefixes
    from polyattn.runtime.step.step_mask import BlockSparseMask, CustomMask
    from polyattn.selection.cache_format import CacheFormat
    from polyattn.selection.decision import Decision
    from polyattn.selection.selection import SelectedLayers, Selection
    from polyattn.settings import Settings
    from polyattn.spec.cache_window import CacheWindow
    from polyattn.spec.kinds import AttentionKind, GraphCapture, Role
    from polyattn.spec.layer import LatentSpec, LayerSpec, RecurrentSpec
    from polyattn.spec.rope import RopeSpec
    from polyattn.spec.variant import AttentionVariant

_HOME = {
    "Attention": "families.attention.layer",
    "AttentionBackend": "runtime.backend",
    "AttentionKind": "spec.kinds",
    "AttentionState": "runtime.merge",
    "AttentionVariant": "spec.variant",
    "BackendInfo": "registry.info",
    "Batch": "runtime.step.batch",
    "BlockSparseMask": "runtime.step.step_mask",
    "CacheFormat": "selection.cache_format",
    "CacheWindow": "spec.cache_window",
    "Capabilities": "registry.capabilities",
    "CustomMask": "runtime.step.step_mask",
    "Decision": "selection.decision",
    "Device": "device",
    "GraphCapture": "spec.kinds",
    "KVCache": "runtime.cache.kv_cache",
    "LatentAttention": "families.mla.layer",
    "LatentSpec": "spec.layer",
    "LayerGroup": "runtime.group",
    "LayerSpec": "spec.layer",
    "PolyattnError": "errors",
    "Recurrent": "families.recurrent.layer",
    "RecurrentSpec": "spec.layer",
    "Rejection": "registry.capabilities",
    "Role": "spec.kinds",
    "RopeSpec": "spec.rope",
    "SelectedLayers": "selection.selection",
    "Selection": "selection.selection",
    "Settings": "settings",
    "SharedRun": "runtime.step.shared_prefix",
    "StateCache": "runtime.cache.state_cache",
    "StepGraphs": "runtime.graphs.cuda_graph",
    "StepSize": "runtime.graphs.step_buffers",
    "StepPlan": "runtime.plan",
    "TensorRTLLMMetadata": "runtime.step.metadata",
    "VLLMMetadata": "runtime.step.metadata",
    "beam_batch": "runtime.step.beams",
    "attention": "families.attention.stateless.function",
    "check_supported": "api",
    "choose_pages": "families.attention.quest",
    "choose_tokens": "families.mla.indexer",
    "deberta_buckets": "runtime.functions.variants",
    "discover": "registry.discovery",
    "merge_states": "runtime.merge",
    "page_bounds": "families.attention.quest",
    "page_scores": "families.attention.quest",
    "register": "registry.discovery",
    "register_variant": "registry.variants",
    "resolve_device": "registry.devices",
    "select": "api",
    "select_layers": "api",
    "shared_prefixes": "runtime.step.shared_prefix",
    "t5_buckets": "runtime.functions.variants",
    "unregister": "registry.discovery",
    "unregister_variant": "registry.variants",
    "variants": "registry.variants",
}

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionKind",
    "AttentionState",
    "AttentionVariant",
    "BackendInfo",
    "Batch",
    "BlockSparseMask",
    "CacheFormat",
    "CacheWindow",
    "Capabilities",
    "CustomMask",
    "Decision",
    "Device",
    "GraphCapture",
    "KVCache",
    "LatentAttention",
    "LatentSpec",
    "LayerGroup",
    "LayerSpec",
    "PolyattnError",
    "Recurrent",
    "RecurrentSpec",
    "Rejection",
    "Role",
    "RopeSpec",
    "SelectedLayers",
    "Selection",
    "Settings",
    "SharedRun",
    "StateCache",
    "StepGraphs",
    "StepPlan",
    "StepSize",
    "TensorRTLLMMetadata",
    "VLLMMetadata",
    "__version__",
    "attention",
    "beam_batch",
    "check_supported",
    "choose_pages",
    "choose_tokens",
    "deberta_buckets",
    "discover",
    "merge_states",
    "page_bounds",
    "page_scores",
    "register",
    "register_variant",
    "resolve_device",
    "select",
    "select_layers",
    "shared_prefixes",
    "t5_buckets",
    "unregister",
    "unregister_variant",
    "variants",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'polyattn' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(f"polyattn.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
