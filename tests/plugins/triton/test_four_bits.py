"""Do Triton's kernels read and write nvfp4 caches? Interpreted beside torch, and as machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from polyattn import LayerSpec

pytest.importorskip("triton")
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="nvfp4", block_size=16)


@pytest.mark.slow
def test_interpreted() -> None:
    found = subprocess.run(
        [sys.executable, Path(__file__).with_name("four_bits.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split("\n")[:3] == ["numbers", "one tensor", "by head"]


@pytest.mark.parametrize("phase", ["decode", "paged", "write"])
def test_compiles_to_machine_code(phase: str) -> None:
    from triton_ahead import compile_phase

    kernel = compile_phase(SPEC, "sm_90", phase)
    assert len(kernel.asm["cubin"]) > 500 and kernel.metadata.shared <= 227 << 10


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_needs_no_small_types_of_the_device(arch: str) -> None:
    """e2m1 and e4m3 are read as float16's bits: chips that know neither serve it, too."""
    from triton_ahead import compile_phase

    for phase in ("decode", "write"):
        kernel = compile_phase(SPEC, arch, phase)
        assert len(kernel.asm["cubin" if arch.startswith("sm_") else "hsaco"]) > 500
