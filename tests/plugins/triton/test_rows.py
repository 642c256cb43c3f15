"""Do Triton's kernels for any format's rows compile to machine code? `test_edges.py` interprets them."""

from __future__ import annotations

import pytest
from polyattn import LayerSpec

pytest.importorskip("triton")
sweep = pytest.mark.sweep
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="nvfp4", block_size=16)


@pytest.mark.parametrize(
    "phase", ["decode", *(pytest.param(p, marks=pytest.mark.slow) for p in ("paged", "write"))]
)
def test_compiles_to_machine_code(phase: str) -> None:
    from ahead import compile_phase

    kernel = compile_phase(SPEC, "sm_90", phase)
    assert len(kernel.asm["cubin"]) > 500 and kernel.metadata.shared <= 227 << 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "nvfp4", "kivi4", "kivi2"])
def test_a_multiprocessor_holds_twelve_programs_of_packed_rows(name: str) -> None:
    from ahead import compile_phase
    from polyattn_triton.hopper.packing import PLACES
    from polyattn_triton.variants import FEW_ON_ONE
    from test_triton import programs_on_one

    spec = SPEC.replace(kv_cache_dtype=name)
    for way, layout in (("decode", "NHD"), ("many", "NHD"), ("listed", "NHD"), ("listed", "HND")):
        kernel = compile_phase(spec, "sm_90", way, own=True, layout=layout)
        assert programs_on_one(kernel, 160) >= FEW_ON_ONE * PLACES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp4", "e4m3_rows", "int8_rows", "turboquant4"])
def test_a_multiprocessor_holds_four_programs_of_four_stages(name: str) -> None:
    from ahead import compile_phase
    from polyattn_triton.variants import MANY_ON_ONE
    from test_triton import programs_on_one

    spec = SPEC.replace(kv_cache_dtype=name)
    kernel = compile_phase(spec, "sm_90", "decode", own=True)
    assert programs_on_one(kernel, 160) >= MANY_ON_ONE
    assert kernel.metadata.shared * MANY_ON_ONE <= 227 << 10


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_needs_no_small_types_of_the_device(arch: str) -> None:
    """e2m1 and e4m3 are read as float16's bits: chips that know neither serve it, too."""
    from ahead import compile_phase

    for phase in ("decode", "write"):
        kernel = compile_phase(SPEC, arch, phase)
        assert len(kernel.asm["cubin" if arch.startswith("sm_") else "hsaco"]) > 500


FORMATS = (
    "nvfp4", "int4", "mxfp4", "kivi2", "turboquant4", "int8_rows", "e4m3_rows", "int8_rows/int4",
)  # fmt: skip
IN_HALVES = ("nvfp4", "kivi2", "int8_rows")
"""Floats, integers of a part of a byte and of a whole one, for queries of float16."""


@pytest.mark.parametrize(
    ("name", "dtype", "phases"),
    [
        *(
            pytest.param(n, "bfloat16", ("listed", "paged", "write"), marks=pytest.mark.slow)
            for n in FORMATS
        ),
        *(
            pytest.param(
                n, "float16", ("listed",), marks=pytest.mark.slow if n in IN_HALVES else sweep
            )
            for n in FORMATS
        ),
        *(pytest.param(n, "float16", ("paged",), marks=sweep) for n in FORMATS),
    ],
)
def test_every_format_compiles_to_machine_code(
    name: str, dtype: str, phases: tuple[str, ...]
) -> None:
    from ahead import compile_phase

    for phase in phases:
        kernel = compile_phase(SPEC.replace(kv_cache_dtype=name, dtype=dtype), "sm_90", phase)
        assert len(kernel.asm["cubin"]) > 500 and kernel.metadata.shared <= 227 << 10
        # A few scales of a byte may come alone; elements mustn't.
        assert phase == "write" or kernel.asm["ptx"].count("ld.global.b8") < 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_turning_compiles_to_machine_code(arch: str) -> None:
    from ahead import launches

    for dtype in ("bfloat16", "float16"):
        spec = SPEC.replace(kv_cache_dtype="turboquant4", dtype=dtype)
        turns = [one for one in launches(spec, arch, [(3, 40)]) if one.name == "turn_kernel"]
        assert len(turns) == 2  # queries, and outputs back
        assert all(one.compiled(arch).metadata.shared <= 48 << 10 for one in turns)
