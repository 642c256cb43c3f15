"""Hugging Face transformers on polyattn.

    import polyattn_transformers                                    # registers the name
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="polyattn")
    print(polyattn_transformers.report())                           # what served, what fell back

Unserved calls fall back to the model's own eager attention, with one warning. The report counts them.
"""

from __future__ import annotations

from polyattn.host import Report
from transformers import AttentionInterface, AttentionMaskInterface

from polyattn_transformers.attention import attention
from polyattn_transformers.ledger import LEDGER
from polyattn_transformers.masks import make_mask
from polyattn_transformers.paged import continuous_batching_manager, set_batch_invariant

AttentionInterface.register("polyattn", attention)
AttentionMaskInterface.register("polyattn", make_mask)
report, reset = LEDGER.report, LEDGER.reset

__all__ = ["Report", "continuous_batching_manager", "report", "reset", "set_batch_invariant"]
