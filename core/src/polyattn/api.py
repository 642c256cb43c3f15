"""Which backend is chosen, and why? `select` gathers facts, asks the tree, remembers the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from polyattn.device import Device
from polyattn.errors import SelectionError, SettingsError, SpecError, describe, flag, plain, shown
from polyattn.registry.capabilities import Rejection
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover, generation
from polyattn.registry.info import BackendInfo, load_object
from polyattn.registry.installed import Registry
from polyattn.registry.machine import Unset, availability, rerank, running
from polyattn.registry.timings import Timings, timings
from polyattn.registry.variants import kernel_spec, variant_of
from polyattn.selection.invariance import by_times, costs, described
from polyattn.selection.selection import Decision, SelectedLayers, Selection, noted, prepared_for
from polyattn.selection.tree import Facts, as_built, decide
from polyattn.settings import PHASE_SCOPES, Settings, current_settings
from polyattn.spec.decompose import candidate_sources, choice_sources, group_layers, kv_sources
from polyattn.spec.kinds import Invariance
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import RowFormat, rows_of
from polyattn.spec.variant import AttentionVariant

log = logging.getLogger("polyattn")

VERIFIER = "polyattn.workload.verify:verify_decision"
"""What runs a decision's backends once. It is loaded by its path, as backends are: selecting is below
all that runs, and imports none of it."""
MOST_REMEMBERED = 4096

_remembered: dict[tuple[Any, ...], Selection] = {}


def select(
    spec: LayerSpec,
    device: Any = None,
    *,
    backend: str | None = None,
    settings: Settings | None = None,
    verify: bool | None = None,
) -> Selection:
    """Choose the backends of a layer's phases, jointly.

    Args:
        spec: what the layer computes.
        device: a `Device`, a profile's name (`"h100-sxm"`), a torch device (`"cuda:0"`), or None for
            this machine's best, the current one of several.
        backend: a name, or scoped names (`"prefill=A,decode=B"`). A named backend is used or refused.
        settings: instead of those of the environment and the file.
        verify: run each chosen backend once against the reference, and pass over one that fails if it
            was chosen automatically. None: the setting `verify`, else no.

    Returns:
        The choice with its reasons; `LayerGroup` loads its kernels.

    Raises:
        SpecError: `spec` isn't a `LayerSpec`.
        SelectionError: no backend can serve the layer; the message has every rejection.
        SettingsError: a setting or a backend's name can't be honoured.
        DeviceError: the device isn't known, or isn't here.

    Examples:
        >>> spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
        >>> select(spec, "x86-avx512", backend="TORCH_SDPA").decision.prefill
        'TORCH_SDPA'

    """
    if not isinstance(spec, LayerSpec):
        raise SpecError(
            f"spec={shown(spec)} must be a LayerSpec; LayerSpec.from_dict makes one from a mapping"
        )
    settings = _checked(settings, verify)
    if backend is not None and not isinstance(backend, str):
        raise SettingsError(
            f"argument backend={shown(backend)} must be a backend's name, or scope=NAME"
        )
    resolved = resolve_device(device, settings)
    if spec.kv_source is not None:  # whose keys a layer reads changes no kernel
        spec = spec.replace(kv_source=None)
    # All that can change the answer, so that threads with other settings don't disturb each other.
    key = (spec, resolved, backend, verify, settings, generation())
    selection = _remembered.get(key)
    if selection is None:
        # Queries and keys come normed, rotated and transformed already.
        asked = kernel_spec(spec) if spec.variant or spec.rope or spec.qk_norm else spec
        if asked != spec:
            selection = select(asked, resolved, backend=backend, settings=settings, verify=verify)
            selection = prepared_for(selection, spec)
        else:
            strict = settings.with_backend(backend, "argument backend")
            verify = bool(settings.verify if verify is None else verify)
            try:
                selection = noted(_select(spec, resolved, strict, verify))
            except SelectionError as error:
                raise SelectionError(f"{error}{_less_invariant(spec, resolved, strict)}") from None
            if spec.batch_invariant:
                selection = _with_costs(selection, strict)
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = selection
    return selection


def _with_costs(selection: Selection, settings: Settings) -> Selection:
    """Note, and warn of, the backends that `batch_invariant` rules out, and what that costs."""
    spec, device = selection.spec, selection.device
    with suppress(SelectionError):
        free = select(spec.replace(batch_invariant=False), device, settings=settings, verify=False)
        lines = costs(selection, free, timings(settings).models(spec, device))
        for line in lines:
            log.warning("%s", line)
        decision = replace(selection.decision, notes=(*selection.decision.notes, *lines))
        selection = replace(selection, decision=decision)
    return selection


def _less_invariant(spec: LayerSpec, device: Device, settings: Settings) -> str:
    """Return which backends serve a layer at a lower level, or where none is named, and their times."""
    lines = []
    models = timings(settings).models(spec, device)
    if spec.batch_invariant and settings.sources:
        with suppress(SelectionError):
            able = select(spec, device, settings=replace(settings, sources=()), verify=False)
            lines.append(f"\n  where no backend is named: {described(able, models)}")
    for level in range(spec.batch_invariant - 1, -1, -1):
        with suppress(SelectionError):
            lower = spec.replace(batch_invariant=Invariance(level))
            able = select(lower, device, settings=settings, verify=False)
            name = lower.batch_invariant.name.lower()
            lines.append(f"\n  at batch_invariant={name!r}: {described(able, models)}")
            break
    return "".join(lines)


def check_supported(
    head_size: int,
    dtype: Any = "bfloat16",
    kv_cache_dtype: str = "auto",
    block_size: int | None = None,
    *,
    backend: str | None = None,
    device: Any = None,
    **fields: Any,
) -> list[str]:
    """Return why a layer can't be served, one line each; an empty list where it can.

    What vLLM's backends answer in `validate_configuration`, for one backend or for all.

    Args:
        head_size: elements of a head.
        dtype: of queries and outputs.
        kv_cache_dtype: of the cache, `"auto"` for `dtype`.
        block_size: tokens of a cache block, None for any.
        backend: as in `select`; None for any backend.
        device: as in `select`.
        fields: more of `LayerSpec`'s fields; one head for queries and keys by default.

    Raises:
        SpecError: a field isn't known or isn't possible.
        SettingsError: the backend's name isn't known.
        DeviceError: the device isn't known.

    Examples:
        >>> check_supported(128, torch.bfloat16, "auto", 16, backend="FLASH_ATTN_V3", device="h100-sxm")
        []

    """
    heads = {"num_heads": 1, "num_kv_heads": 1} | fields
    spec = LayerSpec(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        **heads,
    )
    try:
        select(spec, device, backend=backend)
    except SelectionError as error:
        return [line.strip() for line in str(error).splitlines()]
    return []


def select_for_layer(spec: LayerSpec) -> Selection:
    """Select for one layer on this machine's device, verified where that is an accelerator."""
    settings = current_settings()
    device = resolve_device(None, settings)
    verify = device.is_accelerator if settings.verify is None else settings.verify
    return select(spec, device, settings=settings, verify=verify)


def select_layers(
    specs: Iterable[LayerSpec],
    device: Any = None,
    *,
    settings: Settings | None = None,
    verify: bool | None = None,
) -> list[SelectedLayers]:
    """Select for every layer of a model, grouped by what they compute.

    Warns (logger `polyattn`) about an override whose scope matched no layer.

    Args:
        specs: one for each layer, in the model's order.
        device: as in `select`.
        settings: as in `select`.
        verify: as in `select`.

    Returns:
        One entry for each group of layers that compute the same.

    Raises:
        SpecError: `specs` isn't a list of `LayerSpec`.
        SelectionError, SettingsError, DeviceError: as `select`.

    Examples:
        >>> full = LayerSpec(num_heads=8, head_size=64)
        >>> groups = select_layers([full, full.replace(sliding_window=128), full], "x86-avx512")
        >>> [len(group.layers) for group in groups]
        [2, 1]

    """
    settings, specs = _checked(settings, verify), _listed(specs)
    groups = [
        SelectedLayers(
            spec,
            tuple(layers),
            select(spec, device, settings=settings, verify=verify),
            kv_sources(specs, layers),
            choice_sources(specs, layers),
            candidate_sources(specs, layers),
        )
        for spec, layers in group_layers(specs).items()
    ]
    for note in unmatched_overrides([g.spec for g in groups], settings):
        log.warning(note)
    return groups


def _checked(settings: Settings | None, verify: bool | None) -> Settings:
    """Return the passed settings, or else the current ones. Raises `SettingsError`."""
    if verify is not None:
        flag("argument verify", verify, SettingsError)
    if settings is None:
        return current_settings()
    if not isinstance(settings, Settings):
        raise SettingsError(f"argument settings={shown(settings)} must be Settings, or None")
    return settings


def _listed(specs: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Return a model's layers as a list. Raises `SpecError`."""
    if not isinstance(specs, Iterable):
        raise SpecError(f"specs={shown(specs)} must be a list of LayerSpec, one for each layer")
    listed = list(specs)
    for index, spec in enumerate(listed):
        if not isinstance(spec, LayerSpec):
            raise SpecError(f"specs[{index}]={shown(spec)} must be a LayerSpec")
    return listed


def unmatched_overrides(specs: Sequence[LayerSpec], settings: Settings) -> list[str]:
    """Return a line for each override that speaks of none of the layers."""
    return [
        f"{o.source}: {o} matched no layer of this model"
        for source in settings.sources
        for o in source
        if not any(o.applies(spec, phase) for spec in specs for phase in PHASE_SCOPES)
    ]


def _select(spec: LayerSpec, device: Device, settings: Settings, verify: bool) -> Selection:
    registry = discover(settings)
    failed: dict[str, str] = {}
    while True:
        facts = _facts(spec, device, registry, settings, failed)
        decision = decide(spec, device, facts, settings)
        selection = _selection(decision, facts, timings(settings))
        wrong = load_object(VERIFIER)(selection) if verify and device.is_real else {}
        if not wrong:
            break
        for name, reason in wrong.items():
            log.warning("backend %s is passed over for %s: %s", name, spec, reason)
        failed |= wrong
    left_out = [*_unset(selection.decision), *registry.problems]
    for note in selection.decision.notes:
        log.log(logging.WARNING if note in left_out else logging.INFO, "%s", note)
    log.info("selected %s for %s on %s", decision.summary(), spec, device)
    return selection


def _unset(decision: Decision) -> list[str]:
    """Return a line for each setting that backends can't honour: they are left out."""
    names: dict[str, list[str]] = {}
    for verdict in (each for step in decision.steps for each in step.verdicts):
        for rejection in verdict.rejections:
            if isinstance(rejection.supported, Unset):
                names.setdefault(rejection.supported, []).append(verdict.backend)
    return [f"without {', '.join(dict.fromkeys(n))}: {text}" for text, n in names.items()]


def _selection(decision: Decision, facts: Facts, measured: Timings) -> Selection:
    infos, spec, device = facts.backends, decision.spec, decision.device
    candidates = {n for _, names in decision.candidates for n in names}
    covering = measured.models(spec, device)
    models = tuple(m for m in covering if m.backend in candidates)
    notes = _unset(decision) + list(facts.problems) + measured.notes(spec, device, covering)
    if models and spec.batch_invariant:
        models = ()  # the fastest backend depends on the rest of the batch, and so would the bits
        notes.append(
            "batch_invariant: one backend runs all steps, whatever times were measured for each"
        )
    if models:
        sources = ", ".join(sorted({m.source for m in models}))
        backends = {m.backend for m in models}
        competing = any(len(backends.intersection(names)) > 1 for _, names in decision.candidates)
        notes.append(
            f"the backend is chosen for each step, by times measured in {sources}"
            if competing
            else f"times choose nothing: no phase has two measured candidates; they are from {sources}"
        )
    return Selection(
        replace(decision, notes=(*decision.notes, *notes)),
        tuple((phase, infos[name]) for phase, name in decision.chosen),
        tuple((phase, tuple(infos[n] for n in names)) for phase, names in decision.candidates),
        models,
    )


def _problem(check: str, functions: AttentionVariant | RowFormat) -> str | None:
    """Return the reason why a backend's check refuses these functions."""
    try:
        problem = load_object(check)(functions)
    except SpecError:
        raise
    except Exception as error:
        return f"{check} fails: {describe(error)}"
    return None if problem is None else plain(str(problem))


def _facts(
    spec: LayerSpec, device: Device, registry: Registry, settings: Settings, failed: dict[str, str]
) -> Facts:
    variant = None if spec.variant is None else variant_of(spec)
    stored = spec.kv_cache_dtype
    formats = dict.fromkeys(rows_of(stored)) if spec.in_rows else {}

    def refuses(info: BackendInfo, spec: LayerSpec) -> tuple[Rejection, ...]:
        asked: list[tuple[str, str | None, AttentionVariant | RowFormat]]
        asked = [("variant", info.variant_check, variant)] if variant is not None else []
        if stored not in info.capabilities.kv_cache_dtypes:
            asked += [("kv_cache_dtype", info.rows_check, each) for each in formats]
        rejections = []
        for field, check, functions in asked:
            problem = None if check is None else _problem(check, functions)
            if problem is not None:
                wanted = f"the functions of {functions.name}"
                rejections.append(Rejection(field, wanted, "others", problem))
        return tuple(rejections)

    seconds = settings.probe_timeout
    unavailable = partial(availability, timeout=seconds)
    models = timings(settings).models(spec, device) if spec.batch_invariant else ()
    return Facts(
        backends=as_built(registry.backends, spec, device, unavailable),
        unavailable=unavailable,
        rank=partial(rerank, registry, spec, device, seconds=seconds),
        faster_first=partial(by_times, spec, models) if models else None,
        failed=failed,
        problems=registry.problems,
        running=cache(partial(running, timeout=seconds)),  # it starts a thread
        refuses=refuses,
    )
