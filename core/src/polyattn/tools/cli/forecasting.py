"""How long would a step take on each backend? `explain --batch`: predicted times by term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn.selection.prediction import Predictor
from polyattn.selection.selection import Selection
from polyattn.selection.step_choice import CallChoice, step_choice
from polyattn.spec.timing import TERMS
from polyattn.tools.cli.output import add_row, console, table

UNMEASURED = "no timing table for this device covers this layer"


def forecast(
    selection: Selection, rows: list[tuple[int, int]], free: Selection | None = None
) -> dict[str, Any]:
    """Return the calls of a step with each candidate's predicted microseconds by term.

    `free`: what is selected where the user names no backend; its candidates are shown, too.
    """
    choice = step_choice(selection)
    if choice is None:
        chosen = {p: n for p, n in selection.decision.chosen if p in ("prefill", "decode")}
        named = ", ".join(f"{phase} {name}" for phase, name in chosen.items())
        return {"calls": [], "chosen": chosen, "why": f"by priority {named}: {UNMEASURED}"}
    calls = choice.calls([q for q, _ in rows], [n for _, n in rows])

    others = Predictor(selection.spec, (free or selection).timings)
    able = {phase: [i.name for i in infos] for phase, infos in (free or selection).candidates}

    def times(call: CallChoice) -> dict[str, float]:
        weighed = others.among(call.kind, able[call.phase])
        return {**others.evaluate(weighed, call.shape), **call.times}

    def candidates(call: CallChoice) -> list[dict[str, Any]]:
        return [
            {
                "backend": n,
                "us": us,
                "terms": (choice.predictor if n in call.times else others).terms(
                    call.kind, n, call.shape
                ),
            }
            for n, us in sorted(times(call).items(), key=lambda item: item[1])
        ]

    predicted = [
        {
            "rows": call.rows,
            "phase": call.phase,
            "kind": call.kind,
            "backend": call.name,
            "shape": call.shape._asdict(),
            "candidates": candidates(call),
            "why": _why(call, times(call)),
        }
        for call in calls
    ]
    return {"calls": predicted, "chosen": {c.rows: c.name for c in calls}, "why": ""}


def _why(call: CallChoice, times: Mapping[str, float]) -> str:
    others = sorted((us, name) for name, us in times.items() if name != call.name)
    if call.name not in call.times:
        return f"{call.name} by priority: its {call.kind} steps were not measured"
    if not others:
        return f"{call.name} alone was measured at {call.kind} steps"
    us, name = others[0]
    if name not in call.times and us < call.times[call.name]:
        return f"{call.name}, as named: {call.times[call.name] / us:.2f} times the time of {name}"
    if us < call.times[call.name]:
        return f"{call.name}, the fastest on the whole: {name} isn't faster by its margin"
    return f"{call.name}: {name} would take {us / call.times[call.name]:.2f} times as long"


def print_forecast(text: str, prediction: dict[str, Any]) -> None:
    """Print a step's calls, the fastest backend of each first."""
    console.print(f"batch {text}:", markup=False, highlight=False)
    if prediction["why"]:
        console.print(f"  {prediction['why']}", markup=False, highlight=False)
    for call in prediction["calls"]:
        shape = call["shape"]
        console.print(
            f"  {call['kind']}, {call['rows']}: {shape['rows']} rows, {shape['queries']} query tokens, "
            f"{shape['keys']} keys, longest {shape['longest']} => {call['why']}",
            markup=False,
            highlight=False,
        )
        if not call["candidates"]:
            continue
        rows = table("  backend", ">us", *(f">{term}" for term in TERMS))
        for row in call["candidates"]:
            terms = [f"{row['terms'][term]:.1f}" for term in TERMS]
            add_row(rows, f"  {row['backend']}", f"{row['us']:.1f}", *terms)
        console.print(rows)
