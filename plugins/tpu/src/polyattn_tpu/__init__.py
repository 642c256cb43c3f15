"""TPUs: ragged paged attention in Pallas, recurrences in XLA; for torch tensors in JAX, and for JAX.

The names below are the door for JAX: pure functions over plans, which import no torch. Only `torchax()`
belongs to the other door: it imports torchax, in whose environment torch's tensors live in JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyattn_tpu.buckets import Buckets
    from polyattn_tpu.functions import (
        Cache,
        Scales,
        attend,
        attend_bounded,
        attend_given,
        functions_of,
        merge,
        store,
    )
    from polyattn_tpu.latent import attend_expanded, attend_latent, attend_rows, plan_expanded
    from polyattn_tpu.planning import AttentionPlan, RecurrentPlan, pad, plan
    from polyattn_tpu.recurrence import recur
    from polyattn_tpu.step import Step
    from polyattn_tpu.torchax_env import torchax

_HOME = {
    "AttentionPlan": "planning", "Buckets": "buckets", "Cache": "functions", "BatchError": "planning",
    "RecurrentPlan": "planning", "Scales": "functions", "Step": "step", "attend": "functions",
    "attend_bounded": "functions", "attend_expanded": "latent", "attend_given": "functions",
    "attend_latent": "latent", "attend_rows": "latent", "merge": "functions", "pad": "planning",
    "plan": "planning",
    "functions_of": "functions", "plan_expanded": "latent", "recur": "recurrence", "store": "functions",
    "torchax": "torchax_env",
}  # fmt: skip

__all__ = [
    "AttentionPlan",
    "Buckets",
    "Cache",
    "RecurrentPlan",
    "Scales",
    "Step",
    "attend",
    "attend_bounded",
    "attend_expanded",
    "attend_given",
    "attend_latent",
    "attend_rows",
    "functions_of",
    "merge",
    "pad",
    "plan",
    "plan_expanded",
    "recur",
    "store",
    "torchax",
]


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use: the hooks import this package without JAX."""
    if name not in _HOME:
        raise AttributeError(f"module 'polyattn_tpu' has no attribute {name!r}")
    value = getattr(import_module(f"polyattn_tpu.{_HOME[name]}"), name)
    globals()[name] = value
    return value
