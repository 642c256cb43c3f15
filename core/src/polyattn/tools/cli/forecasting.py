"""How long would a step take on each backend? `explain --batch`: predicted times by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyattn.selection.prediction import Predictor, Price, StepShape
from polyattn.selection.selection import Selection
from polyattn.selection.step_choice import ALL, DECODES, REST, CallChoice, step_choice
from polyattn.spec.timing import TERMS
from polyattn.tools.cli.output import print_rows, say

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

    def prices(call: CallChoice) -> dict[str, Price]:
        return others.prices(others.among(call.kind, able[call.phase]), _shape(others, call, rows))

    def terms(call: CallChoice, name: str) -> dict[str, float]:
        for weighed in call.candidates:
            if weighed.name == name:
                return choice.predictor.terms(weighed.kind, name, call.shape)
        return others.terms(call.kind, name, _shape(others, call, rows))

    def candidates(call: CallChoice, known: Mapping[str, Price]) -> list[dict[str, Any]]:
        times = {n: price.us for n, price in known.items()} | dict(call.times)
        return [
            {
                "backend": n,
                "us": us,
                "host": known[n].host if n in known else 0.0,
                "terms": terms(call, n),
            }
            for n, us in sorted(times.items(), key=lambda item: item[1])
        ]

    def why(call: CallChoice, known: Mapping[str, Price]) -> str:
        alone = {n: max(price.us, price.host) for n, price in known.items()}
        return _why(call, {**alone, **call.prices})

    predicted = [
        {
            "rows": call.rows,
            "phase": call.phase,
            "kind": call.kind,
            "backend": call.name,
            "shape": {n: v for n, v in call.shape._asdict().items() if n != "dealt"},
            "candidates": candidates(call, known),
            "why": why(call, known),
        }
        for call, known in ((call, prices(call)) for call in calls)
    ]
    return {
        "calls": predicted,
        "chosen": {c.rows: c.name for c in calls},
        "why": _host_bound(calls),
    }


def _shape(predictor: Predictor, call: CallChoice, rows: Sequence[tuple[int, int]]) -> StepShape:
    """Return a call's shape as another predictor's models look at it."""
    ones = {ALL: (True, False), DECODES: (True,), REST: (False,)}[call.rows]
    of = [row for row in rows if (row[0] == 1) in ones]
    return predictor.shape(call.kind, [q for q, _ in of], [n for _, n in of])


def _host_bound(calls: Sequence[CallChoice]) -> str:
    """Print a note if the host's time to queue calls bounds the step."""
    device = sum(call.times.get(call.name, 0.0) for call in calls)
    step = calls[0].prices.get(calls[0].name, 0.0)
    if step <= device:
        return ""
    return (
        f"the host needs {step:.0f} us a layer, and the device {device:.0f}: the host's time counts"
    )


def _why(call: CallChoice, prices: Mapping[str, float]) -> str:
    others = sorted((us, name) for name, us in prices.items() if name != call.name)
    if call.name not in call.times:
        return f"{call.name} by priority: its {call.kind} steps were not measured"
    if not others:
        return f"{call.name} alone was measured at {call.kind} steps"
    us, name = others[0]
    own = prices[call.name]
    if name not in call.times and us < own:
        return f"{call.name}, as named: {own / us:.2f} times the time of {name}"
    if us < own:
        return f"{call.name}, the fastest on the whole: {name} isn't faster by its margin"
    return f"{call.name}: {name} would take {us / own:.2f} times as long"


def print_forecast(text: str, prediction: dict[str, Any]) -> None:
    """Print a step's calls, the fastest backend of each first."""
    say(f"batch {text}:")
    if prediction["why"]:
        say(f"  {prediction['why']}")
    for call in prediction["calls"]:
        shape = call["shape"]
        say(
            f"  {call['kind']}, {call['rows']}: {shape['rows']} rows, {shape['queries']} query tokens, "
            f"{shape['keys']} keys, longest {shape['longest']} => {call['why']}"
        )
        if not call["candidates"]:
            continue
        columns = {"  backend": "  {backend}", ">us": "{us:.1f}"}
        if any(row["host"] for row in call["candidates"]):
            columns[">host"] = "{host:.1f}"
        columns |= {f">{term}": f"{{terms[{term}]:.1f}}" for term in TERMS}
        print_rows(columns, call["candidates"])
