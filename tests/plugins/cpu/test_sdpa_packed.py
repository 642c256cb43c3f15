"""Does TORCH_SDPA hand an NVIDIA GPU's step to torch's kernels as their signatures want it?"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from kits import kit
from polyattn import Device, LayerGroup, LayerSpec, select
from polyattn.workload.base import workload
from polyattn_cpu import packed, sdpa
from polyattn_cpu.packed import packs
from torch_kernels import flash
from torch_operators import Operators

CASES = "window or alibi or v_head or padding or offset or fp8_e4m3 or float32"


@pytest.mark.slow
def test_the_kit_passes_on_formulas_in_the_kernels_place() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parents[1])))
    ran, counts = kit("TORCH_SDPA", "-p", "torch_kernels", "-k", CASES, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert counts["failed"] == counts["skipped"] == 0 and counts["passed"] >= 100
    calls = re.search(r"stand-in calls: flash (\d+), efficient (\d+), dense (\d+)", ran.stdout)
    assert calls is not None and int(calls[1]) > 100 and int(calls[2]) > 10 and int(calls[3])


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


def test_a_sequence_without_queries_beside_single_tokens(monkeypatch) -> None:
    gpu = Device("cuda", "sm_90")
    monkeypatch.setattr(sdpa, "packs", lambda spec, device: packs(spec, gpu))
    monkeypatch.setattr(packed, "FLASH", flash)
    spec = LayerSpec(num_heads=8, num_kv_heads=1, head_size=64, cached=False, needs_lse=True)
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SDPA"))
    workload(group, [(1, 9), (0, 5), (1, 30)], 1).check()


@pytest.mark.parametrize("fields", [{"cached": False, "causal": False}, {"num_kv_heads": 2}])
def test_rows_alike_are_one_public_call_and_a_copy_of_its_output(monkeypatch, fields) -> None:
    """64 images of 577 took twice as long as torch's own call on an H100."""
    gpu, calls = Device("cuda", "sm_90"), []
    monkeypatch.setattr(sdpa, "packs", lambda spec, device: packs(spec, gpu))
    monkeypatch.setattr(sdpa.TorchSDPA, "_fused", False)
    public = packed.DENSE

    def noted(*tensors, **options):
        calls.append(options)
        return public(*tensors, **options)

    monkeypatch.setattr(packed, "DENSE", noted)
    spec = LayerSpec(**{"num_heads": 4, "head_size": 64, **fields})
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SDPA"))
    work = workload(group, [(9, 9)] * 3, 1, step={"spare": 0})
    work.check()
    assert calls == [{"is_causal": spec.causal, "scale": 0.125, "enable_gqa": spec.gqa_ratio > 1}]
    copies = []  # how many elements each operator took that copies

    def note(name, args, result):
        if name.split(".")[1] in ("copy_", "clone", "_to_copy", "index", "index_select"):
            copies.append(args[0].numel())

    with Operators(note):
        work.call()
    large = [count for count in copies if count >= work.out.numel()]
    assert len(calls) == 2 and large == [work.out.numel()]
