"""Does TRITON_ATTN turn cached keys by exact frequencies, in few registers? `test_ragged.py` runs it."""

from __future__ import annotations

import math

import pytest
import torch
from polyattn import LayerSpec, select
from polyattn.spec.rope import RopeSpec

pytest.importorskip("triton")
from ahead import compile_phase, phases_of
from polyattn_triton.turn_table import turns

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
STREAM = SPEC.replace(
    sliding_window=1020, sink_tokens=4, rope=RopeSpec(rotary_size=128, positions="cache")
)
PART = SPEC.replace(rope=RopeSpec(rotary_size=48, pairing="gptj", positions="cache"))


def test_the_frequencies_are_exact_in_two_parts() -> None:
    """Where the kernel's whole turns are subtracted first, a million tokens turn as float64 says."""
    rope = RopeSpec(rotary_size=128, base=5e5, positions="cache")
    table = turns(rope, 32, torch.device("cpu"))
    high, low = table[4:68], table[68:132]
    exact = 5e5 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128) / (2 * math.pi)
    assert float((high.double() + low.double() - exact).abs().max()) * 1e6 < 1e-8
    cosines = table[132:].view(32, 2, 64)[:, 0].double()
    places = torch.arange(32, dtype=torch.float64)[:, None]
    torch.testing.assert_close(cosines, (places * exact * 2 * math.pi).cos(), rtol=0, atol=1e-7)


def test_frequencies_that_follow_the_length_are_refused_by_name() -> None:
    rope = RopeSpec(
        rotary_size=128, positions="cache", scaling="dynamic", factor=2.0, original_length=4096
    )
    verdicts = select(SPEC.replace(rope=rope), "h200").decision.verdicts()
    refused = [v for v in verdicts if v.backend == "TRITON_ATTN"]
    assert refused and all("cache_positions_by_length" in str(v.rejections) for v in refused)


def test_decode_compiles_without_spilling_much() -> None:
    from machine_code import usage

    taken = usage(compile_phase(STREAM, "sm_90", "decode").asm["cubin"])
    assert taken["STACK"] <= 64  # two warps a program spilled 240


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_each_kernel_compiles(arch: str) -> None:
    """A stream on AMD, and a part over bfloat16, have less to do: the sweep compiles them."""
    specs = [PART.replace(kv_cache_dtype="fp8_e4m3"), *[STREAM] * (arch == "sm_90")]
    for spec in specs:
        for phase in ("listed", "paged pieces"):
            assert compile_phase(spec, arch, phase).asm


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_every_phase_compiles(arch: str) -> None:
    for spec in (STREAM, PART, PART.replace(kv_cache_dtype="fp8_e4m3")):
        assert all(launch.compiled(arch).asm for launch in phases_of(spec, arch).values())
