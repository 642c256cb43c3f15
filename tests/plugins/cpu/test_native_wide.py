"""Are wide heads over chosen keys right by NATIVE_ATTN, K = V caches among them?"""

from __future__ import annotations

import pytest
from polyattn import LayerSpec, SparseSpec, resolve_device
from polyattn.conformance.case import Case
from polyattn.conformance.checks.table import run_case
from polyattn_cpu.native import library

pytestmark = [
    pytest.mark.skipif(library.why_not() is not None, reason=f"native: {library.why_not()}"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("isa", library.isas() if library.why_not() is None else ())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [256, 257, 320, 512, 576])
def test_wide_heads_agree_with_float64(monkeypatch, isa, dtype, size):
    """Published sizes, and one more than 256; 8 heads, and 64 whose keys are their values."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    for heads, own_value in ((8, False), (64, True)):
        spec = LayerSpec(
            kind="sparse", num_heads=heads, num_kv_heads=1, head_size=size, dtype=dtype, needs_lse=True,
            v_head_size=min(size, 512) if own_value else size, block_size=16,
            sparse=SparseSpec(budget=40, value_in_key=own_value),
        )  # fmt: skip
        run_case(Case("sparse", "wide", spec, "choices"), "NATIVE_ATTN", resolve_device("cpu"), 1)
