"""TRITON_INDEX: cases of its kit interpreted, and machine code for its targets."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreting import interpreted
from polyattn import IndexerSpec
from polyattn.conformance.cases.index import layer_for

pytest.importorskip("triton")

CASES = """
import polyattn_triton.index as index
from polyattn import discover, resolve_device
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive

device = resolve_device("cpu")
info = discover().backends["TRITON_INDEX"].builds_on("cpu")[-1]
cases = {case.id: case for case in derive(info, device)}
# Parts of 64 candidates, whose best are ranked again; then rows that are ranked at once.
steps = {"index-scaled-mixed": 64, "index-groups-bounds": 64, "index-blocks-decode": 8192}
for name, index.PART in steps.items():
    run_case(cases[name], "TRITON_INDEX", device, 1)
print("chosen")
"""
DSA = IndexerSpec(num_heads=64, head_size=128, budget=2048, cache_dtype="fp8_scaled")
BF16 = IndexerSpec(num_heads=64, head_size=128, budget=2048)
MSA = IndexerSpec(
    num_heads=4, head_size=128, budget=16, activation="none", fold="none", pool=128, forced_last=1
)
QSA = IndexerSpec(num_heads=4, head_size=128, budget=512, fold="sum", tokens_per_entry=4, tail=True)


@pytest.mark.slow
def test_it_chooses_as_the_kit_wants(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CASES)
    assert interpreted(script).strip() == "chosen"


@pytest.mark.parametrize(
    ("arch", "spec", "decode"),
    [
        pytest.param("sm_90", DSA, True, marks=pytest.mark.slow),
        pytest.param("sm_90", DSA, False, marks=pytest.mark.slow),
        pytest.param("sm_90", MSA, True, marks=pytest.mark.slow),
        pytest.param("sm_90", QSA, False, marks=pytest.mark.slow),
        pytest.param("sm_86", BF16, False, marks=pytest.mark.slow),
        pytest.param("sm_86", MSA, True, marks=pytest.mark.slow),
        pytest.param("gfx942", MSA, False, marks=pytest.mark.slow),
        pytest.param("gfx942", MSA, True, marks=pytest.mark.slow),
    ],
    ids=[
        "DSA decode",
        "DSA prompt",
        "MSA decode",
        "QSA prompt",
        "bf16, Ampere",
        "MSA, Ampere",
        "MSA prompt, AMD",
        "MSA decode, AMD",
    ],
)
def test_it_compiles_to_machine_code(arch: str, spec: IndexerSpec, decode: bool) -> None:
    from polyattn_triton.index import (
        PART,
        scores_constants,
        scores_options,
        select_constants,
        select_options,
    )
    from polyattn_triton.kernels.index import index_scores_kernel, index_select_kernel
    from triton_ahead import compile_kernel

    room = {"sm_90": 227, "sm_86": 99, "gfx942": 64}[arch]  # KiB
    kind = "cubin" if arch.startswith("sm_") else "hsaco"
    keys = "fp8e4nv" if spec.cache_dtype == "fp8_scaled" else "bf16"
    layer = layer_for(spec, "bfloat16")
    ints = dict.fromkeys(("TABLE", "STARTS", "LENS", "BUDGETS", "IDS"), "i32")
    scores = compile_kernel(
        index_scores_kernel, ints | {"Q": "bf16", "KEYS": keys},
        scores_constants(layer, 64, decode, arch), arch, scores_options(layer, arch),
    )  # fmt: skip
    select = compile_kernel(
        index_select_kernel, ints | {"HELD": "u8", "OUT": "i32"},
        select_constants(spec, PART, decode, decode, not decode), arch, select_options(PART, decode),
    )  # fmt: skip
    for kernel in (scores, select):
        assert len(kernel.asm[kind]) > 500 and kernel.metadata.shared <= room << 10
