"""Does a store rotate, quantise and place what the float64 formulas say? Every slot is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from polyattn.conformance.harness.rotation import RotationHarness
from polyattn.device import Device
from polyattn.runtime.program import StorePlan
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.spec.norm import NormSpec
from polyattn.spec.rope import RopeSpec

CPU = Device("cpu", "x86_64", torch_device="cpu")
OWN_ERRORS = 1e-6
"""Our own stores' are smaller than what the kit allows."""


def rope(**changes: Any) -> RopeSpec:
    return RopeSpec(**({"rotary_size": 24, "base": 500.0, "attention_factor": 1.25} | changes))


def specs(
    dtypes: tuple[str, ...], stored: tuple[str, ...]
) -> Iterator[tuple[str, LayerSpec, str, bool]]:
    """Yield (label, spec, layout, biased): each way once with each dtype, not each with each."""
    base = LayerSpec(num_heads=6, num_kv_heads=3, head_size=24, dtype=dtypes[0], rope=rope())
    latent = LatentSpec(rank=16, rope_head_size=8)
    mla = LayerSpec(
        kind=AttentionKind.MLA, num_heads=3, head_size=20, v_head_size=12, latent=latent,
        dtype=dtypes[0], rope=rope(rotary_size=8),
    )  # fmt: skip
    warm = {"temperature": 0.1, "temperature_length": 100}
    ways: list[tuple[str, LayerSpec, str, bool]] = [
        ("whole", base, "NHD", False),
        ("whole HND", base, "HND", True),
        ("part", base.replace(rope=rope(rotary_size=8)), "NHD", True),
        ("part of six", base.replace(rope=rope(rotary_size=6)), "HND", False),
        ("odd values", base.replace(v_head_size=10, rope=rope(rotary_size=12)), "NHD", True),
        ("one head", base.replace(num_heads=1, num_kv_heads=1), "NHD", True),
        (
            "warm, clockwise",
            base.replace(rope=rope(**warm, temperature_power=0.2, clockwise=True)),
            "NHD",
            False,
        ),
        ("temperature alone", base.replace(rope=rope(rotary_size=0, **warm)), "NHD", True),
        ("latent", mla, "NHD", False),
        ("normed", base.replace(qk_norm=NormSpec(eps=0.1)), "HND", True),
        (
            "normed tokens",
            base.replace(qk_norm=NormSpec(over="token"), rope=rope(rotary_size=8)),
            "NHD",
            True,
        ),
    ]
    for label, spec, layout, biased in ways:
        assert spec.rope is not None
        for pairing in ("neox", "gptj") if spec.rope.rotary_size else ("neox",):
            turned = {f: getattr(spec.rope, f) for f in RopeSpec.__dataclass_fields__}
            made = spec.replace(rope=RopeSpec(**turned | {"pairing": pairing}))
            for dtype, form in itertools.product(dtypes, stored):
                yield (
                    f"{label}, {pairing}, {dtype}, {form}",
                    made.replace(dtype=dtype, kv_cache_dtype=form), layout, biased,
                )  # fmt: skip


def check(
    run: Any, spec: LayerSpec, layout: str, biased: bool, keep: bool, own_errors: float = OWN_ERRORS
) -> None:
    """Run `run_rotated` (of a store, or core's) over a step of the kit and look at all that it wrote."""
    harness = RotationHarness("TORCH_STORE", CPU, 0)
    harness.own_errors = own_errors
    step = harness.rotated(harness.group(spec, layout), 7, biased)
    for tensor in (step.new.query, step.new.key, step.new.value):
        tensor[step.slots < 0] = torch.nan
    store: Any = SimpleNamespace(
        plan=getattr(getattr(run, "__self__", None), "plan", StorePlan), run_rotated=run
    )
    harness.check_rotated(store, spec, step, keep)
