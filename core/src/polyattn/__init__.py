"""polyattn: one attention interface, every vendor's kernels.

    selection = polyattn.select(spec)                    # who is chosen, and why
    layer = polyattn.Attention(selection)                # what an engine holds
    out = layer(query, key, value, cache, batch)         # one step

Names are loaded on first use, so that asking what is installed costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyattn._version import __version__

if TYPE_CHECKING:
    from polyattn.api import LayerGroup, Selection, select, select_layers
    from polyattn.device import Device
    from polyattn.errors import PolyattnError
    from polyattn.families.attention.layer import Attention
    from polyattn.families.mla.indexer import choose_tokens
    from polyattn.families.mla.layer import LatentAttention
    from polyattn.families.recurrent.layer import Recurrent
    from polyattn.registry.capabilities import Capabilities, Rejection
    from polyattn.registry.discovery import discover, register, unregister
    from polyattn.registry.info import BackendInfo
    from polyattn.runtime.backend import AttentionBackend, LayerParams, RecurrentBackend
    from polyattn.runtime.batch import Batch
    from polyattn.runtime.kv_cache import KVCache, KVCacheSpec
    from polyattn.runtime.merge import AttentionState, merge_states
    from polyattn.runtime.state_cache import StateCache, StateCacheSpec
    from polyattn.selection.decision import Decision
    from polyattn.settings import Settings
    from polyattn.spec.layer import AttentionKind, GraphCapture, LayerSpec, Role

_HOME = {
    "Attention": "families.attention.layer",
    "AttentionBackend": "runtime.backend",
    "AttentionKind": "spec.layer",
    "AttentionState": "runtime.merge",
    "BackendInfo": "registry.info",
    "Batch": "runtime.batch",
    "Capabilities": "registry.capabilities",
    "Decision": "selection.decision",
    "Device": "device",
    "GraphCapture": "spec.layer",
    "KVCache": "runtime.kv_cache",
    "KVCacheSpec": "runtime.kv_cache",
    "LatentAttention": "families.mla.layer",
    "LayerGroup": "api",
    "LayerParams": "runtime.backend",
    "LayerSpec": "spec.layer",
    "PolyattnError": "errors",
    "Recurrent": "families.recurrent.layer",
    "RecurrentBackend": "runtime.backend",
    "Rejection": "registry.capabilities",
    "Role": "spec.layer",
    "Selection": "api",
    "Settings": "settings",
    "StateCache": "runtime.state_cache",
    "StateCacheSpec": "runtime.state_cache",
    "choose_tokens": "families.mla.indexer",
    "discover": "registry.discovery",
    "merge_states": "runtime.merge",
    "register": "registry.discovery",
    "select": "api",
    "select_layers": "api",
    "unregister": "registry.discovery",
}

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionKind",
    "AttentionState",
    "BackendInfo",
    "Batch",
    "Capabilities",
    "Decision",
    "Device",
    "GraphCapture",
    "KVCache",
    "KVCacheSpec",
    "LatentAttention",
    "LayerGroup",
    "LayerParams",
    "LayerSpec",
    "PolyattnError",
    "Recurrent",
    "RecurrentBackend",
    "Rejection",
    "Role",
    "Selection",
    "Settings",
    "StateCache",
    "StateCacheSpec",
    "__version__",
    "choose_tokens",
    "discover",
    "merge_states",
    "register",
    "select",
    "select_layers",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'polyattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"polyattn.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
