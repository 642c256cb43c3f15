"""Hugging Face diffusers on polyattn.

    import polyattn_diffusers                       # registers the name
    pipe.transformer.set_attention_backend("polyattn")
    print(polyattn_diffusers.report())              # what served, what fell back

Unserved calls fall back to diffusers' native backend, with one warning; the report counts and names them.
"""

from __future__ import annotations

from polyattn_diffusers.backend import LEDGER, add_name, attention

POLYATTN = add_name("polyattn", attention)
report, reset = LEDGER.report, LEDGER.reset

__all__ = ["POLYATTN", "report", "reset"]
