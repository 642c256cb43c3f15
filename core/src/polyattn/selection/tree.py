"""The decision tree: a pure function from the question and the facts to a `Decision`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyattn.device import Device
from polyattn.errors import SelectionError, SettingsError, nearest
from polyattn.registry.capabilities import Rejection, check
from polyattn.registry.extras import install_advice
from polyattn.registry.info import BackendInfo
from polyattn.selection.decision import Decision, Step, Verdict
from polyattn.selection.shared_cache import SharedCache, share_cache
from polyattn.settings import Override, Settings
from polyattn.spec.decompose import questions
from polyattn.spec.layer import AttentionKind, LayerSpec

Availability = Callable[[BackendInfo], str | None]
Rank = Callable[[str, tuple[str, ...]], Sequence[str]]


@dataclass(frozen=True)
class Facts:
    """All that the tree may know beside the question.

    `unavailable(info)` says why a backend can't run on this machine (always None for a profile),
    `failed` which backends were found wrong by verification, `rank` lets policy plugins re-rank.
    """

    backends: Mapping[str, BackendInfo]
    unavailable: Availability
    rank: Rank
    failed: Mapping[str, str]
    problems: tuple[str, ...] = ()


def decide(spec: LayerSpec, device: Device, facts: Facts, settings: Settings) -> Decision:
    """Walk the five steps. Raises `SelectionError` with every rejection, `SettingsError`."""
    phases = ("prefill", "decode") if spec.role.has_cache else ("prefill",)
    notes = list(settings.notes)
    named = {p: _named(spec, p, facts, settings, notes) for p in phases}
    steps = [_named_step(named), *_family_steps(spec)]
    family = _family(spec, phases, facts)
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
        able = _family(spec, (phase,), facts)
        candidates = [b for b in here if b in able]
        if override:
            candidates = [facts.backends[override.backend]]
        judged = _judge(candidates, spec, device, phase, facts)
        verdicts += judged
        ranking[phase] = _ranked(judged, phase, facts)
        if override and not ranking[phase]:
            raise SelectionError(_named_failure(override, spec, device, phase, judged[0], facts))
    trace = (*steps, Step("Who can?", _answer(ranking), tuple(verdicts)))
    if not all(ranking.values()):
        raise SelectionError(_nobody(spec, device, trace, facts))
    if len(phases) == 1:
        return Decision(
            spec, device, trace, ranking["prefill"][0].name, None, "NHD", None, (None, None),
            tuple(notes),
        )  # fmt: skip
    if spec.kind.is_recurrent:  # a state has one form: any two backends share it
        return Decision(
            spec, device, trace, ranking["prefill"][0].name, ranking["decode"][0].name, "NHD", None,
            (None, None), tuple(notes),
        )  # fmt: skip
    prefill, decode, shared = _best_pair(spec, device, ranking, settings, named)
    return Decision(
        spec, device, trace, prefill.name, decode.name, shared.layout, shared.block_size,
        shared.kernel_sizes, tuple(notes),
    )  # fmt: skip


def _named(
    spec: LayerSpec, phase: str, facts: Facts, settings: Settings, notes: list[str]
) -> Override | None:
    override = settings.override(spec, phase)
    if override is None:
        return None
    info = facts.backends.get(override.backend)
    if info is None:
        known = nearest(override.backend, facts.backends)
        problems = "".join(f"\n  note: {text}" for text in facts.problems)
        raise SettingsError(
            f"{override.source}: backend {override.backend!r} is unknown{known}{problems}"
        )
    kinds = info.capabilities.kinds
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
    return {question.kind for question in questions(spec, phase)}


def _family(spec: LayerSpec, phases: Sequence[str], facts: Facts) -> list[BackendInfo]:
    """The backends of the kinds that these phases of a layer come down to."""
    kinds = set().union(*(_asked(spec, phase) for phase in phases))
    return [b for b in facts.backends.values() if kinds & b.capabilities.kinds]


def _named_step(named: Mapping[str, Override | None]) -> Step:
    said = [f"{phase}: {o.backend} (by {o.source})" for phase, o in named.items() if o]
    return Step("Did the user name a backend?", "; ".join(said) or "no")


def _family_steps(spec: LayerSpec) -> list[Step]:
    latent = "no"
    if spec.latent is not None:
        latent = f"yes: {spec.kind.value}; absorbed, MQA over a latent of {spec.latent.size}"
        if spec.kind is AttentionKind.MLA:
            latent += f"; its prefill expanded, MHA of {spec.head_size}/{spec.v_head_size}"
    recurrent = f"yes: {spec.kind.value}" if spec.kind.is_recurrent else "no"
    return [Step("Is it MLA?", latent), Step("Is it something else than attention?", recurrent)]


def _judge(
    candidates: Sequence[BackendInfo],
    spec: LayerSpec,
    device: Device,
    phase: str,
    facts: Facts,
) -> list[Verdict]:
    judged = []
    for info in candidates:
        asked = questions(spec, phase)
        rejections = tuple(
            dict.fromkeys(r for q in asked for r in check(info.capabilities, q, device, phase))
        )
        if not rejections and device.is_real:
            rejections = _machine_rejections(info, facts)
        priority = info.priority(asked[0], device, phase)
        proof = info.proof_on(device).value
        judged.append(Verdict(info.name, phase, priority.score, rejections, priority.why, proof))
    return sorted(judged, key=lambda v: (not v.accepted, -v.score, v.backend))


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
    pairs = [
        ((p + d, prefill is not decode, d), prefill, decode)
        for p, prefill in enumerate(ranking["prefill"])
        for d, decode in enumerate(ranking["decode"])
    ]
    refused: list[Rejection] = []
    for _, prefill, decode in sorted(pairs, key=lambda pair: pair[0]):
        # An MLA prefill works on keys and values that it makes for itself: only decode has the cache.
        apart = spec.kind is AttentionKind.MLA
        shared = share_cache(spec, decode if apart else prefill, decode, settings.layout)
        if isinstance(shared, SharedCache):
            return prefill, decode, shared
        refused.append(shared)
    who = "the backends that were named" if any(named.values()) else "no pair of backends"
    raise SelectionError(
        f"{who} can share one cache for {spec} on {device}:"
        + "".join(f"\n  {rejection}" for rejection in refused)
    )


def _answer(ranking: Mapping[str, list[BackendInfo]]) -> str:
    return "; ".join(
        f"{phase}: {', '.join(b.name for b in infos) or 'nobody'}"
        for phase, infos in ranking.items()
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


def _nobody(spec: LayerSpec, device: Device, trace: Sequence[Step], facts: Facts) -> str:
    text = f"no installed backend can serve {spec} on {device}:"
    verdicts = [v for step in trace for v in step.verdicts if not v.accepted]
    for verdict in verdicts:
        text += f"\n  {verdict.backend} for {verdict.phase}:"
        text += "".join(f"\n    {rejection}" for rejection in verdict.rejections)
    if not verdicts:
        text += f"\n  none is for {spec.kind.value} layers on platform {device.platform}"
        here = any(device.platform in b.capabilities.platforms for b in facts.backends.values())
        if not here:
            text += f"; {install_advice(device.platform)}"
    return text + "".join(f"\n  note: {problem}" for problem in facts.problems)
