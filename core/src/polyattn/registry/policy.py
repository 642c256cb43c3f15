"""Lets policy plugins re-rank who can serve. One that fails is passed over by name."""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import is_dataclass
from typing import Any

from polyattn.device import Device
from polyattn.errors import PluginError, shown
from polyattn.registry.discovery import ask
from polyattn.registry.guard import LatePluginError, within
from polyattn.registry.installed import Registry
from polyattn.spec.layer import LayerSpec

log = logging.getLogger("polyattn")


def rerank(
    registry: Registry,
    spec: LayerSpec,
    device: Device,
    phase: str,
    ranking: tuple[str, ...],
    seconds: float,
) -> tuple[str, ...]:
    """Return the ranking after every `polyattn_rank` hook, each within `seconds`."""
    policies = {impl.plugin_name for impl in registry.manager.hook.polyattn_rank.get_hookimpls()}
    owners = {p.name: p for p in registry.plugins if p.status == "ok"}
    for name, plugin in registry.manager.list_name_plugin():
        if name not in policies or name not in owners or name in registry.late_policies:
            continue
        arguments = {
            "spec": _copied(spec),
            "device": copy(device),
            "phase": phase,
            "ranking": ranking,
        }
        try:
            answer = within(
                seconds, "POLYATTN_PROBE_TIMEOUT", "polyattn_rank",
                lambda plugin=plugin, arguments=arguments: ask(  # type: ignore[misc]
                    registry.manager, plugin, "polyattn_rank", **arguments
                ),
            )  # fmt: skip
            ranking = ranking if answer is None else _checked(answer, ranking)
        except PluginError as error:  # a policy that fails must not stop the choice
            if isinstance(error, LatePluginError):  # to wait once is enough
                registry.late_policies.add(name)
            owner = owners[name]
            log.warning(
                "polyattn_rank of %s is passed over: %s (until it is fixed: %s)",
                owner.origin, error, owner.removal,
            )  # fmt: skip
    return ranking


def _copied(spec: LayerSpec) -> LayerSpec:
    """Return a spec that a hook may do anything to: the caller's stays as it is."""
    mine = copy(spec)
    for name, part in vars(mine).items():
        if is_dataclass(part):
            object.__setattr__(mine, name, copy(part))
    return mine


def _checked(answer: Any, ranking: tuple[str, ...]) -> tuple[str, ...]:
    if (
        type(answer) not in (list, tuple)
        or not answer
        or any(type(name) is not str or name not in ranking for name in answer)
        or len(set(answer)) != len(answer)
    ):
        raise PluginError(
            f"it returned {shown(answer)}; it may only reorder or drop {list(ranking)}, as a list, "
            "and must leave one"
        )
    return tuple(answer)
