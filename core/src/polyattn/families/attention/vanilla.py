"""VANILLA: what if the reference itself serves? Every feature, in float64 on the host; slow.

Where bits are specified, it computes those, in float32 on the tensors' device.

For looking a result up, not for speed. It is the definition that all others are held to, so the
conformance kit proves of it only how it is called.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyattn.device import Device
from polyattn.families.attention import reference, specified
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.cache.scales import write_output
from polyattn.runtime.program import Frame, Plan
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.decompose import absorbed
from polyattn.spec.kinds import Invariance
from polyattn.spec.layer import LayerSpec


class Vanilla(AttentionBackend):
    """Attention by `reference.forward`: copied to the host, computed in float64, copied back."""

    name: ClassVar[str] = "VANILLA"

    def run(self, plan: Plan, frame: Frame) -> None:
        batch = plan.batch.measured() if self.spec.length_bounds else plan.batch
        if self.spec.batch_invariant >= Invariance.MACHINES:
            specified.run(self.spec_of(batch), batch, frame)
            return
        result, found_lse = reference.forward(
            self.spec_of(batch), frame.query, frame.key, frame.value, frame.cache, batch, frame.params,
            torch.float64, transformed=True,
        )  # fmt: skip
        write_output(frame.out, result, frame.params.out_scale)
        if frame.lse is not None:
            frame.lse.copy_(found_lse)


class VanillaMLA(Vanilla):
    """An absorbed decode is attention with one KV head: the latent and its rope key."""

    name: ClassVar[str] = "VANILLA_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)
