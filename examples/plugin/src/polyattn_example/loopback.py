"""The kernel side of LOOPBACK_ATTN: another backend, through the same door. To count, time or log calls.

With `EXAMPLE_LOOPBACK=1` it is declared, claims what TORCH_SDPA does and ranks above all others, so that
every layer that TORCH_SDPA can serve runs through a plugin that knows nothing of polyattn but its doors.
"""

from __future__ import annotations

from typing import ClassVar

from polyattn.kernel import AttentionBackend, Batch, CacheFormat, Device, Frame, LayerSpec, Plan
from polyattn_cpu.sdpa import TorchSDPA


class LoopbackAttention(AttentionBackend):
    """Hands every call on. `runs` counts them."""

    name: ClassVar[str] = "LOOPBACK_ATTN"
    runs: ClassVar[int] = 0

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device) -> None:
        super().__init__(spec, cache, device)
        self.inner = TorchSDPA(spec, cache, device)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        return self.inner.plan(batch, reuse)

    def run(self, plan: Plan, frame: Frame) -> None:
        LoopbackAttention.runs += 1
        self.inner.run(plan, frame)
