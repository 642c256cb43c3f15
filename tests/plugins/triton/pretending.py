"""What would TRITON_ATTN launch of Hopper's own prefill on an H200?"""

from __future__ import annotations

from typing import Any

import pytest
from polyattn import Device, LayerSpec
from polyattn.kernel import CacheFormat
from polyattn_triton import planning
from polyattn_triton.attention import TritonAttention
from polyattn_triton.hopper import choice as hopper
from polyattn_triton.hopper import prefill as prefill_hopper
from polyattn_triton.hopper.choice import HopperPrefill, hopper_config


def pretended(
    monkeypatch: pytest.MonkeyPatch, spec: LayerSpec
) -> tuple[TritonAttention, list[dict[str, Any]]]:
    """A backend that takes this machine for an H200, and what it launches."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        arg_names = prefill_hopper.prefill_hopper_kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **options: Any) -> None:
                named = dict(zip(self.arg_names, given, strict=True))
                launched.append(named | {"grid": grid, "options": options})

            return launch

    monkeypatch.setattr(hopper, "prefill_hopper_kernel", Kernel())
    monkeypatch.setattr(
        planning, "hopper_prefill",
        lambda spec, arch, _, own: HopperPrefill(spec, hopper_config(spec, arch), 132, 35 << 20, own),
    )  # fmt: skip
    form = CacheFormat(
        block_size=16, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
        v_head_size=spec.v_head_size, dtype=spec.stored_dtype,
    )  # fmt: skip
    backend = TritonAttention(spec, form, Device("cuda", "sm_90", torch_device="cpu"))
    backend.num_sms = 132
    return backend, launched
