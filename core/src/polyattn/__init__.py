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
    from polyattn.backend import AttentionBackend, BackendInfo, LayerParams, RecurrentBackend
    from polyattn.batch import Batch
    from polyattn.cache import KVCache, KVCacheSpec
    from polyattn.capability import Capabilities, Rejection
    from polyattn.decision import Decision
    from polyattn.device import Device
    from polyattn.discovery import discover, register, unregister
    from polyattn.errors import PolyattnError
    from polyattn.indexer import choose_tokens
    from polyattn.latent import LatentAttention
    from polyattn.layer import Attention
    from polyattn.recurrent import Recurrent
    from polyattn.selector import LayerGroup, Selection, select, select_layers
    from polyattn.settings import Settings
    from polyattn.spec import AttentionKind, GraphCapture, LayerSpec, Role
    from polyattn.state import AttentionState, merge_states
    from polyattn.states import StateCache, StateCacheSpec

_HOME = {
    "Attention": "layer",
    "AttentionBackend": "backend",
    "AttentionKind": "spec",
    "AttentionState": "state",
    "BackendInfo": "backend",
    "Batch": "batch",
    "Capabilities": "capability",
    "Decision": "decision",
    "Device": "device",
    "GraphCapture": "spec",
    "KVCache": "cache",
    "KVCacheSpec": "cache",
    "LatentAttention": "latent",
    "LayerGroup": "selector",
    "LayerParams": "backend",
    "LayerSpec": "spec",
    "PolyattnError": "errors",
    "Recurrent": "recurrent",
    "RecurrentBackend": "backend",
    "Rejection": "capability",
    "Role": "spec",
    "Selection": "selector",
    "Settings": "settings",
    "StateCache": "states",
    "StateCacheSpec": "states",
    "choose_tokens": "indexer",
    "discover": "discovery",
    "merge_states": "state",
    "register": "discovery",
    "select": "selector",
    "select_layers": "selector",
    "unregister": "discovery",
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
