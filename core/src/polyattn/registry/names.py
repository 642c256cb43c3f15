"""Which backend does a name mean? A backend's own name, or an alias that a plugin declares for it."""

from __future__ import annotations

from collections.abc import Mapping

from polyattn.registry.catalogue import unknown
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import AttentionKind


def backend_named(name: str, backends: Mapping[str, BackendInfo]) -> str | None:
    """Return the name of the backend that a name or an alias in upper case means, or None."""
    if name in backends:
        return name
    return next((info.name for info in backends.values() if name in info.aliases), None)


def not_a_backend(
    name: str, backends: Mapping[str, BackendInfo], platform: str | None = None
) -> str:
    """Return what is wrong with a name that means no backend, and the remedy, for an error.

    Engines name a few kinds of layers as if they were backends: vLLM's MAMBA2 or GDN_ATTN.

    Args:
        name: the name, in upper case.
        backends: the loaded plugins' backends.
        platform: of the device that is asked for, None where no device is.

    """
    word = name.removesuffix("_ATTN").lower()
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
