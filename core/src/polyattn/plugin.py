"""All that a plugin's hook module imports. Light: neither torch nor any vendor's library."""

from polyattn.device import Device
from polyattn.errors import BatchError, SettingsError
from polyattn.registry.capabilities import (
    ANY_PLATFORM,
    ANY_SIZE,
    Capabilities,
    Sizes,
    multiples,
    names,
    one_of,
)
from polyattn.registry.distributions import find_spec, installed
from polyattn.registry.hooks import Platform, TorchDevices, declare, hookimpl
from polyattn.registry.info import API_VERSION, BackendInfo, Priority, Proof, Variant
from polyattn.spec.decompose import absorbed, expanded
from polyattn.spec.key_ranges import key_ranges, window_sizes
from polyattn.spec.kinds import AttentionKind, GraphCapture, Invariance, Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import ANY_ROWS, RowFormat
from polyattn.spec.variant import AttentionVariant

__all__ = [
    "ANY_PLATFORM",
    "ANY_ROWS",
    "ANY_SIZE",
    "API_VERSION",
    "AttentionKind",
    "AttentionVariant",
    "BackendInfo",
    "BatchError",
    "Capabilities",
    "Device",
    "GraphCapture",
    "Invariance",
    "LayerSpec",
    "Platform",
    "Priority",
    "Proof",
    "Role",
    "RowFormat",
    "SettingsError",
    "Sizes",
    "TorchDevices",
    "Variant",
    "absorbed",
    "declare",
    "expanded",
    "find_spec",
    "hookimpl",
    "installed",
    "key_ranges",
    "multiples",
    "names",
    "one_of",
    "window_sizes",
]
