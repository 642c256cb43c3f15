"""How vLLM and a backend agree on the layout of the cache's blocks. Only this differs between versions.

Since 0.29 vLLM asks a backend for all layouts that it takes, and chooses one. 0.28 asks for one layout,
its shape and its order in memory.
"""

from __future__ import annotations

from typing import Any

from polyattn.host import current_settings
from vllm.platforms import current_platform

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ModuleNotFoundError:  # vLLM 0.28
    LAYOUTS: dict[str, Any] = {}
else:
    LAYOUTS = {"NHD": KVCacheLayout.LBNHC, "HND": KVCacheLayout.LBHNC}


class Layouts:
    """Answers vLLM's questions about a backend's cache. A layer's blocks always lie together."""

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return tuple(LAYOUTS[name] for name in _wanted())

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return _wanted()[0]

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        if cls.is_mla():
            return num_blocks, block_size, head_size
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("the layers of a block would lie together")
        if cls.is_mla():
            return 0, 1, 2
        return (0, 2, 1, 3) if _wanted()[0] == "NHD" else (0, 1, 2, 3)


def layout_of(cache_config: Any) -> str:
    """Return the layout, "NHD" or "HND", that vLLM settled on."""
    if not LAYOUTS:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return str(get_kv_cache_layout())
    resolved = cache_config.get_resolved_kv_cache_layout()
    return next(name for name, theirs in LAYOUTS.items() if theirs is resolved)


def _wanted() -> list[str]:
    """Return the layouts that are taken, the best first.

    Every GPU kernel takes NHD; a CPU reads a head's keys faster where they are neighbours.
    """
    wanted = current_settings().layout
    names = ("HND", "NHD") if current_platform.is_cpu() else ("NHD", "HND")
    return [name for name in names if wanted in (None, name)]
