"""What the MLA adapters share: the absorbed query `[latent, rope]` and rows of 512 + 64.

An MLA prefill is expanded and never comes here.
"""

from __future__ import annotations

import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    LayerSpec,
    Plan,
    empty_rows,
)
from torch import Tensor


class LatentPlan(Plan):
    """Tokens that see no key. For a captured step the capture marks them."""

    __slots__ = ("empty",)

    def __init__(self, batch: Batch, reuse: Plan | None = None):
        super().__init__(batch)
        known = reuse.empty if isinstance(reuse, LatentPlan) else empty_rows(batch)
        self.empty: Tensor | None = known


class LatentAdapter(AttentionBackend):
    """A library's decode over the latent cache."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        assert spec.latent is not None
        self.rank, self.rope = spec.latent.rank, spec.latent.rope_head_size
        self.torch_device = torch.device(str(device.torch_device))

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        return LatentPlan(batch, reuse)
