"""Is a chosen backend right on this machine? One tiny batch of each phase against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from polyattn.checking.compare import lse_error, output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.errors import PolyattnError, describe
from polyattn.registry.info import load_object
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.trial import Outcome
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec


def verify_decision(selection: Selection) -> dict[str, str]:
    """Return, for each backend that may run and fails or is wrong here, what happened.

    Who may run are the chosen ones, and where times were measured every candidate that has some.
    """
    wrong: dict[str, str] = {}
    chosen, candidates = dict(selection.backends), dict(selection.candidates)
    timed = {model.backend for model in selection.timings}
    pair = replace(selection, timings=())
    for phase in ("prefill", "decode"):
        for info in dict.fromkeys((*filter(None, [chosen.get(phase)]), *candidates.get(phase, ()))):
            mine = chosen.get(phase) == info
            if info.name not in wrong and (mine or info.name in timed):
                problem = _problem(pair if mine else selection.alone(info.name), phase)
                if problem:
                    wrong[info.name] = f"{phase}: {problem}"
    return wrong


def _problem(selection: Selection, phase: str) -> str | None:
    spec = selection.spec
    # A source of its own: torch's generators are the user's.
    generator = torch.Generator().manual_seed(random.SystemRandom().randrange(2**31))
    try:
        with torch.no_grad():
            run = load_object(f"polyattn.families.{spec.kind.family}.trial:run_trial")
            return _difference(spec, run(LayerGroup(selection), phase, generator))
    except PolyattnError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # whatever a vendor's library does isn't our end
        return describe(error)


def _difference(spec: LayerSpec, outcome: Outcome) -> str | None:
    limit = tolerance_of(spec)
    pairs = [("output", outcome.out, outcome.expected)]
    if outcome.state is not None and outcome.expected_state is not None:
        pairs.append(("state", outcome.state, outcome.expected_state))
    for what, found, expected in pairs:
        error = output_error(found, expected)
        if not error <= limit.output:
            return f"its {what} is wrong: relative error {error:.2g}, allowed {limit.output:g}"
    if outcome.lse is not None and outcome.expected_lse is not None:
        error = lse_error(outcome.lse, outcome.expected_lse)
        if not error <= limit.lse:
            return f"its LSE is wrong: error {error:.2g}, allowed {limit.lse:g}"
    return None
