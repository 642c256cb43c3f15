"""Is a chosen backend right on this machine? One tiny batch of each phase against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from polyattn.errors import PolyattnError, describe
from polyattn.runtime.group import LayerGroup
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec
from polyattn.workload.base import workload
from polyattn.workload.steps import Lengths

LONGEST_PROMPT = 512
"""Queries of the longest prompt: the reference holds all its scores in float64."""
FARTHEST = 1 << 14
"""Keys beyond which a window, a chunk or kept tokens are taken for none at all."""


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
    try:
        with torch.no_grad():
            group = LayerGroup(selection)
            block = 16 if group.cache_format is None else group.cache_format.block_size
            # Its own seed: torch's generators are the user's.
            seed = random.SystemRandom().randrange(2**31)
            work = workload(group, steps(spec, phase, block), seed, checks=False)
            work.remembered().run()
            wrong = (each for each in work.errors() if not each[1] <= each[2])
            return next((said(*each) for each in wrong), None)
    except PolyattnError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # whatever a vendor's library does isn't our end
        return describe(error)


def said(what: str, error: float, allowed: float) -> str:
    """Say by how much something is wrong."""
    return f"its {what} is wrong: error {error:.2g}, allowed {allowed:g}"


def steps(spec: LayerSpec, phase: str, block: int) -> Lengths:
    """Return a small step of a phase, long enough for the windows, chunks and kept tokens of its layer.

    A decode stands beyond them. Of a prefill, one row begins before they end, where keys lie to the
    right as well, and one stands beyond them.
    """
    if spec.recurrent is not None:
        return [(1, 5), (1, 1)] if phase == "decode" else [(0, 3), (70, 70), (5, 9)]
    seen = (spec.sliding_window or 0) + (spec.window_right or 0) + spec.sink_tokens
    far = min(max(seen, spec.chunk_size or 0), FARTHEST)
    if not spec.cached:
        rows = [(1, 1), (33, 33)]
        return rows if not far else [*rows, (min(far + 9, LONGEST_PROMPT),) * 2]
    if phase == "decode":
        beyond = [(1, far + block + 3)] if far else []
        return [(1, 1), (1, block + 1), (1, 3 * block), *beyond]
    beyond = [(min(far + 9, LONGEST_PROMPT),) * 2, (5, far + block + 3)] if far else []
    # A prefill that had a single token would be taken for a decode.
    return [(0, 1), (max(block, 2), max(block, 2) + 1), (5, max(3 * block, 6)), *beyond]
