"""What would TRITON_ATTN launch of Hopper's own prefill on an H200?"""

from __future__ import annotations

from typing import Any

import pytest
from chips import h200
from polyattn import Device, LayerSpec
from polyattn.selection.cache_format import format_of
from polyattn_triton import launch, planning
from polyattn_triton.attention import TritonAttention
from polyattn_triton.hopper import choice as hopper
from polyattn_triton.hopper import prefill as prefill_hopper
from polyattn_triton.schedule import Rates


def pretended(
    monkeypatch: pytest.MonkeyPatch, spec: LayerSpec
) -> tuple[TritonAttention, list[dict[str, Any]]]:
    """A backend that takes this machine for an H200, and what it launches."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        arg_names = prefill_hopper.prefill_hopper_kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            def noted(*given: Any, **options: Any) -> None:
                named = dict(zip(self.arg_names, given, strict=True))
                launched.append(named | {"grid": grid, "options": options})

            return noted

    monkeypatch.setattr(hopper, "prefill_hopper_kernel", Kernel())
    monkeypatch.setattr(launch, "facts", h200())
    device = Device("cuda", "sm_90", torch_device="cpu")
    return TritonAttention(spec, format_of(spec, device, "NHD", 16), device), launched


def merging_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have backends that are made from here on cut small steps, too."""
    monkeypatch.setattr(planning, "MERGE", 0)
    monkeypatch.setattr(planning, "RATES", Rates(planning.RATES.item, planning.RATES.least))
