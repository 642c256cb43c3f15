"""TRITON_INDEX: cases of its kit interpreted, and machine code for its targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from chips import h200
from interpreting import interpreted
from polyattn import Batch, IndexerSpec, LayerSpec, SparseSpec
from polyattn.conformance.cases.index import layer_for
from polyattn.families.sparse.index_workload import IndexWorkload
from polyattn.kernel import IndexFrame, Plan
from polyattn.workload.dice import Dice

pytest.importorskip("triton")
from ahead import CPU, Launch, Lengths, device_of, recorded
from polyattn_triton import launch
from polyattn_triton.index import TritonIndex

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


@pytest.mark.parametrize("level", [False, True])
def test_a_grid_has_no_more_programs_than_its_second_axis_takes(level: bool) -> None:
    """At a level each token has a program of its own."""
    tokens = 70_000
    indexer = IndexerSpec(num_heads=1, head_size=16, budget=4, tokens_per_entry=8192)
    sparse = SparseSpec(budget=4, tokens_per_entry=8192)
    spec = LayerSpec(kind="sparse", num_heads=1, head_size=16, sparse=sparse, indexer=indexer)
    spec = replace(spec, batch_invariant=level)
    pieces: list[slice] = []
    backend = TritonIndex(spec, None, device_of("sm_90"))
    with patch.object(TritonIndex, "_piece", lambda self, *given: pieces.append(given[2])):
        backend.run(Plan(Batch.from_lens([tokens], [tokens])), IndexFrame(*[torch.zeros(0)] * 5))
    assert [each.start for each in pieces] == [0, *(each.stop for each in pieces[:-1])]
    assert pieces[-1].stop == tokens and all(each.stop - each.start <= 65535 for each in pieces)


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


def launched(spec: LayerSpec, arch: str, lengths: Lengths, page: int, narrow: bool) -> list[Launch]:
    """What scores a step's entries, then what chooses among them. `narrow`: queries come in e4m3."""
    work = IndexWorkload(spec, lengths, Dice(0, CPU), block=page)
    if narrow:
        work.frame.query = work.frame.query.to(torch.float8_e4m3fn)
    backend = TritonIndex(spec, None, device_of(arch))
    with patch.object(launch, "facts", h200()), recorded() as launches:
        backend.run(backend.plan(work.batch), work.frame)
    return launches


LONG = 1 << 17
"""Entries that are ranked in groups, and in parts, where an indexer may."""


@pytest.mark.parametrize(
    ("arch", "spec", "decode", "narrow"),
    [
        pytest.param("sm_90", DSA, True, False, marks=pytest.mark.slow),
        pytest.param("sm_90", DSA, False, False, marks=pytest.mark.slow),
        pytest.param("sm_90", DSA, False, True, marks=pytest.mark.slow),
        pytest.param("sm_90", MSA, True, False, marks=pytest.mark.slow),
        pytest.param("sm_90", QSA, False, False, marks=pytest.mark.slow),
        pytest.param("sm_86", BF16, False, False, marks=pytest.mark.slow),
        pytest.param("sm_86", MSA, True, False, marks=pytest.mark.slow),
        pytest.param("gfx942", MSA, False, False, marks=pytest.mark.slow),
        pytest.param("gfx942", MSA, True, False, marks=pytest.mark.slow),
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
    arch: str, spec: IndexerSpec, decode: bool, narrow: bool
) -> None:
    room = {"sm_90": 227, "sm_86": 99, "gfx942": 64}[arch]  # KiB
    kind = "cubin" if arch.startswith("sm_") else "hsaco"
    lengths = [(1 if decode else 20, LONG * spec.tokens_per_entry)]
    launches = launched(layer_for(spec, "bfloat16"), arch, lengths, 64, narrow)
    assert len({one.name for one in launches}) == 2
    for kernel in (one.compiled(arch) for one in launches):
        assert len(kernel.asm[kind]) > 500 and kernel.metadata.shared <= room << 10


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(("heads", "entry"), [(64, 1), (64, 4), (32, 1)], ids=["DSA", "V4", "GLM"])
def test_products_of_prompts_run_while_others_are_summed(
    heads: int, entry: int, group: int
) -> None:
    """Where ptxas can't follow them it waits for each instruction of a product, and says no word."""
    from machine_code import told

    spec = replace(DSA, num_heads=heads, tokens_per_entry=entry)
    lengths = [(20, entry * (900 if group == 1 else LONG))]
    launch = launched(layer_for(spec, "bfloat16"), "sm_90", lengths, 64, narrow=True)[0]
    assert launch.name == "prompt_scores_kernel" and group in launch.constants
    kernel = launch.compiled("sm_90")
    code = told("nvdisasm", kernel.asm["cubin"], "-c")
    assert (code.count("QGMMA"), code.count("WARPGROUP.DEPBAR")) == (12, 3)
    assert kernel.metadata.shared <= 113 << 10  # two programs a multiprocessor
