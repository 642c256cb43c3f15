"""What does invariance cost? Predicted times of two typical steps, with it and without it.

They also say which backend runs a layer at a level where several were measured at it.
"""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.selection.prediction import Predictor, kind_of_step
from polyattn.selection.selection import Selection
from polyattn.selection.step_choice import step_choice
from polyattn.spec.kinds import Invariance
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import TimingModel

STEPS = {
    "decode": ("a decode of 32 sequences of 4,096 keys", [1] * 32, [4096] * 32),
    "prefill": ("a prompt of 2,048 tokens", [2048], [2048]),
}
"""For each phase a step: its query lengths and its key lengths."""


def times(
    selection: Selection, models: Iterable[TimingModel]
) -> dict[str, tuple[str, float | None]]:
    """Return by phase the backend of its step in `STEPS`, and the predicted microseconds if known.

    `models`: measured times for this layer on this device, of any backends.
    """
    choice, predictor = step_choice(selection), Predictor(selection.spec, models)
    by_phase: dict[str, tuple[str, float | None]] = {}
    for phase, (_, queries, lens) in STEPS.items():
        info = selection.backend(phase)
        if info is None:
            continue
        if choice is None:
            kind = kind_of_step(queries, lens)
            shape = predictor.shape(kind, queries, lens)
            weighed = predictor.among(kind, [info.name])
            by_phase[phase] = info.name, predictor.evaluate(weighed, shape).get(info.name)
        else:
            call = choice.calls(queries, lens)[0]
            by_phase[phase] = call.name, call.times.get(call.name)
    return by_phase


def by_times(
    spec: LayerSpec, models: Iterable[TimingModel], phase: str, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return a phase's backends, those that were measured at the layer's level the fastest first.

    By the predicted times of `STEPS`. The others keep their places.
    """
    if phase not in STEPS:
        return names
    _, queries, lens = STEPS[phase]
    predictor = Predictor(spec, [m for m in models if m.level])
    kind = kind_of_step(queries, lens)
    us = predictor.evaluate(predictor.among(kind, names), predictor.shape(kind, queries, lens))
    turns = iter(sorted((name for name in names if name in us), key=us.__getitem__))
    return tuple(next(turns) if name in us else name for name in names)


def costs(invariant: Selection, free: Selection, models: Iterable[TimingModel]) -> list[str]:
    """Return a line for each phase that costs more than if bits could depend on the batch, or may.

    Another backend runs it then, or the same one by other sums, or it was measured at the level.
    `models`: as in `times`.
    """
    models, lines = tuple(models), []
    others = times(free, free.timings or models)
    measured = {(m.backend, m.kind) for m in models if m.level}
    level = invariant.spec.batch_invariant.name.lower()
    for phase, (name, us) in times(invariant, models).items():
        other, its = others[phase]
        _, queries, lens = STEPS[phase]
        unmeasured = name == other and (name, kind_of_step(queries, lens)) not in measured
        if unmeasured and invariant.spec.batch_invariant < Invariance.MACHINES:
            continue
        beside = "without it too" if name == other else f"not {other}"
        if unmeasured:  # by other sums
            us, beside = None, "by other sums than without it"
        line = f"batch_invariant={level!r} costs: {name} runs {phase}, {beside}; "
        if us is None or its is None:
            unknown = " and ".join(
                dict.fromkeys(n for n, t in ((name, us), (other, its)) if t is None)
            )
            line += f"no timing table of this device has {unknown}"
            line += "" if its is None else f" ({other}: {its:,.1f} us for {STEPS[phase][0]})"
        else:
            line += f"for {STEPS[phase][0]} {us:,.1f} us are predicted, "
            line += f"{us / its:.1f} times {its:,.1f} us"
        lines.append(line)
    return lines


def described(selection: Selection, models: Iterable[TimingModel]) -> str:
    """Return the backends of a selection, with the predicted times of `STEPS`."""
    predictions = times(selection, models)
    return ", ".join(
        f"{phase} {name} ({'not measured' if us is None else f'{us:,.1f} us for {STEPS[phase][0]}'})"
        for phase, (name, us) in predictions.items()
    )
