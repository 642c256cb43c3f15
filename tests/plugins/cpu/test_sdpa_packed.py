"""Does TORCH_SDPA hand an NVIDIA GPU's step to torch's kernels as their signatures want it?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kits import kit
from polyattn import Device, LayerSpec
from polyattn_cpu.packed import packs

CASES = "window or alibi or v_head or padding or offset or fp8_e4m3 or float32"


@pytest.mark.slow
def test_the_kit_passes_on_formulas_in_the_kernels_place() -> None:
    path = str(Path(__file__).parent)
    ran, counts = kit("TORCH_SDPA", "-p", "torch_kernels", "-k", CASES, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert counts["failed"] == counts["skipped"] == 0 and counts["passed"] >= 100
    calls = re.search(r"stand-in calls: flash (\d+), efficient (\d+)", ran.stdout)
    assert calls is not None and int(calls[1]) > 100 and int(calls[2]) > 10


@pytest.mark.parametrize(
    ("served", "fields"),
    [
        (True, {}),
        (True, {"sliding_window": 128}),
        (True, {"head_size": 512, "num_kv_heads": 1}),
        (True, {"dtype": "float32"}),
        (False, {"dtype": "float64"}),
        (False, {"dtype": "float32", "sliding_window": 128}),
        (False, {"logit_soft_cap": 30.0}),
        (False, {"head_size": 68}),
        (False, {"batch_invariant": True}),
        (False, {"chunk_size": 64}),
    ],
)
def test_a_layer_is_packed_where_a_kernel_has_an_argument_for_all_it_needs(served, fields) -> None:
    spec = LayerSpec(**{"num_heads": 8, "head_size": 128, "dtype": "bfloat16", **fields})
    assert packs(spec, Device("cuda", "sm_90")) is served
    assert not packs(spec, Device("cuda", "sm_75")) and not packs(spec, Device("cpu", "x86_64"))
