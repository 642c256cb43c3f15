"""Which backend serves ordinary attention on this machine's CPU? The native one, where it was built."""

from __future__ import annotations

from polyattn.registry.discovery import discover
from polyattn.registry.machine import availability

_native = availability(discover().backends["NATIVE_ATTN"], timeout=2.0) is None
CPU_DEFAULT = "NATIVE_ATTN" if _native else "TORCH_SDPA"
