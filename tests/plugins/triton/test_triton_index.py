"""TRITON_INDEX: cases of its kit interpreted, and machine code for its targets."""

from __future__ import annotations

from dataclasses import replace
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
# Groups whose best are ranked first; parts of candidates, whose best are ranked again; rows at once.
steps = {"scaled-mixed": 64, "groups-bounds": 64, "level_1-mixed": 16, "blocks-decode": 8192}
for name, index.PART in steps.items():
    run_case(cases[f"index-{name}"], "TRITON_INDEX", device, 1)
index.arch_matches = lambda *_: True  # as on Hopper: halves of tiles, queries of 8 bits
run_case(cases["index-scaled-mixed"], "TRITON_INDEX", device, 1)
print("chosen")
"""
SAME = """
from polyattn import discover, resolve_device
from polyattn.conformance.checks import invariance
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive

device = resolve_device("cpu")
info = discover().backends["TRITON_INDEX"].builds_on("cpu")[-1]
cases = {case.id: case for case in derive(info, device)}
invariance.DRAWS = 6
run_case(cases["index_regrouped-size_128_steps-mixed"], "TRITON_INDEX", device, 1)
print("the same")
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


@pytest.mark.slow
def test_a_token_chooses_alike_in_any_batch_and_as_a_decode(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAME)
    assert interpreted(script).strip() == "the same"


@pytest.mark.parametrize(
    ("arch", "spec", "decode", "query"),
    [
        pytest.param("sm_90", DSA, True, "bf16", marks=pytest.mark.slow),
        pytest.param("sm_90", DSA, False, "bf16", marks=pytest.mark.slow),
        pytest.param("sm_90", DSA, False, "fp8e4nv", marks=pytest.mark.slow),
        pytest.param("sm_90", MSA, True, "bf16", marks=pytest.mark.slow),
        pytest.param("sm_90", QSA, False, "bf16", marks=pytest.mark.slow),
        pytest.param("sm_86", BF16, False, "bf16", marks=pytest.mark.slow),
        pytest.param("sm_86", MSA, True, "bf16", marks=pytest.mark.slow),
        pytest.param("gfx942", MSA, False, "bf16", marks=pytest.mark.slow),
        pytest.param("gfx942", MSA, True, "bf16", marks=pytest.mark.slow),
    ],
    ids=[
        "DSA decode",
        "DSA prompt",
        "DSA prompt, e4m3 queries",
        "MSA decode",
        "QSA prompt",
        "bf16, Ampere",
        "MSA, Ampere",
        "MSA prompt, AMD",
        "MSA decode, AMD",
    ],
)
def test_it_compiles_to_machine_code(
    arch: str, spec: IndexerSpec, decode: bool, query: str
) -> None:
    from polyattn_triton.index import (
        PART,
        group_of,
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
    layer, group = layer_for(spec, "bfloat16"), group_of(spec, 1 << 17)
    ints = dict.fromkeys(("TABLE", "STARTS", "LENS", "BUDGETS", "IDS"), "i32")
    scores = compile_kernel(
        index_scores_kernel, ints | {"Q": query, "KEYS": keys},
        scores_constants(layer, 64, decode, arch, group), arch, scores_options(layer, arch),
    )  # fmt: skip
    select = compile_kernel(
        index_select_kernel, ints | {"HELD": "u8", "OUT": "i32"},
        select_constants(spec, PART, decode, group * decode, not decode), arch,
        select_options(PART, 64 if decode else 4096),
    )  # fmt: skip
    for kernel in (scores, select):
        assert len(kernel.asm[kind]) > 500 and kernel.metadata.shared <= room << 10


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(("heads", "entry"), [(64, 1), (64, 4), (32, 1)], ids=["DSA", "V4", "GLM"])
def test_products_of_prompts_run_while_others_are_summed(
    heads: int, entry: int, group: int
) -> None:
    """Where ptxas can't follow them it waits for each instruction of a product, and says no word."""
    from machine_code import told
    from polyattn_triton.index import has_own_prompt, prompt_constants, prompt_scores_kernel
    from triton_ahead import compile_kernel

    spec = replace(DSA, num_heads=heads, tokens_per_entry=entry)
    assert has_own_prompt(layer_for(spec, "bfloat16"), 64, "sm_90")
    kernel = compile_kernel(
        prompt_scores_kernel,
        {"Q": "fp8e4nv", "KEYS": "fp8e4nv"} | dict.fromkeys(("TABLE", "STARTS", "LENS"), "i32"),
        prompt_constants(spec, 64, group), "sm_90", {"num_warps": 4},
    )  # fmt: skip
    code = told("nvdisasm", kernel.asm["cubin"], "-c")
    assert (code.count("QGMMA"), code.count("WARPGROUP.DEPBAR")) == (12, 3)
    assert kernel.metadata.shared <= 113 << 10  # two programs a multiprocessor
