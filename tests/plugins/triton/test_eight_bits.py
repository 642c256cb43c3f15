"""TRITON_ATTN's prefill multiplies e4m3 numbers where a layer lets weights be rounded to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interpreting import interpreted
from polyattn import LayerSpec

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "eight_bits.py"
SPEC = LayerSpec(
    num_heads=8, num_kv_heads=2, head_size=128, kv_cache_dtype="fp8_e4m3", qkv_dtype="fp8_e4m3",
    block_size=16,
)  # fmt: skip


@pytest.mark.slow
def test_interpreted() -> None:
    told = interpreted(SCRIPT, PYTHONPATH=str(Path(__file__).parents[2]))
    assert all(f"{name}: off by" in told for name in ("numbers", "by head", "window"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "rounds", "wanted"),
    [("sm_89", True, "e4m3"), ("sm_89", False, "f16"), ("sm_90", True, "f16")],
)
def test_compiled(arch: str, rounds: bool, wanted: str) -> None:
    """Both products are of e4m3 numbers, or neither is: then they are made float16."""
    from ahead import compile_phase

    asm = compile_phase(SPEC.replace(fp8_compute=rounds), arch, "paged").asm["ptx"]
    products = re.findall(r"mma(?:\.sync|_async)\.\S+?f32\.(\w+)\.(\w+)", asm)
    assert products and {kind for pair in products for kind in pair if kind != "f32"} == {wanted}


def test_which_chips_multiply_them() -> None:
    from polyattn_triton.variants import multiplies_eight_bits

    spec = SPEC.replace(fp8_compute=True)
    chips = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")
    found = [chip for chip in chips if multiplies_eight_bits(spec, chip)]
    assert found == ["sm_89", "sm_100", "sm_120", "gfx950"]
    for other in ({"qkv_dtype": "auto"}, {"fp8_compute": False}):
        assert not multiplies_eight_bits(spec.replace(**other), "sm_89")
