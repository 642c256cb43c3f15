"""Is a chosen backend right on this machine? One tiny batch of each phase against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from polyattn.errors import PolyattnError, describe
from polyattn.registry.info import load_object
from polyattn.runtime.group import LayerGroup, on_the_host
from polyattn.selection.running import unrecorded
from polyattn.selection.selection import Selection
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.workload.base import workload
from polyattn.workload.steps import AT_CAP, Lengths

MOST = 1 << 24
"""Elements of one sequence's keys, over all query heads: 4,096 keys of 32 heads of 128. The reference
holds them in float64; longer windows and chunks are cut there, so that verification takes a second."""
MOST_SCORES = 1 << 22
"""Scores over all heads of a prompt, likewise: 362 tokens of 32 heads."""


def verify_decision(selection: Selection) -> dict[str, str]:
    """Return what went wrong with each backend that may run here and fails or is wrong.

    Those are the chosen backends, and with measured times every candidate that has some.
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
    index = chosen.get("index")
    if index is not None:
        problem = _index_problem(pair)
        if problem:
            wrong[index.name] = f"index: {problem}"
    return wrong


def _index_problem(selection: Selection) -> str | None:
    check = load_object("polyattn.families.sparse.index_workload:index_problem")
    try:
        with torch.no_grad(), on_the_host(), unrecorded():
            return check(selection, random.SystemRandom().randrange(2**31))  # type: ignore[no-any-return]
    except PolyattnError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # as below
        return describe(error)


def _problem(selection: Selection, phase: str) -> str | None:
    spec = selection.spec
    try:
        with torch.no_grad(), on_the_host(), unrecorded():
            group = LayerGroup(selection)
            block = 16 if group.cache_format is None else group.cache_format.block_size
            # Its own seed: torch's generators are the user's.
            seed = random.SystemRandom().randrange(2**31)
            how = {"numbers": AT_CAP} if spec.logit_soft_cap else {}
            beyond = steps(spec, phase, block)
            for lengths in filter(None, (beyond, within(spec, beyond))):
                work = workload(group, lengths, seed, step=how, checks=False)
                work.remembered().run()
                for each in work.errors():
                    if not each[1] <= each[2]:
                        return said(*each)
            return None
    except PolyattnError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # a vendor's library must not end the process
        return describe(error)


def said(what: str, error: float, allowed: float) -> str:
    """Return how far something is off, in words."""
    return f"its {what} is wrong: error {error:.2g}, allowed {allowed:g}"


def within(spec: LayerSpec, step: Lengths) -> Lengths:
    """Return the rows of a step that end within window and chunk, where a backend may take other kernels.

    Empty where the layer has neither, and where no such row has a query.
    """
    widths = [n for n in (spec.sliding_window, spec.chunk_size) if n]
    rows = [row for row in step if widths and row[1] <= min(widths)]
    return rows if any(queries for queries, _ in rows) else []


def steps(spec: LayerSpec, phase: str, block: int) -> Lengths:
    """Return a small step of a phase that reaches beyond its layer's window, chunk and sink tokens.

    Of a prefill, one sequence's queries begin before those end, where keys lie to the right as well.
    """
    if spec.recurrent is not None:
        return [(1, 5), (1, 1)] if phase == "decode" else [(0, 3), (70, 70), (5, 9)]
    seen = (spec.sliding_window or 0) + (spec.window_right or 0) + spec.sink_tokens
    reach = max(seen, spec.chunk_size or 0)
    keys = min(reach + 3, MOST // (spec.num_heads * spec.head_size))
    prompt = min(keys, MOST_SCORES // (spec.num_heads * keys))
    if not spec.cached:
        beyond = (prompt, keys if spec.role is Role.DECODER else prompt)
        return [(1, 1), (33, 33), beyond] if reach else [(1, 1), (33, 33)]
    if phase == "decode":
        return [(1, 1), (1, block + 1), (1, max(keys + block + 3 if reach else 0, 3 * block))]
    # A prefill that had a single token would be taken for a decode.
    rows = [(0, 1), (max(block, 2), max(block, 2) + 1), (5, max(3 * block, 6))]
    return [*rows, (prompt, keys), (5, keys + block + 3)] if reach else rows
