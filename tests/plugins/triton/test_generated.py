"""Functions of scores in Triton: generated, kept by content, interpreted, compiled for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forks import python
from interpreting import interpreted
from polyattn import AttentionVariant, LayerSpec, register_variant, unregister_variant
from torch import Tensor

pytest.importorskip("triton")

from polyattn.kernel import Pointwise, trace
from polyattn_triton.functions.pointwise import Generated, variant_problem
from polyattn_triton.functions.source import source

FAMILIES = Path(__file__).parents[2] / "families"
BASE = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
CAPTURED = torch.tensor([0.5, 2.0])


def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.clamp(30.0 * torch.tanh(score / 30.0), -25.0, 25.0) * CAPTURED[h % 2]


def gamma(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.lgamma(score)


def branching(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score if q_idx > kv_idx else score * 2


@pytest.fixture
def spec() -> Iterator[LayerSpec]:
    register_variant(AttentionVariant(name="capped_here", score_mod=capped))
    yield BASE.replace(variant="capped_here")
    unregister_variant("capped_here")


@pytest.mark.slow
def test_right_in_the_interpreter(tmp_path: Path) -> None:
    variables = {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": f"{FAMILIES}{os.pathsep}{FAMILIES.parent}",
    }
    script = Path(__file__).with_name("interpreted_variants.py")
    assert interpreted(script, seconds=1200, **variables) == "right\n"
    assert len(list((tmp_path / "polyattn").glob("polyattn_generated_*.py"))) >= 8


KEYS = """
import sys
from polyattn_triton.kernels.decode import decode_kernel
from polyattn_triton.launch import settle
from polyattn_triton.kernels.mla import mla_kernel
from polyattn_triton.kernels.prefill import prefill_kernel
from polyattn_triton.kernels.tile_lists import list_kernel
kernels = [decode_kernel, list_kernel, mla_kernel, prefill_kernel]
for kernel in kernels[::int(sys.argv[1])]:
    settle(kernel)
print([kernel.cache_key for kernel in kernels])
"""


@pytest.mark.slow
def test_a_kernel_s_key_depends_on_no_order(tmp_path: Path) -> None:
    """Else what one process has compiled, another that begins with another kernel compiles again."""
    told = [
        subprocess.run(
            [sys.executable, "-c", KEYS, order], capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        ).stdout
        for order in ("1", "-1")
    ]  # fmt: skip
    assert told[0] == told[1] and len(told[0]) > 200


@pytest.mark.slow
def test_no_step_compiles_what_the_group_did_not(tmp_path: Path) -> None:
    script = Path(__file__).with_name("interpreted_warm_up.py")
    told = interpreted(script, seconds=1200, TRITON_CACHE_DIR=str(tmp_path))
    assert told == "none is late\n"


@pytest.mark.slow
def test_a_group_compiles_before_its_first_step(tmp_path: Path) -> None:
    """For an sm_90 that is not here: decodes whole, by splits, by stretches, of many; few tokens."""
    script = Path(__file__).with_name("compiled_warm_up.py")
    told = []
    for _ in range(2):
        asked = '{"variant": "flash_sigmoid"}'
        ran = python(script, asked, "decode", seconds=1200, TRITON_CACHE_DIR=str(tmp_path))
        assert ran.returncode == 0, ran.stderr[-3000:]
        told.append({name: int(n) for name, n in map(str.split, ran.stdout.splitlines())})
    first, again = told
    assert first["decode_kernel"] >= 4
    assert again == first | {"here": 0, "elsewhere": 0}
    if len(os.sched_getaffinity(0)) > 1:
        assert not first["here"] and first["elsewhere"] > 1


@pytest.mark.parametrize("phase", ["split", "prefill"])
def test_compiles_to_machine_code(spec: LayerSpec, phase: str) -> None:
    from ahead import compile_phase

    plain = compile_phase(BASE, "sm_90", phase)
    found = compile_phase(spec, "sm_90", phase)
    assert found.metadata.shared <= 227 << 10
    # torch's clamp keeps NaN, which a GPU's own minimum and maximum drop.
    for name in ("min.NaN.f32", "max.NaN.f32"):
        assert name in found.asm["ptx"] and name not in plain.asm["ptx"]


OF_SCORES = (
    {"variant": "flash_sigmoid"}, {"variant": "relative_bias"}, {"mask": "custom"},
    {"mask": "block_sparse", "variant": "vision_local"},
)  # fmt: skip
WITH_ALL = OF_SCORES[-1]
"""What reads a step's table beside a function: what CI compiles for an AMD chip."""


@pytest.mark.parametrize(
    ("arch", "whole", "fields"),
    [
        pytest.param(
            arch, whole, fields,
            marks=pytest.mark.sweep
            if whole or (arch == "gfx942" and fields is not WITH_ALL)
            else pytest.mark.slow,
            id=f"{fields}-{arch}-{whole}",
        )
        for arch, whole in (
            ("sm_90", False), ("gfx942", False), ("sm_90", True), ("sm_80", True), ("gfx942", True),
        )
        for fields in OF_SCORES
    ],
)  # fmt: skip
def test_core_s_own_compile(arch: str, whole: bool, fields: dict[str, str]) -> None:
    from ahead import phases_of

    layer = BASE.replace(**fields)
    kind = "cubin" if arch.startswith("sm_") else "hsaco"
    phases = phases_of(layer, arch)
    if not whole:  # each kernel once, in the way that has most of the functions in it
        last = "paged pieces listed" if "list" in phases else "paged pieces"
        wanted = phases.keys() & {"listed", last, "list", "merge listed"}
        phases = {phase: phases[phase] for phase in wanted}
        assert len(phases) >= 3
    assert all(len(launch.compiled(arch).asm[kind]) > 500 for launch in phases.values())


def test_what_cannot_be_generated_is_named() -> None:
    unknown = AttentionVariant(name="gamma", score_mod=gamma)
    assert "'lgamma'" in str(variant_problem(unknown))
    branch = AttentionVariant(name="branching", score_mod=branching)
    assert "branching can't be traced" in str(variant_problem(branch))
    assert variant_problem(AttentionVariant(name="fine", score_mod=capped)) is None


def divided(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score / 30.0 + torch.floor(kv_idx / 49.0)


def test_only_a_score_is_multiplied_instead_of_divided() -> None:
    """A place is not: 49 times 1 / 49 is less than 1, and what is rounded down would be 0."""
    variant = AttentionVariant(name="divided", score_mod=divided)
    pointwise = Pointwise.of_variant(variant)
    told = source(trace(pointwise.score_mod, (), pointwise.inputs), softmax=True)
    assert f"x0 * {1 / 30!r}" in told and "/ 49.0" in told and told.count(" / ") == 1


def test_equal_functions_are_one_module(spec: LayerSpec) -> None:
    """Whatever they are called: Triton's cache on disk goes by the module's name and text."""
    register_variant(AttentionVariant(name="capped_again", score_mod=capped))
    try:
        again = Generated.of(spec.replace(variant="capped_again"))
        first = Generated.of(spec)
        assert first is not None and again is not None
        assert first.change is again.change and first.rows_of is again.rows_of
        captured = first.trace.captured(torch.device("cpu"))()
        assert captured["captured_0"].tolist() == CAPTURED.tolist()
    finally:
        unregister_variant("capped_again")
