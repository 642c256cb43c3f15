"""Which backend does a name mean? A backend's own name, or an alias that a plugin declares for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polyattn.registry.catalogue import unknown
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import AttentionKind

COUNTERPARTS = {
    "ROCM_AITER_MLA": "TRITON_MLA serves MLA on ROCm",
    "ROCM_AITER_TRITON_MLA": "TRITON_MLA serves MLA on ROCm",
    "ROCM_AITER_UNIFIED_ATTN": "ROCM_ATTN runs AITER's kernels",
    "TREE_ATTN": "a tree of drafts is a mask of the step: LayerSpec(mask=...)",
    "ROCM_AITER_MLA_SPARSE": "TRITON_MLA_SPARSE serves sparse MLA on ROCm",
    "NSA": "FLASHMLA_SPARSE serves sparse MLA",
    "DSA": "FLASHMLA_SPARSE serves sparse MLA",
    "FLASH_ATTN_DIFFKV": "values of another size are LayerSpec(v_head_size=...)",
    "DUAL_CHUNK_FLASH_ATTN": "none serves dual chunk attention",
    "TURBOQUANT": "it is a format of the cache: LayerSpec(kv_cache_dtype='turboquant4')",
    "WAVE": "TRITON_ATTN serves attention on ROCm",
    "AUTO": "leave the name out, and polyattn chooses",
    "IPEX": "NATIVE_ATTN is the CPU's backend",
    "EAGER": "TORCH_SDPA runs torch's own kernels, VANILLA the float64 reference",
    "NO_ATTENTION": "a recurrent layer has a backend of its kind",
    "CUSTOM": "name the backend itself",
}
"""Names of other engines that mean no backend of ours, and what serves instead: no alias, since the
kernel is another one. The spelling alone would suggest a wrong one."""


def backend_named(name: str, backends: Mapping[str, BackendInfo]) -> str | None:
    """Return the name of the backend that an upper-case name or alias means, or None."""
    if name in backends:
        return name
    return next((info.name for info in backends.values() if name in info.aliases), None)


def not_a_backend(
    name: str, backends: Mapping[str, BackendInfo], platform: str | None = None
) -> str:
    """Return an error's text and remedy for a name that is no backend.

    Engines have names of backends for some kinds of layers, such as vLLM's MAMBA2 or GDN_ATTN.

    Args:
        name: the name, in upper case.
        backends: the loaded plugins' backends.
        platform: of the device in question; None if there is none.

    """
    word = name.removesuffix("_ATTN").lower()
    if name in COUNTERPARTS:
        return f"is no backend here; {COUNTERPARTS[name]}"
    if word not in [kind.value for kind in AttentionKind]:
        return unknown("backends", name, backends)
    kind = AttentionKind(word)
    able = sorted(
        info.name
        for info in backends.values()
        if kind in info.capabilities.kinds
        and info.capabilities.attends
        and not info.by_name_only
        and (platform is None or platform in info.capabilities.platforms)
    )
    where = f" on {platform}" if platform else ""
    if not able:
        return f"is a kind of layer, of which no backend is installed{where}"
    return (
        f"is a kind of layer; its backends{where} are {', '.join(able)}; name one for the kind: "
        f"{word}={able[0]}"
    )


def without_conflicts(
    backends: Mapping[str, BackendInfo], origins: Mapping[str, str], conflicts: dict[str, str]
) -> dict[str, BackendInfo]:
    """Return the backends without the aliases that another one has as a name or an alias.

    A name beats an alias. An alias of two backends is ambiguous.

    Args:
        backends: by name.
        origins: each backend's plugin, for messages.
        conflicts: gets a line for each alias that is left out.

    """
    claims: dict[str, list[str]] = {}
    for info in backends.values():
        for alias in info.aliases:
            claims.setdefault(alias, []).append(info.name)
    refused = {alias for alias, names in claims.items() if alias in backends or len(names) > 1}
    for alias in sorted(refused):
        claimants = " and ".join(f"{name} of {origins[name]}" for name in claims[alias])
        own = ", and a backend has that name" if alias in backends else ""
        conflicts[f"backend {alias}"] = (
            f"the alias {alias!r} is claimed by {claimants}{own}; nothing uses it, rename one"
        )
    return {
        name: replace(info, aliases=tuple(a for a in info.aliases if a not in refused))
        for name, info in backends.items()
    }
