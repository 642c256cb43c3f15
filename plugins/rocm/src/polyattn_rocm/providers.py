"""Is a library here? Looks at metadata alone; imports nothing of it."""

from __future__ import annotations

from polyattn.plugin import find_spec


def aiter_ready() -> str | None:
    """Say why AITER can't be used, or None. An unrelated `aiter` (iterators) is on PyPI too."""
    spec = find_spec("aiter")
    if spec is None or not spec.submodule_search_locations:
        return "aiter is not installed; pip install amd-aiter, or AMD's wheel for your ROCm release"
    return None


def flash_attn_ready() -> str | None:
    """Say why flash-attn can't be used, or None. flash-attn 4 has a `flash_attn` folder as well."""
    try:
        module = find_spec("flash_attn.flash_attn_interface")
    except ModuleNotFoundError:
        module = None
    if module is None or module.loader is None:  # a stand-in has none
        return "flash-attn is not installed; build it from github.com/ROCm/flash-attention (CK)"
    return None
