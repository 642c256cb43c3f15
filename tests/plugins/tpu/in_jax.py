"""Runs the kit through torchax: `-p in_jax --polyattn-device jax`. The kit itself stays on the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
from ferry import HostGroup, HostLayer
from polyattn.conformance.harness import base
from polyattn.families.attention import workload as attention
from polyattn.families.mla import workload as mla
from polyattn.families.recurrent import workload as recurrent


def pytest_configure() -> None:
    """Let workloads build groups and layers in JAX, and draw their numbers on the host."""
    base.LayerGroup = HostGroup  # type: ignore[assignment,misc]
    for module, name in (
        (attention, "Attention"),
        (mla, "LatentAttention"),
        (recurrent, "Recurrent"),
    ):
        setattr(module, name, functools.partial(HostLayer, getattr(module, name)))
    begin = base.Harness.__init__

    def on_host(harness: base.Harness, *given: Any) -> None:
        begin(harness, *given)
        harness.dice.device = torch.device("cpu")

    base.Harness.__init__ = on_host  # type: ignore[method-assign]
