"""Hugging Face diffusers on polyattn.

    import polyattn_diffusers                       # registers the name
    pipe.transformer.set_attention_backend("polyattn")
    print(polyattn_diffusers.report())              # what served, what fell back

What can't be served falls back to diffusers' native backend: warned of once, counted, named.
"""

from __future__ import annotations

from polyattn_diffusers.backend import LEDGER, add_name, attention

POLYATTN = add_name("polyattn", attention)
report, reset = LEDGER.report, LEDGER.reset

__all__ = ["POLYATTN", "report", "reset"]
