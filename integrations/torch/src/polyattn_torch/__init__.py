"""torch's own attention functions on polyattn.

    import polyattn_torch

    with polyattn_torch.SdpaMode():          # forward only: every scaled_dot_product_attention inside
        model(x)

    from torch.nn.attention import activate_flash_attention_impl
    activate_flash_attention_impl("polyattn")   # with gradients: torch's flash operators themselves

Unserved calls go to torch's own kernels, with one warning. `report()` counts and names them.
"""

from __future__ import annotations

from torch.nn.attention import register_flash_attention_impl

from polyattn_torch.ledger import LEDGER
from polyattn_torch.mode import SdpaMode, scaled_dot_product_attention
from polyattn_torch.operators import Operators

register_flash_attention_impl("polyattn", register_fn=Operators)
report, reset = LEDGER.report, LEDGER.reset

__all__ = ["SdpaMode", "report", "reset", "scaled_dot_product_attention"]
