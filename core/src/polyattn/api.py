"""Who is chosen, and why? `select` gathers the facts, asks the tree and remembers the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from polyattn.device import Device
from polyattn.errors import PluginError
from polyattn.registry import discovery
from polyattn.registry.discovery import Registry, ask, discover
from polyattn.registry.info import BackendInfo
from polyattn.registry.machine import availability
from polyattn.selection.decision import Decision
from polyattn.selection.tree import Facts, decide
from polyattn.settings import Settings, current
from polyattn.spec.decompose import group_layers, unrotated
from polyattn.spec.layer import LayerSpec

if TYPE_CHECKING:
    from polyattn.families.mla.layer import LatentRuntime
    from polyattn.families.recurrent.layer import RecurrentRuntime
    from polyattn.runtime.group import Runtime
    from polyattn.runtime.kv_cache import KVCacheSpec
    from polyattn.runtime.state_cache import StateCacheSpec

log = logging.getLogger("polyattn")


class Selection:
    """The backends chosen for a layer. Layers built from one `Selection` share one plan a step."""

    __slots__ = ("__dict__", "decision", "registry")

    def __init__(self, decision: Decision, registry: Registry):
        self.decision, self.registry = decision, registry

    @property
    def spec(self) -> LayerSpec:
        """The layer that was asked about."""
        return self.decision.spec

    @property
    def device(self) -> Device:
        """The device that was asked about."""
        return self.decision.device

    @property
    def prefill(self) -> BackendInfo:
        """The backend for sequences of several query tokens."""
        return self.registry.backends[self.decision.prefill]

    @property
    def decode(self) -> BackendInfo | None:
        """The backend for sequences of one query token; None for layers without a cache."""
        name = self.decision.decode
        return None if name is None else self.registry.backends[name]

    @cached_property
    def runtime(self) -> Runtime | LatentRuntime | RecurrentRuntime:
        """The loaded backends and their plan, shared by every layer of this selection."""
        if self.spec.kind.is_recurrent:
            from polyattn.families.recurrent.layer import RecurrentRuntime

            return RecurrentRuntime(self)
        if self.spec.kind.is_latent:
            from polyattn.families.mla.layer import LatentRuntime

            return LatentRuntime(self)
        from polyattn.runtime.group import Runtime

        return Runtime(self)

    def cache_spec(self, num_blocks: int) -> KVCacheSpec:
        """Return the KV cache that this selection works on, `num_blocks` blocks of it."""
        from polyattn.runtime.kv_cache import KVCacheSpec

        return KVCacheSpec.for_decision(self.decision, num_blocks)

    def state_spec(self, num_slots: int) -> StateCacheSpec:
        """Return the state cache that a recurrent layer works on, `num_slots` sequences."""
        from polyattn.runtime.state_cache import StateCacheSpec

        return StateCacheSpec.for_layer(self.spec, num_slots)

    def explain(self) -> str:
        """Return the decision tree with every candidate's verdict, as text."""
        return self.decision.explain()

    def __repr__(self) -> str:
        return f"<Selection: {self.decision.summary()}>"


@dataclass(frozen=True)
class LayerGroup:
    """The layers of a model that compute the same, and what was selected for them."""

    spec: LayerSpec
    layers: tuple[int, ...]
    selection: Selection


class _Memo:
    """Decisions already made, for as long as nothing that can change one has changed."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.generation = -1
        self.table: dict[Any, tuple[Decision, Registry]] = {}
        self.devices: dict[Any, Device] = {}

    def valid_for(self, settings: Settings) -> None:
        if self.settings is not settings or self.generation != discovery.generation():
            self.settings, self.generation = settings, discovery.generation()
            self.table.clear()
            self.devices.clear()


_memo = _Memo()


def resolve_device(device: Device | str | None) -> Device:
    """Return the device behind a `Device`, a profile's name, a torch device or None (detect)."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and device.split(":")[0] not in ("cpu", "cuda", "xla", "hpu"):
        return Device.profile(device)
    return Device.detect(device)


def select(
    spec: LayerSpec,
    device: Device | str | None = None,
    *,
    backend: str | None = None,
    settings: Settings | None = None,
    verify: bool | None = None,
) -> Selection:
    """Choose the prefill and the decode backend for a layer, jointly.

    `device`: a `Device`, a profile's name (`"h100-sxm"`), a torch device (`"cuda:0"`), or None
    for this machine's best. `backend` names one, or scoped ones (`"prefill=A,decode=B"`), and
    never falls through. `verify` runs each chosen backend once against the reference; one that
    fails is passed over if it was chosen automatically (default: the setting `verify`, else no).
    Raises `SelectionError` with every rejection, `SettingsError`, `DeviceError`.
    """
    settings = current() if settings is None else settings
    _memo.valid_for(settings)
    spec = unrotated(spec)  # kernels take queries and keys that are rotated already
    key = (spec, device, backend, verify)
    found = _memo.table.get(key)
    if found is None:
        if device not in _memo.devices:
            _memo.devices[device] = resolve_device(device)
        resolved = _memo.devices[device]
        if verify is None:
            verify = bool(settings.verify)
        strict = settings.with_backend(backend, "argument backend")
        found = _memo.table[key] = _select(spec, resolved, strict, verify)
    return Selection(*found)


def select_for_layer(spec: LayerSpec) -> Selection:
    """Select for one layer on this machine's device, verified where that is an accelerator."""
    device = resolve_device(None)
    verify = current().verify
    return select(spec, device, verify=device.is_accelerator if verify is None else verify)


def select_layers(
    specs: Iterable[LayerSpec],
    device: Device | str | None = None,
    *,
    settings: Settings | None = None,
    verify: bool | None = None,
) -> list[LayerGroup]:
    """Select for every layer of a model, grouped by what they compute.

    Warns (logger `polyattn`) about an override whose scope matched no layer.
    """
    settings = current() if settings is None else settings
    groups = [
        LayerGroup(spec, tuple(layers), select(spec, device, settings=settings, verify=verify))
        for spec, layers in group_layers(specs).items()
    ]
    for note in unmatched_overrides([g.spec for g in groups], settings):
        log.warning(note)
    return groups


def unmatched_overrides(specs: Sequence[LayerSpec], settings: Settings) -> list[str]:
    """Return a line for each override that speaks of none of the layers."""
    return [
        f"{o.source}: {o} matched no layer of this model"
        for source in settings.sources
        for o in source
        if not any(o.applies(spec, phase) for spec in specs for phase in ("prefill", "decode"))
    ]


def _select(
    spec: LayerSpec, device: Device, settings: Settings, verify: bool
) -> tuple[Decision, Registry]:
    registry = discover(settings)
    failed: dict[str, str] = {}
    while True:
        facts = _facts(spec, device, registry, settings, failed)
        decision = decide(spec, device, facts, settings)
        wrong = _verify(decision, registry) if verify and device.is_real else {}
        if not wrong:
            break
        for name, reason in wrong.items():
            log.warning("backend %s is passed over for %s: %s", name, spec, reason)
        failed |= wrong
    if decision.notes:
        log.info("%s", "; ".join(decision.notes))
    log.info("selected %s for %s on %s", decision.summary(), spec, device)
    return decision, registry


def _facts(
    spec: LayerSpec,
    device: Device,
    registry: Registry,
    settings: Settings,
    failed: dict[str, str],
) -> Facts:
    def rank(phase: str, ranking: tuple[str, ...]) -> Sequence[str]:
        for name, plugin in registry.manager.list_name_plugin():
            try:
                answer = ask(
                    registry.manager, plugin, "polyattn_rank",
                    spec=spec, device=device, phase=phase, ranking=ranking,
                )  # fmt: skip
                if answer is not None:
                    ranking = _checked_ranking(answer, ranking)
            except Exception as error:  # a policy that fails must not stop the choice
                log.warning("polyattn_rank of plugin %r is ignored: %s", name, error)
        return ranking

    return Facts(
        backends=registry.backends,
        unavailable=lambda info: availability(info, settings.probe_timeout),
        rank=rank,
        failed=failed,
        problems=tuple(registry.problems),
    )


def _checked_ranking(answer: Sequence[str], ranking: tuple[str, ...]) -> tuple[str, ...]:
    if not answer or not set(answer) <= set(ranking):
        raise PluginError(
            f"it returned {answer!r}; it may only reorder or drop {list(ranking)}, and must leave one"
        )
    return tuple(answer)


def _verify(decision: Decision, registry: Registry) -> dict[str, str]:
    from polyattn.checking.verify import verify_decision

    return verify_decision(decision, registry)
