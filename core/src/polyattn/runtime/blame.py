"""Whose kernel raised? A note beside what a library says, which names neither backend nor layer."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.errors import PolyattnError, shown
from polyattn.runtime.backend import Loaded


def blame(error: Exception, step: Any) -> None:
    """Note on an error which backend raised it, and what to try. polyattn's own errors say so themselves.

    Args:
        error: what a step raised.
        step: the plan that ran.

    """
    if isinstance(error, PolyattnError | torch.OutOfMemoryError) or hasattr(error, "__notes__"):
        return
    raised, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        raised = owner if isinstance(owner, Loaded) else raised
        trace = trace.tb_next
    if raised is None:
        return
    name = f"{type(raised).__module__}.{type(raised).__qualname__}"
    phases = [f"{call.name} for {call.phase}" for call in step.calls if call.backend is raised]
    error.add_note(
        f"polyattn: raised by {', '.join(phases) or name}, of {raised.spec}, in a step of query_lens="
        f"{shown([*step.batch.query_lens])}, lens={shown([*step.batch.lens])}. POLYATTN_CHECKS=1 checks "
        "the lengths and tables of each step; POLYATTN_BACKEND=NAME tries another backend"
    )
