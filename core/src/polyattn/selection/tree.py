"""The decision tree: a pure function from the question and the facts to a `Decision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from polyattn.device import Device
from polyattn.errors import SelectionError, SettingsError
from polyattn.registry.capabilities import ANY_PLATFORM, SERVICES, Rejection, check
from polyattn.registry.catalogue import install_advice
from polyattn.registry.info import BackendInfo
from polyattn.registry.names import backend_named, not_a_backend
from polyattn.selection.cache_format import SharedCache, format_of, share_cache, walks
from polyattn.selection.selection import Decision, Step, Verdict
from polyattn.settings import Override, Settings
from polyattn.spec.decompose import asked_phase, by_token, questions, sparse_blocks
from polyattn.spec.kinds import AttentionKind, GraphCapture, Invariance, Role
from polyattn.spec.layer import LayerSpec

Availability = Callable[[BackendInfo], str | None]
Rank = Callable[[str, tuple[str, ...]], Sequence[str]]


@dataclass(frozen=True)
class Facts:
    """All facts that the tree needs beside the question.

    `unavailable(info)` returns why a backend can't run on this machine (always None for a profile);
    `refuses(info, spec)` why a backend can't serve the layer's functions; `running(info.runs)` what of
    a backend runs here. `failed` has the backends that verification found wrong. `faster_first` orders a
    phase's backends by measured times, None where none count. `rank` lets policy plugins change the
    order.
    """

    backends: Mapping[str, BackendInfo]
    unavailable: Availability
    rank: Rank
    failed: Mapping[str, str]
    faster_first: Rank | None = None
    problems: Sequence[str] = ()
    running: Callable[[str | None], str] = lambda path: ""
    refuses: Callable[[BackendInfo, LayerSpec], tuple[Rejection, ...]] = lambda info, spec: ()


def phases_of(spec: LayerSpec) -> tuple[str, ...]:
    """Return the phases of a layer, each of which needs a backend."""
    if spec.recurrent is not None:
        return ("prefill", "decode")
    index = ("index",) if spec.indexer is not None else ()
    return ("prefill", "decode", "store", "merge", *index) if spec.cached else ("prefill",)


def decide(spec: LayerSpec, device: Device, facts: Facts, settings: Settings) -> Decision:
    """Walk the decision tree. Raises `SelectionError` with every rejection, and `SettingsError`."""
    settings = _by_own_names(device, facts, settings)
    try:
        return _decide(spec, device, facts, settings)
    except SelectionError as error:
        strict = settings.without_optional()
        if strict == settings:
            raise
        why = " ".join(line.strip() for line in str(error).splitlines()[:2])
        return _decide(spec, device, facts, strict.noting(f"{why}; the selector chooses instead"))


def _decide(spec: LayerSpec, device: Device, facts: Facts, settings: Settings) -> Decision:
    phases = phases_of(spec)
    notes = list(settings.notes)
    named = {p: _named(spec, p, facts, settings, notes) for p in phases}
    steps = [_named_step(named), *_family_steps(spec)]
    family = [
        b for b in _family(spec, phases, facts) if b.capabilities.attends and not b.by_name_only
    ]
    here = [b for b in family if device.platform in b.capabilities.platforms]
    steps.append(
        Step(
            "Which platform?",
            f"{device.platform} {device.arch}: {len(here)} of {len(family)} backends of this kind",
        )
    )
    ranking: dict[str, list[BackendInfo]] = {}
    verdicts: list[Verdict] = []
    for phase in phases:
        override = named[phase]
        candidates = [b for b in _family(spec, (phase,), facts) if _is_here(b, device)]
        candidates = [b for b in candidates if not b.by_name_only]
        if override:
            candidates = [facts.backends[override.backend]]
        judged = _judge(candidates, spec, device, phase, facts)
        verdicts += judged
        ranking[phase] = _ranked(judged, phase, facts)
        if override and not ranking[phase]:
            raise SelectionError(_named_failure(override, spec, device, phase, judged[0], facts))
    if _needs_one_backend(spec):
        ranking = _by_one(ranking)
    if spec.batch_invariant >= Invariance.CALLS and not spec.cached and ranking["prefill"]:
        ranking["prefill"] = _by_the_cached(spec, device, ranking["prefill"], facts, settings)
    trace = (*steps, Step("Which backends can?", _answer(ranking), tuple(verdicts)))
    if not all(ranking.values()):
        raise SelectionError(_none_can(spec, device, trace, facts))
    if spec.recurrent is not None or not spec.cached:  # any two backends share a state, or nothing
        chosen = tuple((phase, infos[0].name) for phase, infos in ranking.items())
        return Decision(spec, device, trace, chosen, _names(ranking), notes=tuple(notes))
    return _over_one_cache(spec, device, trace, ranking, settings, named, tuple(notes))


def _needs_one_backend(spec: LayerSpec) -> bool:
    """Whether other rows of a step can decide if a row is prefill's or decode's.

    They can where steps are planned by bounds, which gather no rows, and where a captured step's first
    rows are prompts of any length.
    """
    if spec.batch_invariant >= Invariance.STEPS:
        return True
    any_rows = spec.length_bounds or spec.graph_capture is GraphCapture.ANY
    return bool(spec.batch_invariant) and any_rows


def _by_one(ranking: Mapping[str, list[BackendInfo]]) -> dict[str, list[BackendInfo]]:
    """Return the rankings without backends that serve one of prefill and decode alone."""
    phases = [phase for phase in ("prefill", "decode") if phase in ranking]
    both = set.intersection(*({b.name for b in ranking[phase]} for phase in phases))
    order = [b for b in ranking[phases[-1]] if b.name in both]
    return {**ranking, **dict.fromkeys(phases, order)}


def _by_the_cached(
    spec: LayerSpec, device: Device, ranking: list[BackendInfo], facts: Facts, settings: Settings
) -> list[BackendInfo]:
    """Return the backend that serves the same layer over a cache: a layer without one has its bits."""
    if spec.role is not Role.DECODER or not spec.causal:
        return ranking
    prefill = dict(_decide(spec.replace(cached=True), device, facts, settings).chosen)["prefill"]
    return [b for b in ranking if b.name == prefill]


def _over_one_cache(
    spec: LayerSpec,
    device: Device,
    trace: tuple[Step, ...],
    ranking: Mapping[str, list[BackendInfo]],
    settings: Settings,
    named: Mapping[str, Override | None],
    notes: tuple[str, ...],
) -> Decision:
    prefill, decode, shared = _best_pair(spec, device, ranking, settings, named)
    fitting = {
        phase: [b for b in infos if _fits(b, phase, spec, shared)]
        for phase, infos in ranking.items()
    }
    # An MLA prefill works on keys and values that it makes for itself: it never sees the cache.
    walking: tuple[str, ...] = (
        ("decode",) if spec.kind is AttentionKind.MLA else ("decode", "prefill")
    )
    if (
        spec.kind is AttentionKind.SPARSE
    ):  # its pages are views of the cache, over blocks of any size
        walking = ()
    sizes = {
        b.name: walks(b, shared.layout, shared.block_size) or shared.block_size
        for phase in walking
        for b in fitting[phase]
    }
    if not fitting["store"]:
        store = ranking["store"][0]
        raise SelectionError(
            f"{store.name} can't store into the cache of {prefill.name} with {decode.name}: layout "
            f"{shared.layout}, block size {shared.block_size}; name another backend for store"
        )
    chosen = (
        ("prefill", prefill.name),
        ("decode", decode.name),
        ("store", fitting["store"][0].name),
        *((phase, ranking[phase][0].name) for phase in ("merge", "index") if phase in ranking),
    )
    cache = format_of(spec, device, shared.layout, shared.block_size)
    return Decision(
        spec, device, trace, chosen, _names(fitting), cache, tuple(sizes.items()), notes
    )


def _fits(info: BackendInfo, phase: str, spec: LayerSpec, shared: SharedCache) -> bool:
    """Whether a backend can work on the cache that was settled."""
    if phase in ("merge", "index") or (phase == "prefill" and spec.kind is AttentionKind.MLA):
        return True
    if spec.kind is AttentionKind.SPARSE and phase != "store":
        return True
    return walks(info, shared.layout, shared.block_size) is not None


def _names(ranking: Mapping[str, list[BackendInfo]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((phase, tuple(b.name for b in infos)) for phase, infos in ranking.items())


def _is_here(info: BackendInfo, device: Device) -> bool:
    return bool({device.platform, ANY_PLATFORM} & info.capabilities.platforms.keys())


def _by_own_names(device: Device, facts: Facts, settings: Settings) -> Settings:
    """Return the settings with each backend by its own name; notes say which aliases were used.

    Raises `SettingsError` for a name that no backend has, in every scope.
    """
    names: dict[str, str] = {}
    for override in (o for source in settings.sources for o in source):
        name = backend_named(override.backend, facts.backends)
        if name is not None:
            names[override.backend] = name
            continue
        what = not_a_backend(override.backend, facts.backends, device.platform)
        own = f" {override.backend!r} is claimed by "
        what = next((f"isn't usable: {line}" for line in facts.problems if own in line), what)
        text = f"{override.source}: backend {override.backend!r} {what}"
        if not override.optional:
            raise SettingsError(text + "".join(f"\n  note: {line}" for line in facts.problems))
        settings = settings.without_optional().noting(f"{text}; the selector chooses instead")
    return settings.renamed(names)


def _named(
    spec: LayerSpec, phase: str, facts: Facts, settings: Settings, notes: list[str]
) -> Override | None:
    override = settings.override(spec, phase)
    if override is None:
        return None
    if phase in SERVICES and phase not in override.scope:
        return None  # a name for the attention doesn't apply to stores and merges
    kinds = facts.backends[override.backend].capabilities.kinds
    recurrent = any(kind.is_recurrent for kind in kinds)
    strict = override.scope or override.source == "argument backend"
    what = None
    if not strict and recurrent != spec.kind.is_recurrent:
        what = f"{spec.kind.value} layers"
    elif phase not in override.scope and not _asked(spec, phase) & kinds:
        other = "decode" if phase == "prefill" else "prefill"
        if _asked(spec, other) & kinds:  # an MLA layer's phases are of two kinds
            what = f"the {phase} of {spec.kind.value} layers"
    if what is None:
        return override
    note = f"{override.source}={override} does not apply to {what}"
    if note not in notes:
        notes.append(note)
    return None


def _asked(spec: LayerSpec, phase: str) -> set[AttentionKind]:
    ways = (frozenset[AttentionKind](), frozenset(AttentionKind))
    return {question.kind for kinds in ways for question in questions(spec, phase, kinds=kinds)}


def _family(spec: LayerSpec, phases: Sequence[str], facts: Facts) -> list[BackendInfo]:
    """The backends of the kinds that these phases of a layer come down to.

    A store or a merge is a candidate for its own phase alone.
    """
    asked = {phase: _asked(spec, phase) for phase in phases}

    def takes(info: BackendInfo, phase: str) -> bool:
        caps = info.capabilities
        role = phase in caps.phases if phase in SERVICES else caps.attends
        return role and not asked[phase].isdisjoint(caps.kinds)

    return [b for b in facts.backends.values() if any(takes(b, phase) for phase in phases)]


def _named_step(named: Mapping[str, Override | None]) -> Step:
    names = [f"{phase}: {o.backend} (by {o.source})" for phase, o in named.items() if o]
    return Step("Did the user name a backend?", "; ".join(names) or "no")


def _family_steps(spec: LayerSpec) -> list[Step]:
    latent = "no"
    if spec.latent is not None:
        latent = f"yes: {spec.kind.value}; absorbed, MQA over a latent of {spec.latent.size}"
        if by_token(spec):
            latent += "; each token a decode"
        elif spec.kind is AttentionKind.MLA:
            latent += f"; its prefill expanded, MHA of {spec.head_size}/{spec.v_head_size}"
    recurrent = "no" if spec.recurrent is None else f"yes: {spec.kind.value}"
    steps = [Step("Is it MLA?", latent), Step("Is it something other than attention?", recurrent)]
    if spec.kind is AttentionKind.SPARSE:
        assert spec.sparse is not None
        size = sparse_blocks(spec)[1]
        each = "no" if spec.sparse.newest else "yes"
        answer = f"{each}: {spec.sparse}; each token a decode over its pages of {size}, as MQA"
        steps.append(Step("Does each call choose the keys?", answer))
    if spec.chooses:
        steps.append(Step("Which indexer chooses the keys?", _chooser(spec)))
    return steps


def _chooser(spec: LayerSpec) -> str:
    """Return the indexer that chooses, and the bytes of its index for a token of context."""
    if spec.indexer is None:
        return "another layer's indexer, or the caller"
    size, m = spec.indexer.key_bytes(spec.dtype), spec.indexer.tokens_per_entry
    each = f"{m} tokens" if m > 1 else "token"
    return f"its indexer, {spec.indexer}; {size} bytes of index key for each {each} of context"


def _judge(
    candidates: Sequence[BackendInfo],
    spec: LayerSpec,
    device: Device,
    phase: str,
    facts: Facts,
) -> list[Verdict]:
    judged = []
    for info in candidates:
        rejections = _rejections(info, spec, device, phase)
        if not rejections:
            rejections = facts.refuses(info, spec)
        if not rejections and device.is_real:
            rejections = _machine_rejections(info, facts)
        asked = questions(spec, phase, device.is_accelerator, info.capabilities.kinds)[0]
        priority = info.priority(asked, device, asked_phase(spec, phase))
        runs = facts.running(info.runs) if device.is_real and not rejections else ""
        proof, record = info.proven(device.arch, device.platform, runs)
        result = ""
        if record is not None:  # by name: an installed wheel doesn't have the file
            name = record.path.removeprefix("benchmarks/results/").removesuffix(".json")
            result = f"{record.text}, {name}"
        judged.append(
            Verdict(
                info.name, phase, priority.score, rejections, priority.why, proof.value, info.build, runs,
                result,
            )
        )  # fmt: skip
    return sorted(judged, key=lambda v: (not v.accepted, -v.score, v.backend))


def _rejections(
    info: BackendInfo, spec: LayerSpec, device: Device, phase: str
) -> tuple[Rejection, ...]:
    """Return all that a backend's claims have against a phase of the layer, each once."""
    caps, served = info.capabilities, asked_phase(spec, phase)
    asked = questions(spec, phase, device.is_accelerator, caps.kinds)
    return tuple(dict.fromkeys(r for q in asked for r in check(caps, q, device, served)))


def _machine_rejections(info: BackendInfo, facts: Facts) -> tuple[Rejection, ...]:
    reason = facts.unavailable(info)
    if reason:
        return (Rejection("available", "ready on this machine", reason, info.install),)
    if info.name in facts.failed:
        return (Rejection("verified", "right on a tiny batch", facts.failed[info.name]),)
    return ()


def _ranked(judged: Sequence[Verdict], phase: str, facts: Facts) -> list[BackendInfo]:
    ranking = tuple(v.backend for v in judged if v.accepted)
    if len(ranking) > 1:
        if facts.faster_first is not None:
            ranking = tuple(facts.faster_first(phase, ranking))
        ranking = tuple(facts.rank(phase, ranking))
    return [facts.backends[name] for name in ranking]


def _best_pair(
    spec: LayerSpec,
    device: Device,
    ranking: Mapping[str, list[BackendInfo]],
    settings: Settings,
    named: Mapping[str, Override | None],
) -> tuple[BackendInfo, BackendInfo, SharedCache]:
    """Choose both phases together: they share one cache.

    The pair with the lowest sum of ranks wins; at a tie one backend for both, then the better
    decode, where a serving engine spends most of its steps.
    """
    refused: list[Rejection] = []
    for prefill, decode in _by_rank(ranking["prefill"], ranking["decode"]):
        # An MLA prefill works on keys and values that it makes for itself: only decode has the cache.
        apart = spec.kind is AttentionKind.MLA
        shared = share_cache(spec, device, decode if apart else prefill, decode, settings.layout)
        if isinstance(shared, SharedCache):
            return prefill, decode, shared
        refused.append(shared)
    who = "no pair of backends" + (" with those that were named" if any(named.values()) else "")
    raise SelectionError(
        f"{who} can share one cache for {spec} on {device}:"
        + "".join(f"\n  {rejection}" for rejection in refused)
    )


def _by_rank(
    prefills: Sequence[BackendInfo], decodes: Sequence[BackendInfo]
) -> Iterator[tuple[BackendInfo, BackendInfo]]:
    """Yield pairs by the sum of their ranks; at a tie one backend for both, then the better decode."""
    for total in range(len(prefills) + len(decodes) - 1):
        alike = [
            (prefills[total - d], decode)
            for d, decode in enumerate(decodes)
            if 0 <= total - d < len(prefills)
        ]
        yield from [pair for pair in alike if pair[0] is pair[1]]
        yield from [pair for pair in alike if pair[0] is not pair[1]]


def _answer(ranking: Mapping[str, list[BackendInfo]]) -> str:
    return "; ".join(
        f"{phase}: {', '.join(b.name for b in infos) or 'none'}" for phase, infos in ranking.items()
    )


def _named_failure(
    override: Override,
    spec: LayerSpec,
    device: Device,
    phase: str,
    verdict: Verdict,
    facts: Facts,
) -> str:
    text = f"{override.source} names {override.backend} for {phase}, which can't serve {spec}"
    text += f" on {device}:" + "".join(f"\n  {rejection}" for rejection in verdict.rejections)
    family = _family(spec, (phase,), facts)
    able = [v.backend for v in _judge(family, spec, device, phase, facts) if v.accepted]
    nearest_able = f"{able[0]} can" if able else "no installed backend can"
    return f"{text}\n  {nearest_able}; a named backend never falls back in silence"


def _by_name(spec: LayerSpec, device: Device, trace: Sequence[Step], facts: Facts) -> list[str]:
    """Return the by-name-only backends that serve the phases no other does; [] if a phase is left."""
    served = {v.phase for step in trace for v in step.verdicts if v.accepted}
    lines: list[str] = []
    for phase in (p for p in phases_of(spec) if p not in served):
        able = [
            info.name
            for info in _family(spec, (phase,), facts)
            if info.by_name_only and not _rejections(info, spec, device, phase)
        ]
        if not able:
            return []
        lines += [name for name in able if name not in lines]
    return lines


def _none_can(spec: LayerSpec, device: Device, trace: Sequence[Step], facts: Facts) -> str:
    text = f"no installed backend can serve {spec} on {device}:"
    verdicts = [v for step in trace for v in step.verdicts if not v.accepted]
    phases: dict[tuple[str, ...], list[str]] = {}
    for verdict in verdicts:
        phases.setdefault((verdict.backend, *map(str, verdict.rejections)), []).append(
            verdict.phase
        )
    for (backend, *reasons), equal in phases.items():
        text += f"\n  {backend} for {' and '.join(equal)}:"
        text += "".join(f"\n    {reason}" for reason in reasons)
    by_name = _by_name(spec, device, trace, facts)
    if by_name:
        text += (
            f"\n  {' and '.join(by_name)} can, slowly, and only where named: backend={by_name[0]!r}"
        )
    if not verdicts:
        text += f"\n  none is for {spec.kind.value} layers on platform {device.platform}"
        claims = [b.capabilities for b in facts.backends.values()]
        here = any(device.platform in c.platforms and c.attends for c in claims)
        if not here:
            text += f"; {install_advice(device.platform)}"
    return text + "".join(f"\n  note: {problem}" for problem in facts.problems)


def as_built(
    backends: Mapping[str, BackendInfo],
    spec: LayerSpec,
    device: Device,
    unavailable: Callable[[BackendInfo], str | None],
) -> dict[str, BackendInfo]:
    """Return the backends; one of several builds becomes the build that counts for `spec` on `device`.

    That is the first installed build that claims the device's platform and can serve the layer, else
    the first of them. If none is installed, the backend stays as declared, with the preferred build's
    claims. The only build of a platform has no name.
    """
    return {
        name: _build(info, spec, device, unavailable) if info.variants else info
        for name, info in backends.items()
    }


def _build(
    info: BackendInfo,
    spec: LayerSpec,
    device: Device,
    unavailable: Callable[[BackendInfo], str | None],
) -> BackendInfo:
    there, preferred = info.builds_on(device.platform), info.builds[0]
    chosen = preferred
    if device.is_real and there:
        here = [build for build in there if unavailable(build) is None]
        able = [build for build in here if _serves(build, spec, device)]
        absent = info if len(there) > 1 else preferred
        chosen = (able or here or [absent])[0]
    return replace(chosen, build="") if len(there) == 1 else chosen


def _serves(build: BackendInfo, spec: LayerSpec, device: Device) -> bool:
    """Whether a build can serve some phase of the layer."""
    return any(
        not _rejections(build, spec, device, phase)
        for phase in build.capabilities.phases & {"prefill", "decode"}
    )
